"""Built-in experts: stacked 3-D weights, so that one grouped matmul serves all experts and one tensor shards over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.cost.held import ExpertSizes
from moesaic.errors import InputError
from moesaic.experts.experts import (
    AbstractExperts,
    DeferredWgrad,
    Weights,
    compute_dtype,
    init_stacked,
    init_stacked_normal,
    stacked,
)
from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.expert_ffn import expert_ffn, expert_gradients, run_experts
from moesaic.kernels.permute import Permutation
from moesaic.kernels.work import ExpertWork


class StackedExperts(AbstractExperts):
    """What built-in experts share: matrices that read the token, an activation, one matrix that writes the result.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        bias: add biases.
        device: where parameters are made; None for torch's default device.
        dtype: the dtype of the parameters; None for torch's default dtype.
    """

    ups: tuple[str, ...]
    """Names of the matrices that read the token; the bias of w1 is b1."""
    activation: str
    """Between the products; of two matrices that read the token the first, activated, gates the second."""
    clamp: Clamp | None = None
    """Of clamped SwiGLU; None for others."""
    kernel: str = "auto"
    """What computes them: a name in `kernels.pick.TIERS`, or auto for what the device runs."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        bias: bool,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        self.bias = bias
        self._casts: dict[str, _KeptCast] = {}
        for name in self.ups:
            self.register_parameter(name, stacked(num_experts, hidden, dim, device, dtype))
        self.w2 = stacked(num_experts, dim, hidden, device, dtype)
        for name in (*self.ups, "w2"):
            width = dim if name == "w2" else hidden
            added = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype)) if bias else None
            self.register_parameter(_bias_of(name), added)
        self.reset_parameters()

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        biases = tuple(map(_bias_of, self.ups))
        return (*self.ups, "w2", *(biases if self.bias else ())), ("b2",) if self.bias else ()

    def shard_dim(self, name: str) -> int | None:
        return {"w2": 2, "b2": None}.get(name, 1)

    def begin_step(self) -> None:
        """Drop what was cast in the step before, and keep what will be cast in this one."""
        self._casts = {name: _KeptCast(self.get_parameter(name)) for names in self.names for name in names}

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """Return the parameters in a dtype, in training cast once in each optimizer step that `begin_step` tells of.

        A parameter that was changed since, by a checkpoint that was loaded for instance, is cast anew. Parameters that FSDP
        gathers for a call are not kept, since it frees them between calls (`shard_over_data` gathers them in a dtype).
        """
        sharded, common = self.names
        return tuple(self._cast(name, dtype) for name in sharded), tuple(self._cast(name, dtype) for name in common)

    def _cast(self, name: str, dtype: torch.dtype) -> Tensor:
        parameter = self._local(name)
        if parameter.dtype == dtype or torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return parameter.to(dtype)
        kept = self._casts.get(name)
        is_captured = (
            parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        )  # a replay casts what it then finds
        if kept is None or kept.parameter is not self._parameters[name] or is_captured:
            return parameter.to(dtype)
        if kept.cast is None or kept.version != parameter._version or kept.cast.dtype != dtype:
            kept.cast, kept.version = parameter.detach().to(dtype), parameter._version
        cast: Tensor = _Cast.apply(parameter, kept.cast)
        return cast

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept for a step: a copy has parameters of its own."""
        return {**self.__dict__, "_casts": {}}

    def reset_parameters(self) -> None:
        """Initialise every matrix and bias uniformly in +-1/sqrt(its input width)."""
        for name in (*self.ups, "w2"):
            init_stacked(self.get_parameter(name), getattr(self, _bias_of(name)))

    def init_normal(self, std: float, out_std: float) -> None:
        for name in (*self.ups, "w2"):
            deviation = out_std if name == "w2" else std
            init_stacked_normal(self.get_parameter(name), getattr(self, _bias_of(name)), deviation)

    def compute(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> Tensor:
        dtype = compute_dtype(rows.dtype, rows.device)
        sharded, common = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
        return expert_ffn(self._work(sharded, common, rows.to(dtype), gates, ends, shards))

    def compute_tokens(
        self,
        sharded: Weights,
        common: Weights,
        x: Tensor,
        weight: Tensor,
        permutation: Permutation,
        *,
        weight_first: bool = False,
    ) -> Tensor:
        dtype = compute_dtype(x.dtype, x.device)
        sharded, common = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
        gates = weight.index_select(0, permutation.order)
        work = self._work(sharded, common, x.to(dtype), gates, permutation.ends, 1)
        return expert_ffn(replace(work, dispatch=permutation.dispatch, gates_first=weight_first), x.dtype)

    def run(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> tuple[Tensor, Weights]:
        """Run; kept is what the `ups` give."""
        out, pre = run_experts(self._work(sharded, common, rows, gates, ends, shards))
        return out, tuple(pre)

    def gradients(
        self,
        sharded: Weights,
        common: Weights,
        rows: Tensor,
        gates: Tensor | None,
        ends: Tensor,
        kept: Weights,
        dy: Tensor,
        shards: int = 1,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> tuple[Tensor, Tensor | None, Weights, Weights]:
        """Return the gradients by explicit products."""
        work = self._work(sharded, common, rows, gates, ends, shards)
        found = expert_gradients(work, kept, dy, deferred_wgrad=deferred_wgrad is not None)
        assert found.x is not None
        assert found.down is not None
        if deferred_wgrad is not None and found.finish is not None:
            deferred_wgrad.append(found.finish)
        d_common = () if found.down_bias is None else (found.down_bias / shards,)
        return found.x, found.gates, (*found.ups, found.down, *found.up_biases), d_common

    def _work(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int
    ) -> ExpertWork:
        """Return one call as the kernels take it."""
        ups = len(self.ups)
        return ExpertWork(
            x=rows,
            dispatch=None,
            gates=gates,
            gates_first=False,
            ends=ends,
            ups=sharded[:ups],
            up_biases=sharded[ups + 1 :],
            down=sharded[ups],
            down_bias=common[0] / shards if common else None,
            activation=self.activation,
            clamp=self.clamp,
            kernel=self.kernel,
        )

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert."""
        return sharded[0].shape[1]

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """See `ExpertSizes.stacked`."""
        matrices = len(self.ups) + 1
        return ExpertSizes.stacked(self.dim, self.num_units(sharded), matrices, dtype.itemsize, bias=self.bias)

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * hidden, columns): a hidden unit's row of every matrix, and its biases."""
        reading, biases = self._reading(sharded)
        columns = [*reading, sharded[len(self.ups)].transpose(1, 2)]
        columns += [bias.unsqueeze(2) for bias in biases if bias is not None]
        return torch.cat(columns, dim=2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the parameters from rows of `pack`, as views."""
        matrices = len(self.ups) + 1
        widths = [self.dim] * matrices + [1] * (len(self.ups) if self.bias else 0)
        columns = rows.view(num_experts, -1, sum(widths)).split(widths, dim=2)
        read = [columns[i] if i + 1 < matrices else columns[i].transpose(1, 2) for i in range(matrices)]
        return (*read, *(column.squeeze(2) for column in columns[matrices:]))

    def _reading(self, sharded: Weights) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the matrices that read the token, and their biases."""
        ups = len(self.ups)
        return sharded[:ups], sharded[ups + 1 :] if self.bias else (None,) * ups


@dataclass
class _KeptCast:
    """A parameter in the dtype of a step's products."""

    parameter: nn.Parameter
    version: int = 0
    """Of the parameter when it was cast."""
    cast: Tensor | None = None


class _Cast(torch.autograd.Function):
    """A parameter in another dtype that was cast before; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class PlainExperts(StackedExperts):
    """Two matrices: `act(x @ w1.T + b1) @ w2.T + b2`.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        activation: a key of `ACTIVATIONS`: "gelu", "gelu_tanh", "relu", "relu2" (relu squared) or "silu".
        bias: add biases, (num_experts, hidden) and (num_experts, dim).
        device: where parameters are made; None for torch's default device.
        dtype: the dtype of the parameters; None for torch's default dtype.
    """

    ups = ("w1",)

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        activation: str = "gelu",
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, hidden, num_experts, bias=bias, device=device, dtype=dtype)
        self.activation = _known(activation)


class GatedExperts(StackedExperts):
    """Three matrices: `(act(x @ w1.T + b1) * (x @ w3.T + b3)) @ w2.T + b2`, with silu SwiGLU; the names are Mixtral's.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        activation: a key of `ACTIVATIONS`.
        clamp: makes it clamped SwiGLU, as in gpt-oss; see `Clamp`.
        bias: add biases.
        device: where parameters are made; None for torch's default device.
        dtype: the dtype of the parameters; None for torch's default dtype.

    Raises:
        InputError: for an activation that is unknown, or a clamp of another one than silu.
    """

    ups = ("w1", "w3")

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        activation: str = "silu",
        clamp: Clamp | None = None,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, hidden, num_experts, bias=bias, device=device, dtype=dtype)
        self.activation, self.clamp = _known(activation), clamp
        if clamp is not None and activation != "silu":
            raise InputError(f"GatedExperts: clamp belongs to silu, not to {activation}: leave one of the two out")


def _known(activation: str) -> str:
    """Return the name of an activation, if there is one of this name."""
    if activation not in ACTIVATIONS:
        raise InputError(f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
    return activation


def _bias_of(name: str) -> str:
    return f"b{name[1:]}"
