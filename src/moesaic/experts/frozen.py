"""Experts whose matrices are not trained, in NF4 or as they are, with adapters of low rank (LoRA)
or without.

An adapted matrix W computes `x W.T + (x inner.T) outer.T`, with `inner` (r, in) and `outer` (out,
r). Neither the adapters' product nor a dequantized matrix is ever formed: backward dequantizes
again, by the block or the tile. It saves the rows and the pre-activations, and computes no gradient
of a frozen matrix. On a mesh frozen tensors move like trained ones, as their bytes; of gradients
only those of the adapters move. Source: Hu et al., "LoRA" (2021); Dettmers et al., "QLoRA" (2023).

A unit is the part of an expert that one sent row holds: one hidden unit, or in NF4 the 64 of a
block, which share a scale. Shards of an expert divide its units: split tensors are cut by them,
common ones are whole in every shard. `ends` is one past the last of each expert's rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.experts.experts import (
    AbstractExperts,
    DeferredWgrad,
    ExpertCall,
    ExpertGradients,
    Weights,
    compute_dtype,
    in_dtype,
)
from moesaic.initial_values import Draw, draw_globally
from moesaic.kernels import grouped_matmul, nf4
from moesaic.kernels.activation import Clamp, hidden_gradient_into, hidden_rows, hidden_rows_into
from moesaic.kernels.permute import expert_of_rows
from moesaic.kernels.pick import kind_of
from moesaic.program.expert_sizes import ExpertSizes


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """The tensors of frozen experts. E: experts, C: 2 with a gate, else 1, H: hidden, D: dim, r: an
    adapter's rank."""

    up: Tensor
    """(E, C, H, D), the gate first; in NF4 its codes, (E, C, H, D / 2) uint8."""
    down: Tensor
    """(E, D, H); in NF4 its codes, (E, D, H / 2) uint8."""
    up_scales: Tensor | None = None
    """(E, C, H, D / 64) float32, in NF4 only."""
    down_scales: Tensor | None = None
    """(E, D, H / 64) float32, in NF4 only."""
    up_bias: Tensor | None = None
    """(E, C, H)."""
    down_bias: Tensor | None = None
    """(E, D)."""
    up_inner: Tensor | None = None
    """(E, r, D)."""
    up_outer: Tensor | None = None
    """(E, C, H, r)."""
    down_inner: Tensor | None = None
    """(E, r, H)."""
    down_outer: Tensor | None = None
    """(E, D, r)."""

    @property
    def form(self) -> Form:
        """Which of the tensors there are."""
        up_rank = 0 if self.up_inner is None else self.up_inner.shape[1]
        down_rank = 0 if self.down_inner is None else self.down_inner.shape[1]
        return Form(
            four_bit=self.up_scales is not None,
            bias=self.up_bias is not None,
            ranks=(up_rank, down_rank),
        )


SPLIT = {
    "up": 2,
    "down": 2,
    "up_scales": 2,
    "down_scales": 2,
    "up_bias": 2,
    "up_outer": 2,
    "down_inner": 2,
}
"""The tensors that shards of an expert split, with the dimension of the hidden units."""
COMMON = ("up_inner", "down_outer", "down_bias")
"""The tensors that shards of an expert have in common. A call has them as one tensor, a row for
each expert."""
TRAINED = ("up_inner", "up_outer", "down_inner", "down_outer")


@dataclass(frozen=True, kw_only=True)
class Form:
    """Which tensors frozen experts have."""

    four_bit: bool
    bias: bool = False
    ranks: tuple[int, int] = (0, 0)
    """Ranks of the adapters of up and down; 0 for none."""

    @property
    def unit(self) -> int:
        """Hidden units that are sent together: those of one block in NF4."""
        return nf4.BLOCK if self.four_bit else 1

    def has(self, name: str) -> bool:
        """Return whether experts of this form have a field of `FrozenWeights`."""
        matrix, _, part = name.partition("_")  # "up" and "scales" of "up_scales"
        if not part:
            return True
        if part == "scales":
            return self.four_bit
        if part == "bias":
            return self.bias
        up_rank, down_rank = self.ranks
        rank = down_rank if matrix == "down" else up_rank  # the rest are adapters
        return rank > 0


class Product(NamedTuple):
    """One matrix of every expert, (out, in), with the adapter, of rank r, that is added to it.
    `low` are rows between the adapter's matrices, (R, r)."""

    weight: Tensor
    """(E, out, in), or codes."""
    scales: Tensor | None
    """(E, out, in / 64), in NF4 only."""
    inner: Tensor | None
    """(E, r, in); None without an adapter."""
    outer: Tensor | None
    """(E, out, r)."""

    def rows(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return (R, out) of rows (R, in)."""
        out = self._frozen(x, ends, transposed=True)
        if self.inner is not None and self.outer is not None:
            low = grouped_matmul.rows_times(x, self.inner.transpose(1, 2), ends)
            out += grouped_matmul.rows_times(low, self.outer.transpose(1, 2), ends)
        return out

    def rows_gradient(self, dy: Tensor, ends: Tensor) -> Tensor:
        """Return (R, in), the gradient of the rows, from (R, out), that of the result."""
        d_x = self._frozen(dy, ends, transposed=False)
        if self.inner is not None and self.outer is not None:
            d_low = grouped_matmul.rows_times(dy, self.outer, ends)
            d_x += grouped_matmul.rows_times(d_low, self.inner, ends)
        return d_x

    def gradients(self, x: Tensor, dy: Tensor, ends: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `inner` and `outer`."""
        if self.inner is None or self.outer is None:
            return None, None
        low = grouped_matmul.rows_times(x, self.inner.transpose(1, 2), ends)
        d_low = grouped_matmul.rows_times(dy, self.outer, ends)
        d_inner = grouped_matmul.outer_products(d_low, x, ends)
        d_outer = grouped_matmul.outer_products(dy, low, ends)
        return d_inner, d_outer

    def _frozen(self, rows: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
        """Return the product of rows with the frozen matrix: (R, in) with its transpose, (R, out)
        with itself."""
        if self.scales is not None:
            return nf4.rows_times(rows, self.weight, self.scales, ends, transposed)
        weight = self.weight.transpose(1, 2) if transposed else self.weight
        return grouped_matmul.rows_times(rows, weight, ends)


class FrozenExperts(AbstractExperts):
    """Base of frozen experts. A subclass returns the tensors that its parameters are, or are views
    of.

    Args:
        dim: width of a token.
        gated: whether two matrices read the token, of which the first gates the second.
        activation: a key of `ACTIVATIONS`.
        clamp: as for `GatedExperts`.
        form: which tensors there are.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        gated: bool,
        activation: str,
        clamp: Clamp | None,
        form: Form,
    ) -> None:
        super().__init__(dim, num_experts)
        self.gated = gated
        self.activation = activation
        self.clamp = clamp
        self.form = form

    @property
    def bias(self) -> bool:
        """Whether the experts have biases."""
        return self.form.bias

    @abstractmethod
    def frozen_weights(self) -> FrozenWeights:
        """Return this rank's part of the tensors, those of adapters differentiable."""

    @property
    def fields(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The fields of `FrozenWeights` that there are: those that shards of an expert split, and
        those that they share."""
        return tuple(filter(self.form.has, SPLIT)), tuple(filter(self.form.has, COMMON))

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.fields

    def shard_dim(self, name: str) -> int | None:
        return SPLIT.get(name)

    def weights(self) -> tuple[Weights, Weights]:
        """Return the tensors as a call has them: scales as bytes, which no cast changes, and one
        tensor of all that shards have in common."""
        whole = self.frozen_weights()
        split_fields, common_fields = self.fields

        sharded = []
        for name in split_fields:
            tensor: Tensor = getattr(whole, name)
            sharded.append(tensor.view(torch.uint8) if "scales" in name else tensor)

        if not common_fields:
            return tuple(sharded), ()
        flat = [getattr(whole, name).flatten(1) for name in common_fields]
        return tuple(sharded), (torch.cat(flat, 1),)

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        sharded, common = self.weights()
        return _in_dtype(sharded, dtype), _in_dtype(common, dtype)

    def of_call(self, call: ExpertCall) -> FrozenWeights:
        """Return the tensors of a call; the inverse of `weights`."""
        split_fields, common_fields = self.fields
        tensors = dict(zip(split_fields, call.sharded))
        if self.form.four_bit:
            for name in ("up_scales", "down_scales"):
                tensors[name] = tensors[name].contiguous().view(torch.float32)

        if call.common:
            joined = call.common[0]
            up_rank, down_rank = self.form.ranks
            shapes: dict[str, tuple[int, ...]] = {
                "up_inner": (up_rank, self.dim),
                "down_outer": (self.dim, down_rank),
                "down_bias": (self.dim,),
            }
            widths = [math.prod(shapes[name]) for name in common_fields]
            for name, part in zip(common_fields, joined.split(widths, 1)):
                tensors[name] = part.reshape(len(joined), *shapes[name])
        return FrozenWeights(**tensors)

    def compute(self, call: ExpertCall) -> Tensor:
        """Run the experts, differentiable in the rows, gates and trained weights."""
        dtype = compute_dtype(call.rows.dtype, call.rows.device)
        weights = (*_in_dtype(call.sharded, dtype), *_in_dtype(call.common, dtype))
        out: Tensor = _Run.apply(
            self, call, len(call.sharded), call.rows.to(dtype), call.gates, *weights
        )
        return out

    @torch.no_grad()
    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        """Run the experts, and keep the pre-activations, which the matrices that read the token
        produce."""
        weights = self.of_call(call)
        ends = call.ends
        up, down = _products(weights)
        # the experts have both biases or none
        expert_of_row = None if weights.up_bias is None else expert_of_rows(ends, len(call.rows))

        pre = up.rows(call.rows, ends)
        if weights.up_bias is not None:
            pre += weights.up_bias.flatten(1)[expert_of_row]
        out = down.rows(hidden_rows(self._parts(pre), self.activation, self.clamp), ends)
        if weights.down_bias is not None:
            # the results of an expert's shards are summed, so that each adds its part of the bias
            out += weights.down_bias[expert_of_row] / call.shards
        if call.gates is not None:
            out *= call.gates.to(out.dtype).unsqueeze(1)
        return out, (pre,)

    @torch.no_grad()
    def gradients(
        self,
        call: ExpertCall,
        kept: Weights,
        dy: Tensor,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> ExpertGradients:
        """Return the gradients of rows, gates and adapters; for each frozen tensor one without
        elements. All are complete on return: those of adapters, of low rank, take little time, so
        that nothing is left to `deferred_wgrad`."""
        weights = self.of_call(call)
        ends = call.ends
        (pre,) = kept
        up, down = _products(weights)
        parts = self._parts(pre)
        # views of d_pre's columns, which end as the gradients of the pre-activations: of up, or of
        # gate and up
        d_pre = torch.empty_like(pre)
        d_parts = self._parts(d_pre)
        d_first = d_parts[0]
        d_second = d_parts[1] if self.gated else None

        # until then d_second has the activated gate, which multiplies the second pre-activation
        hidden = pre.new_empty(d_first.shape)
        hidden_rows_into(parts, self.activation, hidden, d_second, self.clamp)
        d_hidden = down.rows_gradient(dy, ends)  # still without the gates

        d_gates = None
        if call.gates is not None:
            # a gate multiplies its row's result, hidden @ down.T + bias
            d_gates = (d_hidden * hidden).sum(1)
            if weights.down_bias is not None:
                # each shard added its part of the bias
                bias_of_rows = weights.down_bias[expert_of_rows(ends, len(dy))]
                d_gates += (dy * bias_of_rows).sum(1) / call.shards
            d_gates = d_gates.to(call.gates.dtype)
            gates = call.gates.to(dy.dtype).unsqueeze(1)
            dy = dy * gates
            d_hidden = d_hidden * gates

        # in place: the gradient of `hidden`, and the activated gate, become those gradients
        d_first.copy_(d_hidden)
        hidden_gradient_into(parts, self.activation, d_first, d_second, self.clamp)

        d_up_inner, d_up_outer = up.gradients(call.rows, d_pre, ends)
        d_down_inner, d_down_outer = down.gradients(hidden, dy, ends)
        if d_up_outer is not None and weights.up_outer is not None:
            d_up_outer = d_up_outer.view(weights.up_outer.shape)
        d_adapters = {
            "up_inner": d_up_inner,
            "up_outer": d_up_outer,
            "down_inner": d_down_inner,
            "down_outer": d_down_outer,
        }
        sharded, common = self._gradients_of_call(call, d_adapters)
        d_rows = up.rows_gradient(d_pre, ends)
        return ExpertGradients(d_rows, d_gates, sharded=sharded, common=common)

    def _gradients_of_call(
        self, call: ExpertCall, d_adapters: dict[str, Tensor | None]
    ) -> tuple[Weights, Weights]:
        """Return the gradients of a call's split and common tensors: those of adapters, and for a
        frozen split tensor one without elements."""
        nothing = self._no_gradient(call.rows, call.sharded)
        split_fields, common_fields = self.fields

        sharded = []
        for name in split_fields:
            gradient = d_adapters.get(name)
            sharded.append(nothing if gradient is None else gradient)

        common = []
        for name in common_fields:
            gradient = d_adapters.get(name)
            if gradient is not None:
                common.append(gradient.flatten(1))
        if self.form.bias:
            # the frozen bias is the last part of the one common tensor, whose gradient is whole
            common.append(call.common[0].new_zeros(len(call.common[0]), self.dim))
        joined = (torch.cat(common, 1),) if common else ()
        return tuple(sharded), joined

    def _no_gradient(self, like: Tensor, sharded: Weights) -> Tensor:
        """Return what stands for a frozen tensor's gradient: (experts, units, 0)."""
        return like.new_empty(len(sharded[0]), self.num_units(sharded), 0)

    def _parts(self, pre: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each matrix that reads the token, as views: (gate, up) or (up,)."""
        return pre.chunk(2 if self.gated else 1, 1)

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert in units that are sent together."""
        down = sharded[1]
        is_nothing = down.dim() == 3 and down.shape[2] == 0
        if is_nothing:  # see `_no_gradient`
            return down.shape[1]
        inputs_per_number = 2 if self.form.four_bit else 1
        return down.shape[2] * inputs_per_number // self.form.unit

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """See `ExpertSizes.stacked`."""
        hidden = self.num_units(sharded) * self.form.unit
        matrices = 3 if self.gated else 2
        unfrozen = ExpertSizes.stacked(
            self.dim, hidden, matrices, dtype.itemsize, kernel=kind_of(sharded[0].device)
        )
        # what the weights take is measured: one expert is packed, and the bytes of a row are
        # counted in numbers of the products
        packed = self.pack(_in_dtype(self.first(sharded, 1), dtype))
        unit_bytes = packed.shape[1] * packed.element_size()
        unit_numbers = math.ceil(unit_bytes / dtype.itemsize)
        return replace(unfrozen, units=len(packed), unit_numbers=unit_numbers)

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * units, numbers): all tensors' entries of a unit, or those of
        adapters for gradients.

        Frozen bytes travel as if they were numbers of the adapters' dtype; without adapters, as
        bytes.
        """
        units = self.num_units(sharded)
        columns = []
        for tensor in sharded:
            if tensor.numel():
                # (experts, units, numbers), from hidden units or their bytes in dimension 2
                by_unit = tensor.unflatten(2, (units, -1)).movedim(2, 1)
                columns.append(by_unit.flatten(2))
        if not columns:  # gradients of experts without adapters: a column that nobody reads
            return sharded[0].new_zeros(len(sharded[0]) * units, 1)

        dtype = torch.uint8
        # the adapters' columns, if any, are the ones of floating point
        for column in columns:
            if column.is_floating_point():
                dtype = column.dtype
                break
        as_numbers = [column.contiguous().view(dtype) for column in columns]
        return torch.cat(as_numbers, 2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the tensors from the rows of `pack`; rows of gradients are narrower, since they
        have the columns of adapters alone."""
        shapes = self._unit_shapes()
        # columns of each tensor in the rows, whose numbers hold several bytes each
        widths = {}
        for name, (shape, is_bytes) in shapes.items():
            widths[name] = shape.numel() // (rows.element_size() if is_bytes else 1)
        if rows.shape[1] < sum(widths.values()):
            # these are gradients
            widths = {name: width for name, width in widths.items() if name in TRAINED}

        by_unit = rows.view(num_experts, -1, rows.shape[1])
        parts: dict[str, Tensor] = {}
        if widths:
            parts = dict(zip(widths, by_unit.split(list(widths.values()), 2)))
        nothing = rows.new_empty(num_experts, by_unit.shape[1], 0)

        tensors = []
        split_fields, _ = self.fields
        for name in split_fields:
            if name in parts:
                shape, is_bytes = shapes[name]
                tensors.append(_without_units(parts[name], shape, is_bytes))
            else:
                tensors.append(nothing)
        return tuple(tensors)

    def _unit_shapes(self) -> dict[str, tuple[torch.Size, bool]]:
        """Return the shape of a unit's part of each split tensor, and whether it is sent as
        bytes."""
        parts = 2 if self.gated else 1
        unit = self.form.unit
        four_bit = self.form.four_bit
        up_rank, down_rank = self.form.ranks
        inputs_per_number = 2 if four_bit else 1
        scale_bytes = torch.float32.itemsize
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {
            "up": ((parts, unit, self.dim // inputs_per_number), four_bit),
            "down": ((self.dim, unit // inputs_per_number), four_bit),
            "up_scales": ((parts, unit, self.dim // nf4.BLOCK * scale_bytes), True),
            # the unit is one block, with one scale for each output
            "down_scales": ((self.dim, scale_bytes), True),
            "up_bias": ((parts, unit), False),
            "up_outer": ((parts, unit, up_rank), False),
            "down_inner": ((down_rank, unit), False),
        }
        present = {}
        for name in self.fields[0]:
            shape, is_bytes = shapes[name]
            present[name] = (torch.Size(shape), is_bytes)
        return present

    def trained(self, sharded: Weights) -> Weights:
        nothing = self._no_gradient(sharded[0], sharded)
        split_fields, _ = self.fields
        return tuple(
            tensor if name in TRAINED else nothing for name, tensor in zip(split_fields, sharded)
        )

    def reset_parameters(self) -> None:
        """Keep the frozen tensors; they come from a checkpoint."""

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Keep the frozen tensors; they come from a checkpoint."""


class _Run(torch.autograd.Function):
    """`FrozenExperts.run` and `gradients` as one differentiable function of rows, gates and
    adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: FrozenExperts,
        call: ExpertCall,
        num_sharded: int,
        rows: Tensor,
        gates: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        """Run the experts on a call whose tensors are given again, as arguments that autograd
        sees: the rows, the gates, and `num_sharded` split weights before the common ones."""
        own = replace(
            call,
            rows=rows,
            gates=gates,
            sharded=weights[:num_sharded],
            common=weights[num_sharded:],
        )
        out, (pre,) = experts.run(own)
        ctx.experts = experts
        ctx.shards = call.shards
        ctx.num_sharded = num_sharded
        ctx.save_for_backward(rows, gates, call.ends, pre, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments that are wanted."""
        rows, gates, ends, pre, *weights = ctx.saved_tensors
        sharded = tuple(weights[: ctx.num_sharded])
        common = tuple(weights[ctx.num_sharded :])
        call = ExpertCall(sharded, common, rows, gates, ends, ctx.shards)
        grads: ExpertGradients = ctx.experts.gradients(call, (pre,), dy.contiguous())
        # experts, call, num_sharded, rows and gates come before the weights
        needs_weights = ctx.needs_input_grad[5:]
        d_weights = [
            gradient if is_needed else None
            for gradient, is_needed in zip((*grads.sharded, *grads.common), needs_weights)
        ]
        return None, None, None, grads.rows, grads.gates, *d_weights


def _in_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return tensors in a dtype, except those of bytes."""
    return tuple(in_dtype(each, dtype) for each in weights)


def _without_units(columns: Tensor, unit_shape: torch.Size, is_bytes: bool) -> Tensor:
    """Return a split tensor from its columns in the packed rows, (E, units, numbers)."""
    numbers = columns.contiguous().view(torch.uint8) if is_bytes else columns
    # dimension 1 of a unit's shape counts its hidden units, of which all units have n together:
    # (E, units, a, n / units, ...) -> (E, a, units, n / units, ...) -> (E, a, n, ...)
    return numbers.unflatten(2, unit_shape).movedim(1, 2).flatten(2, 3)


def _products(weights: FrozenWeights) -> tuple[Product, Product]:
    """Return the products with up, whose gate and up become one matrix, and with down."""
    up_scales = weights.up_scales
    up_outer = weights.up_outer
    up = Product(
        weights.up.flatten(1, 2),
        scales=None if up_scales is None else up_scales.flatten(1, 2),
        inner=weights.up_inner,
        outer=None if up_outer is None else up_outer.flatten(1, 2),
    )
    down = Product(
        weights.down, scales=weights.down_scales, inner=weights.down_inner, outer=weights.down_outer
    )
    return up, down
