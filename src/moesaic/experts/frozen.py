"""Experts whose matrices are not trained, in NF4 or as they are, with adapters of low rank (LoRA)
or without.

An adapted matrix W computes `x W.T + (x inner.T) outer.T`, with `inner` (r, in) and `outer` (out,
r). Neither the adapters' product nor a dequantized matrix is ever formed: backward dequantizes
again, by the block or the tile. It saves the rows and the pre-activations, and computes no gradient
of a frozen matrix. On a mesh frozen tensors move like trained ones, as their bytes; of gradients
only those of the adapters move. Source: Hu et al., "LoRA" (2021); Dettmers et al., "QLoRA" (2023).
"""

from __future__ import annotations

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
        ranks = [
            0 if inner is None else inner.shape[1] for inner in (self.up_inner, self.down_inner)
        ]
        return Form(
            four_bit=self.up_scales is not None,
            bias=self.up_bias is not None,
            ranks=(ranks[0], ranks[1]),
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
        by_name = {"scales": self.four_bit, "bias": self.bias}
        kind, _, part = name.partition("_")
        return by_name.get(part, bool(self.ranks[kind == "down"])) if part else True


class Product(NamedTuple):
    """One matrix of every expert, (out, in), with what is added to it."""

    weight: Tensor
    """(E, out, in), or codes."""
    scales: Tensor | None
    inner: Tensor | None
    outer: Tensor | None

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
            d_x += grouped_matmul.rows_times(
                grouped_matmul.rows_times(dy, self.outer, ends), self.inner, ends
            )
        return d_x

    def gradients(self, x: Tensor, dy: Tensor, ends: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `inner` and `outer`."""
        if self.inner is None or self.outer is None:
            return None, None
        low = grouped_matmul.rows_times(x, self.inner.transpose(1, 2), ends)
        d_low = grouped_matmul.rows_times(dy, self.outer, ends)
        return grouped_matmul.outer_products(d_low, x, ends), grouped_matmul.outer_products(
            dy, low, ends
        )

    def _frozen(self, rows: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
        if self.scales is not None:
            return nf4.rows_times(rows, self.weight, self.scales, ends, transposed)
        return grouped_matmul.rows_times(
            rows, self.weight.transpose(1, 2) if transposed else self.weight, ends
        )


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
        """Return the tensors as a call has them: scales as bytes, and one tensor of all that shards
        have in common."""
        whole = self.frozen_weights()
        sharded, common = ([getattr(whole, name) for name in names] for names in self.fields)
        joined = (torch.cat([each.flatten(1) for each in common], 1),) if common else ()
        in_bytes = (
            each.view(torch.uint8) if "scales" in name else each
            for name, each in zip(self.fields[0], sharded)
        )
        return tuple(in_bytes), joined

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        sharded, common = self.weights()
        return _in_dtype(sharded, dtype), _in_dtype(common, dtype)

    def of_call(self, call: ExpertCall) -> FrozenWeights:
        """Return the tensors of a call."""
        tensors = dict(zip(self.fields[0], call.sharded))
        if self.form.four_bit:
            for name in ("up_scales", "down_scales"):
                tensors[name] = tensors[name].contiguous().view(torch.float32)
        if call.common:
            up_rank, down_rank = self.form.ranks
            joined = call.common[0]
            sizes = {
                "up_inner": (up_rank, self.dim),
                "down_outer": (self.dim, down_rank),
                "down_bias": (self.dim,),
            }
            sizes = {name: sizes[name] for name in self.fields[1]}
            widths = [torch.Size(size).numel() for size in sizes.values()]
            parts = zip(sizes.items(), joined.split(widths, 1))
            tensors |= {name: part.reshape(len(joined), *size) for (name, size), part in parts}
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
        pre = up.rows(call.rows, ends)
        expert = None if weights.up_bias is None else expert_of_rows(ends, len(pre))
        if weights.up_bias is not None:
            pre += weights.up_bias.flatten(1)[expert]
        out = down.rows(hidden_rows(self._parts(pre), self.activation, self.clamp), ends)
        if weights.down_bias is not None:
            out += weights.down_bias[expert] / call.shards
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
        elements."""
        weights = self.of_call(call)
        ends = call.ends
        (pre,) = kept
        up, down = _products(weights)
        parts = self._parts(pre)
        d_pre = torch.empty_like(pre)
        d_first, *gate = self._parts(d_pre)
        hidden = pre.new_empty(d_first.shape)
        hidden_rows_into(parts, self.activation, hidden, gate[0] if gate else None, self.clamp)
        d_hidden = down.rows_gradient(dy, ends)  # still without the gates
        d_gates = None
        if call.gates is not None:
            d_gates = (d_hidden * hidden).sum(1)
            if weights.down_bias is not None:
                bias_of_rows = weights.down_bias[expert_of_rows(ends, len(dy))]
                d_gates += (dy * bias_of_rows).sum(1) / call.shards
            d_gates = d_gates.to(call.gates.dtype)
            gates = call.gates.to(dy.dtype).unsqueeze(1)
            dy = dy * gates
            d_hidden = d_hidden * gates
        d_first.copy_(d_hidden)
        hidden_gradient_into(parts, self.activation, d_first, gate[0] if gate else None, self.clamp)
        trained = (*up.gradients(call.rows, d_pre, ends), *down.gradients(hidden, dy, ends))
        d_weights = dict(zip(TRAINED, trained))
        if d_weights["up_outer"] is not None and weights.up_outer is not None:
            d_weights["up_outer"] = d_weights["up_outer"].view(weights.up_outer.shape)
        sharded, common = self._gradients(call, d_weights)
        return ExpertGradients(
            up.rows_gradient(d_pre, ends), gates=d_gates, sharded=sharded, common=common
        )

    def _gradients(
        self, call: ExpertCall, by_name: dict[str, Tensor | None]
    ) -> tuple[Weights, Weights]:
        """Return the gradients of a call's tensors."""
        nothing = call.rows.new_empty(len(call.sharded[0]), self.num_units(call.sharded), 0)
        sharded = [by_name.get(name) for name in self.fields[0]]
        common = [each.flatten(1) for each in map(by_name.get, self.fields[1]) if each is not None]
        if self.form.bias:
            common.append(call.common[0].new_zeros(len(call.common[0]), self.dim))
        joined = (torch.cat(common, 1),) if common else ()
        return tuple(nothing if each is None else each for each in sharded), joined

    def _parts(self, pre: Tensor) -> tuple[Tensor, ...]:
        return pre.chunk(2 if self.gated else 1, 1)

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert in units that are sent together."""
        down = sharded[1]
        if down.dim() == 3 and not down.shape[2]:  # the gradient of a frozen tensor
            return down.shape[1]
        return down.shape[2] * (2 if self.form.four_bit else 1) // self.form.unit

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """See `ExpertSizes.stacked`."""
        hidden = self.num_units(sharded) * self.form.unit
        matrices = 3 if self.gated else 2
        of_rows = ExpertSizes.stacked(
            self.dim, hidden, matrices, dtype.itemsize, kernel=kind_of(sharded[0].device)
        )
        packed = self.pack(_in_dtype(self.first(sharded, 1), dtype))
        numbers = -(-packed.shape[1] * packed.element_size() // dtype.itemsize)
        return replace(of_rows, units=len(packed), unit_numbers=numbers)

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * units, numbers): all tensors' entries of a unit, or those of
        adapters for gradients.

        Frozen bytes travel as if they were numbers of the adapters' dtype; without adapters, as
        bytes.
        """
        units = self.num_units(sharded)
        columns = [
            each.unflatten(2, (units, -1)).movedim(2, 1).flatten(2)
            for each in sharded
            if each.numel()
        ]
        if not columns:  # gradients of experts without adapters
            return sharded[0].new_zeros(len(sharded[0]) * units, 1)
        dtype = next((each.dtype for each in columns if each.is_floating_point()), torch.uint8)
        return torch.cat([each.contiguous().view(dtype) for each in columns], 2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the tensors from the rows of `pack`; rows of gradients are narrower."""
        shapes = self._unit_shapes()
        per_number = rows.element_size()
        widths = {
            name: size.numel() // (per_number if is_bytes else 1)
            for name, (size, is_bytes) in shapes.items()
        }
        whole = rows.view(num_experts, -1, rows.shape[1])
        if rows.shape[1] < sum(widths.values()):
            widths = {name: width for name, width in widths.items() if name in TRAINED}
        parts = dict(zip(widths, whole.split(list(widths.values()), 2))) if widths else {}
        nothing = rows.new_empty(num_experts, whole.shape[1], 0)
        return tuple(
            _of_units(parts[name], *shapes[name]) if name in parts else nothing
            for name in self.fields[0]
        )

    def _unit_shapes(self) -> dict[str, tuple[torch.Size, bool]]:
        """Return the shape of a unit's part of each split tensor, and whether it is sent as
        bytes."""
        parts = 2 if self.gated else 1
        unit = self.form.unit
        four_bit = self.form.four_bit
        up_rank, down_rank = self.form.ranks
        halves = 2 if four_bit else 1
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {
            "up": ((parts, unit, self.dim // halves), four_bit),
            "down": ((self.dim, unit // halves), four_bit),
            "up_scales": ((parts, unit, self.dim // nf4.BLOCK * torch.float32.itemsize), True),
            "down_scales": ((self.dim, torch.float32.itemsize), True),
            "up_bias": ((parts, unit), False),
            "up_outer": ((parts, unit, up_rank), False),
            "down_inner": ((down_rank, unit), False),
        }
        found = {}
        for name in self.fields[0]:
            shape, is_trained = shapes[name]
            found[name] = (torch.Size(shape), is_trained)
        return found

    def trained(self, sharded: Weights) -> Weights:
        nothing = sharded[0].new_empty(len(sharded[0]), self.num_units(sharded), 0)
        return tuple(
            each if name in TRAINED else nothing for name, each in zip(self.fields[0], sharded)
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
        d_rows, d_gates, *d_weights = ctx.experts.gradients(call, (pre,), dy.contiguous())
        d_tensors = [each for group in d_weights for each in group]
        wanted = [
            each if needs else None for each, needs in zip(d_tensors, ctx.needs_input_grad[5:])
        ]
        return None, None, None, d_rows, d_gates, *wanted


def _in_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return tensors in a dtype, except those of bytes."""
    return tuple(in_dtype(each, dtype) for each in weights)


def _of_units(rows: Tensor, size: torch.Size, is_bytes: bool) -> Tensor:
    """Return a split tensor from its columns in the rows of units, (E, units, numbers)."""
    numbers = rows.contiguous().view(torch.uint8) if is_bytes else rows
    return numbers.unflatten(2, size).movedim(1, 2).flatten(2, 3)


def _products(weights: FrozenWeights) -> tuple[Product, Product]:
    """Return the products with up, whose C matrices are one, and with down."""
    flat = [
        None if each is None else each.flatten(1, 2)
        for each in (weights.up, weights.up_scales, weights.up_outer)
    ]
    assert flat[0] is not None
    up = Product(flat[0], scales=flat[1], inner=weights.up_inner, outer=flat[2])
    return up, Product(
        weights.down, scales=weights.down_scales, inner=weights.down_inner, outer=weights.down_outer
    )
