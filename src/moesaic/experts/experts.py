"""A layer's experts: what the layer asks of them, and the built-in ones, whose weights are stacked, so that one grouped product
serves all experts and one tensor shards over them.

Gate and up of gated experts are one parameter, (experts, 2, hidden, dim): the bytes of Hugging Face's `gate_up_proj`, of which
both are views. A split of the hidden width, over ranks or for a message, is a plain one of its third dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moesaic.cost.held import ExpertSizes
from moesaic.errors import InputError
from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.expert_ffn import expert_ffn, expert_gradients, run_experts
from moesaic.kernels.permute import Permutation, permute, unpermute
from moesaic.kernels.work import ExpertWork

Weights = tuple[Tensor, ...]
"""Parameters of experts, in the order of `AbstractExperts.names`."""
DeferredWgrad = list[Callable[[], None]]
"""What is to be done before the gradients of split parameters are read."""
Runner = Callable[[Tensor, Tensor | None, Weights, Weights], Tensor]
"""(rows, routing weights, split parameters, common parameters) -> rows."""


class AbstractExperts(nn.Module, ABC):
    """All experts of a layer, run over rows that are sorted by expert.

    A leaf says what it computes from weights that are given (`compute`), since on a mesh the weights of a call may be
    gathered ones. `run` and `gradients` are the same without autograd, for one expert task of a program.

    Args:
        dim: width of a token, in and out.
        num_experts: how many experts there are.
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.dim = dim
        self.num_experts = num_experts
        self.is_spread = False
        """Whether the parameters are this rank's part of experts that are spread over a mesh."""

    @property
    @abstractmethod
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parameters: those that shards of an expert split, and those that they hold in common."""

    @abstractmethod
    def compute(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> Tensor:
        """Run each expert on its rows and scale each result by its routing weight; differentiable.

        Args:
            sharded: parameters of the experts that have rows, whole or a shard of their hidden width.
            common: parameters that all shards of an expert hold.
            rows: (R, dim), expert after expert.
            gates: (R,) routing weights, or None for weights of 1.
            ends: (num_experts,) int32, one past the last row of each expert.
            shards: how many shards of an expert there are; their results will be summed.

        Returns:
            (R, dim).
        """

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
        """Dispatch tokens to experts, run them, and sum each token's results by routing weight; differentiable.

        Args:
            sharded, common: as for `compute`.
            x: (tokens, dim).
            weight: (R,) routing weights in the order of the routing.
            permutation: the routing, sorted by expert.
            weight_first: multiply by the routing weight before the expert rather than after it.

        Returns:
            (tokens, dim) in the dtype of `x`.
        """
        rows, gates = permute(x, permutation), weight.index_select(0, permutation.order)
        if weight_first:
            rows = rows * gates.to(rows.dtype).unsqueeze(1)
        out = self.compute(sharded, common, rows, None if weight_first else gates, permutation.ends)
        return unpermute(out, permutation, dtype=x.dtype)

    def reset_parameters(self) -> None:
        """Draw the weights and biases anew, as a new layer has them; here by the `reset_parameters` of the modules inside."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    @abstractmethod
    def init_normal(self, std: float, out_std: float) -> None:
        """Draw the weights anew, as a model wants them, and set biases to zero; modules of a user stay as they are.

        Args:
            std: deviation of the matrices that read the token.
            out_std: deviation of the matrices that write the result.
        """

    @abstractmethod
    def pack(self, sharded: Weights) -> Tensor:
        """Return the split parameters as rows, expert after expert, hidden unit after hidden unit, to be sent."""

    @abstractmethod
    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the split parameters of experts from their rows; the inverse of `pack`."""

    def first(self, sharded: Weights, num_experts: int) -> Weights:
        """Return the split parameters of the first experts of `sharded`, as views."""
        return tuple(parameter[:num_experts] for parameter in sharded)

    def shard_dim(self, name: str) -> int | None:
        """Return the dimension along which a split parameter splits over etp; None where it does not."""
        return None

    @abstractmethod
    def num_units(self, sharded: Weights) -> int:
        """Return how many rows of `pack` one expert has."""

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """Return what experts hold in a call; here what one of them saves for the gradient of two rows, and as much again.

        Args:
            sharded: split parameters.
            dtype: of the products.
        """
        width, units = self.pack(self.first(sharded, 1)).shape[1], self.num_units(sharded)
        inside = self._saved(sharded)
        return ExpertSizes(
            dim=self.dim, units=units, unit_numbers=width, kept=0, forward=inside + self.dim,
            backward=2 * (inside + self.dim), element_bytes=dtype.itemsize,
        )  # fmt: skip

    def _saved(self, sharded: Weights) -> int:
        """Return the numbers per row that autograd keeps of one expert, parameters left out."""
        weights = tuple(weight.detach().requires_grad_() for weight in self.first(sharded, 1))
        known, found = {weight.untyped_storage().data_ptr() for weight in weights}, dict[int, int]()

        def note(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes() // value.element_size()
            return value

        rows = weights[0].new_zeros(2, self.dim).requires_grad_()
        ends = torch.tensor([len(rows)], dtype=torch.int32, device=rows.device)
        devices = [rows.device] if rows.is_cuda else []
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda value: value)
        with torch.enable_grad(), torch.random.fork_rng(devices), hooks:
            self.compute(weights, (), rows, None, ends)
        return -(-sum(found.values()) // len(rows))

    def forward(
        self, rows: Tensor, weight: Tensor | None, ends: Tensor | None = None, run: Runner | None = None
    ) -> Tensor:
        """Run the experts with their own weights.

        Args:
            rows: (R, dim), expert after expert; with `run`, whatever that takes.
            weight: (R,) routing weights, or None for weights of 1.
            ends: (num_experts,) int32, one past the last row of each expert; None only with `run`.
            run: runs them elsewhere or otherwise, on a mesh. It is called in here, where wrappers such as FSDP have
                gathered the parameters.

        Returns:
            (R, dim), or what `run` returns.
        """
        if run is not None:
            return run(rows, weight, *self.weights_in(compute_dtype(rows.dtype, rows.device)))
        assert ends is not None
        return self.compute(*self.weights_in(compute_dtype(rows.dtype, rows.device)), rows, weight, ends)

    def weights(self) -> tuple[Weights, Weights]:
        """Return the parameters of `names`; of DTensors, this rank's part."""
        sharded, common = self.names
        return tuple(map(self._local, sharded)), tuple(map(self._local, common))

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """Return `weights`, those that are multiplied as they stand in the dtype of a call's products; here as they are."""
        return self.weights()

    def begin_step(self) -> None:
        """Take note that an optimizer step begins: parameters stay as they will be until the next one."""

    def _local(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        parameter: Tensor = getattr(self.get_submodule(owner), leaf)  # a plain tensor within `functional_call`
        if is_dtensor(parameter):
            local: Tensor = parameter.to_local(grad_placements=parameter.placements)
            return local
        return parameter

    @torch.no_grad()
    def run(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> tuple[Tensor, Weights]:
        """Return the result of `compute`, and what `gradients` wants to have kept, always equally many tensors.

        Here it is the state of the random generators, so that an expert with dropout computes the same again.
        """
        states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(rows.device)] if rows.is_cuda else [])
        return self.compute(sharded, common, rows, gates, ends, shards), tuple(states)

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
        """Return the gradients of rows, gates, split and common parameters; here by computing the result again.

        Args:
            sharded, common, rows, gates, ends, shards: as for `run`.
            kept: what `run` returned.
            dy: (R, dim), gradient of the result.
            deferred_wgrad: where this may leave what still has to be done for the split parameters' gradients, so that rows
                can leave before; None: all is done on return.
        """
        leaves = [leaf.detach().requires_grad_() for leaf in (rows, *sharded, *common)]
        gate = None if gates is None else gates.detach().requires_grad_()
        cut = 1 + len(sharded)
        with torch.enable_grad(), torch.random.fork_rng([rows.device] if rows.is_cuda else []):
            torch.set_rng_state(kept[0])
            if rows.is_cuda:
                torch.cuda.set_rng_state(kept[1], rows.device)
            out = self.compute(tuple(leaves[1:cut]), tuple(leaves[cut:]), leaves[0], gate, ends, shards)
        wanted = leaves if gate is None else [*leaves, gate]
        grads = torch.autograd.grad(out, wanted, dy, materialize_grads=True)
        return grads[0], None if gate is None else grads[-1], grads[1:cut], grads[cut : len(leaves)]


@torch.no_grad()
def init_stacked(weight: Tensor, bias: Tensor | None) -> None:
    """Initialise each expert as `nn.Linear` would: uniform in +-1/sqrt(in_width), the bias too.

    Args:
        weight: (num_experts, out_width, in_width).
        bias: (num_experts, out_width) or None.
    """
    bound = 1 / math.sqrt(weight.shape[2])
    for each in (weight, bias):
        if each is not None:
            each.copy_(_side_by_side(each).uniform_(-bound, bound))


@torch.no_grad()
def init_stacked_normal(weight: Tensor, bias: Tensor | None, std: float) -> None:
    """Initialise matrices from N(0, std), biases to zero; shapes as for `init_stacked`."""
    weight.copy_(_side_by_side(weight).normal_(std=std))
    if bias is not None:
        bias.zero_()


def _side_by_side(x: Tensor) -> Tensor:
    """Return the tensor itself where its numbers lie side by side, else one like it: generators draw others into views."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the products for rows of a dtype on a device: autocast's where it is on, else that of the rows."""
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is a `DTensor`. For a plain one PyTorch's package for them, which takes a second, is not imported."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


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
    """Names of the matrices that read the token; the bias of w1 is b1. Two, w1 and w3, are one parameter, w13, with b13."""
    w2: nn.Parameter
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
        parts = () if len(self.ups) == 1 else (len(self.ups),)
        shapes: dict[str, tuple[int, ...]] = {self._up: (*parts, hidden, dim), "w2": (dim, hidden)}
        shapes |= {_bias_of(name): shape[:-1] for name, shape in shapes.items()}
        for name, shape in shapes.items():
            is_left_out = name.startswith("b") and not bias
            made = None if is_left_out else torch.empty(num_experts, *shape, device=device, dtype=dtype)
            self.register_parameter(name, None if made is None else nn.Parameter(made))
        self.reset_parameters()

    @property
    def _up(self) -> str:
        """The name of the parameter that holds all matrices that read the token."""
        return "w" + "".join(name.removeprefix("w") for name in self.ups)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self._up, "w2", *((_bias_of(self._up),) if self.bias else ())), ("b2",) if self.bias else ()

    def shard_dim(self, name: str) -> int | None:
        return {"w2": 2, "b2": None}.get(name, len(self.ups))

    def stored_as(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter in checkpoints: its own, or those of its parts along the second dimension."""
        if len(self.ups) == 1 or name not in (self._up, _bias_of(self._up)):
            return (name,)
        return tuple(map(_bias_of, self.ups)) if name.startswith("b") else self.ups

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        replaces = local_metadata.get("assign_to_params_buffers", False)
        replaces |= torch.__future__.get_swap_module_params_on_conversion()
        own = dict(self._parameters)
        for name, parameter in own.items():
            parts = self.stored_as(name)
            keys = [prefix + part for part in parts]
            if parameter is None or len(parts) == 1 or not any(key in state_dict for key in keys):
                continue
            if not replaces:  # each part is a tensor of its own meanwhile, with its own complaints
                del self._parameters[name]
                views = (parameter.detach().select(1, number) for number in range(len(parts)))
                self._parameters.update(zip(parts, views))  # type: ignore[arg-type]
            elif all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys], 1)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        finally:
            now = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update((name, now.get(name, parameter)) for name, parameter in own.items())

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
            init_stacked(getattr(self, name), getattr(self, _bias_of(name)))

    def init_normal(self, std: float, out_std: float) -> None:
        for name in (*self.ups, "w2"):
            deviation = out_std if name == "w2" else std
            init_stacked_normal(getattr(self, name), getattr(self, _bias_of(name)), deviation)

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
        """Run; kept is what the matrices that read the token give."""
        out, pre = run_experts(self._work(sharded, common, rows, gates, ends, shards))
        return out, (pre,)

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
        found = expert_gradients(work, kept[0], dy, deferred_wgrad=deferred_wgrad is not None)
        assert found.x is not None
        assert found.up is not None
        assert found.down is not None
        if deferred_wgrad is not None and found.finish is not None:
            deferred_wgrad.append(found.finish)
        d_common = () if found.down_bias is None else (found.down_bias / shards,)
        up = found.up.view(sharded[0].shape)
        up_bias = () if found.up_bias is None else (found.up_bias.view(sharded[2].shape),)
        return found.x, found.gates, (up, found.down, *up_bias), d_common

    def _work(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int
    ) -> ExpertWork:
        """Return one call as the kernels take it."""
        up, down, up_bias = self._together(sharded)
        return ExpertWork(
            x=rows,
            dispatch=None,
            gates=gates,
            gates_first=False,
            ends=ends,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=common[0] / shards if common else None,
            activation=self.activation,
            clamp=self.clamp,
            kernel=self.kernel,
        )

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert."""
        return sharded[1].shape[2]

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """See `ExpertSizes.stacked`."""
        matrices = len(self.ups) + 1
        return ExpertSizes.stacked(self.dim, self.num_units(sharded), matrices, dtype.itemsize, bias=self.bias)

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * hidden, columns): a hidden unit's row of every matrix, and its biases."""
        up, down, bias = self._together(sharded)
        columns = [up.transpose(1, 2).flatten(2), down.transpose(1, 2)]
        columns += [] if bias is None else [bias.transpose(1, 2)]
        return torch.cat(columns, dim=2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the parameters from rows of `pack`, as views."""
        ups = len(self.ups)
        widths = [ups * self.dim, self.dim, *([ups] if self.bias else [])]
        up, down, *biases = rows.view(num_experts, -1, sum(widths)).split(widths, dim=2)
        found = (up.unflatten(2, (ups, self.dim)).transpose(1, 2), *(bias.transpose(1, 2) for bias in biases))
        up, *biases = found if ups > 1 else (each.squeeze(1) for each in found)
        return (up, down.transpose(1, 2), *biases)

    def _together(self, sharded: Weights) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what reads the token, (experts, 1 or 2, hidden, dim), what writes, and the biases of what reads."""
        up, down, *biases = sharded
        bias = biases[0] if biases else None
        if len(self.ups) > 1:
            return up, down, bias
        return up.unsqueeze(1), down, None if bias is None else bias.unsqueeze(1)


@dataclass(frozen=True)
class StoredParameter:
    """What a checkpoint has under a name."""

    parameter: nn.Parameter
    part: int | None
    """Along the second dimension, of which the name means one place; None for the whole parameter."""

    def of(self, value: Tensor) -> Tensor:
        """Return what the name means of a tensor of the parameter's shape, as a view; of other shapes all."""
        return value if self.part is None or value.shape != self.parameter.shape else value.select(1, self.part)


def stored_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names that checkpoints have for what a model's state dict has under a name; see `StackedExperts.stored_as`."""
    path, dot, own = name.rpartition(".")
    module = model.get_submodule(path)
    return tuple(
        path + dot + part for part in (module.stored_as(own) if isinstance(module, StackedExperts) else (own,))
    )


def stored_parameters(model: nn.Module) -> dict[str, StoredParameter]:
    """Return a model's parameters by the names that checkpoints have for them."""
    found: dict[str, StoredParameter] = {}
    for name, parameter in model.named_parameters():
        names = stored_names(model, name)
        parts = range(len(names)) if len(names) > 1 else (None,)
        found |= {each: StoredParameter(parameter, part) for each, part in zip(names, parts)}
    return found


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by the names that checkpoints have for them, as views."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        names = stored_names(model, name)
        parts = [value] if len(names) == 1 else [value.select(1, part) for part in range(len(names))]
        found |= zip(names, parts)
    return found


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

    The parameters are w13, (num_experts, 2, hidden, dim), w2, (num_experts, dim, hidden), and with biases b13, (num_experts,
    2, hidden), and b2; w1, w3, b1 and b3 are views. Checkpoints hold these, and `load_state_dict` takes either.

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
    w13: nn.Parameter
    b13: nn.Parameter | None

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

    @property
    def w1(self) -> Tensor:
        """(num_experts, hidden, dim): the gate, a view of `w13`."""
        return self.w13.select(1, 0)

    @property
    def w3(self) -> Tensor:
        """(num_experts, hidden, dim): what is gated, a view of `w13`."""
        return self.w13.select(1, 1)

    @property
    def b1(self) -> Tensor | None:
        """(num_experts, hidden): the gate's bias, a view of `b13`; None where there is none."""
        return None if self.b13 is None else self.b13.select(1, 0)

    @property
    def b3(self) -> Tensor | None:
        """(num_experts, hidden): the bias of what is gated, a view of `b13`; None where there is none."""
        return None if self.b13 is None else self.b13.select(1, 1)


def _known(activation: str) -> str:
    """Return the name of an activation, if there is one of this name."""
    if activation not in ACTIVATIONS:
        raise InputError(f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
    return activation


def _bias_of(name: str) -> str:
    return f"b{name[1:]}"
