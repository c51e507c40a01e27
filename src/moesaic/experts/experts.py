"""The interface of a layer's experts, and the built-in experts. Their weights are stacked: one
grouped product computes all experts, and one tensor is sharded over them.

A row is the copy of a token for one of its experts; a call's R rows lie sorted by expert, and its
gates are their routing weights. Experts are spread once each rank of a mesh holds only its part of
them. Shards divide the hidden units of an expert: split (or sharded) parameters are cut by them,
and common ones are whole in every shard. A mark is a function that sets an attribute or hook of a
parameter.

Gated experts store gate and up in one parameter, (experts, 2, hidden, dim), with the same bytes as
Hugging Face's `gate_up_proj`; gate and up are views of it. Ranks and messages split the hidden
width, which is the third dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.replaced_parameters import ReplacedParameters, owned_parameters
from moesaic.initial_values import Draw, draw_globally
from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.expert_ffn import expert_ffn, expert_gradients, run_experts
from moesaic.kernels.permute import Permutation, in_expert_order, only_sent, permute, unpermute
from moesaic.kernels.pick import kind_of
from moesaic.kernels.products import converts
from moesaic.kernels.work import Dispatch, ExpertWork, Places
from moesaic.program.expert_sizes import ExpertSizes

Weights = tuple[Tensor, ...]
"""Parameters of experts, in the order of `AbstractExperts.names`."""
DeferredWgrad = list[Callable[[], None]]
"""Functions to call before the gradients of split parameters are read."""
Runner = Callable[[Tensor, Tensor | None, Weights, Weights], Tensor]
"""(rows, routing weights, split parameters, common parameters) -> rows."""


_NUM_MARKS = "_num_marks"
"""The attribute of a parameter that counts its marks. It is lost with them, also if torch swaps a
DTensor's contents."""


@dataclass(frozen=True)
class ExpertCall:
    """The rows of one call, sorted by expert, and the parameters of the experts."""

    sharded: Weights
    """Parameters of the experts that have rows, whole or a shard of their hidden width."""
    common: Weights
    """Parameters that all shards of an expert hold."""
    rows: Tensor
    """(R, dim), sorted by expert; with `places`, rows of any number and order."""
    gates: Tensor | None
    """(R,) routing weights; None for weights of 1."""
    ends: Tensor
    """(num_experts,) int32, one past the last row of each expert."""
    shards: int = 1
    """Number of shards of each expert, whose results will be summed."""
    places: Places | None = None
    """Where the rows lie, for `run` and `gradients` of experts that have `gathers`."""


class ExpertGradients(NamedTuple):
    """The gradients of one call's inputs."""

    rows: Tensor
    """(R, dim)."""
    gates: Tensor | None
    """(R,); None for a call without routing weights."""
    sharded: Weights
    """Those of the split parameters."""
    common: Weights
    """Those of the parameters that an expert's shards share."""


class AbstractExperts(nn.Module, ABC):
    """All experts of a layer, run over rows that are sorted by expert.

    A subclass defines `compute`, which takes the weights as arguments, since on a mesh the weights
    of a call may be gathered from other ranks. `run` and `gradients` are forward and backward
    without autograd, for the expert tasks of a program.

    Args:
        dim: width of a token, in and out.
    """

    gathers = False
    """Whether `run` and `gradients` take rows where they lie (`ExpertCall.places`). Others get them
    sorted by expert."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.dim = dim
        self.num_experts = num_experts
        self.is_spread = False
        """Whether the parameters are this rank's part of experts that are spread over a mesh."""
        self.replaced = ReplacedParameters()
        """Parameters that were replaced when experts were spread or sharded."""
        self._marks: list[Callable[[nn.Parameter], object]] = []
        """The marks of all parameters, in the order of the calls of `mark`."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or convert the parameters; say what is wrong if another library holds those that are
        spread over ranks."""
        try:
            super()._apply(fn, recurse)
        except RuntimeError as error:
            if not self.is_spread or "Couldn't swap" not in str(error):
                raise
            raise InputError(
                f"{type(self).__name__} is spread over ranks and another library already refers "
                "to its parameters, so they cannot be moved or converted; DeepSpeed's engine "
                "does this: give deepspeed.initialize the model without parallelize (ZeRO splits "
                "it), or train with another recipe of docs/recipes.md"
            ) from error
        if self._marks:
            for parameter in self.parameters():
                if not hasattr(parameter, _NUM_MARKS):
                    # torch keeps hooks of a swapped DTensor, and no longer calls them: the marks
                    # register theirs again
                    parameter._backward_hooks = None
        self.mark_all()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *how: Any
    ) -> None:
        """Load parameters; where they take the places of those that are spread over ranks
        (`assign=True`), refuse whole ones, and note them for optimizers that hold the others."""
        assigns = self.is_spread and local_metadata.get("assign_to_params_buffers", False)
        owned = owned_parameters(self) if assigns else []
        for each in owned:
            value = state_dict.get(prefix + each.name)
            is_whole = value is not None and not hasattr(value, "placements")
            if each.owner is self and is_whole and hasattr(each.parameter(), "placements"):
                raise InputError(
                    f"load_state_dict(assign=True) would give this rank the whole of {prefix}"
                    f"{each.name}, which is spread over ranks: load before parallelize, or "
                    "DTensors of torch.distributed.checkpoint"
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *how)
        for each in owned:
            new = each.owner._parameters[each.name]
            if new is not None and new is not each.parameter():
                self.replaced.note(each, new)

    @property
    @abstractmethod
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parameters: those that shards of an expert split, and those that they hold
        in common."""

    @abstractmethod
    def compute(self, call: ExpertCall) -> Tensor:
        """Run each expert on its rows and scale each result by its routing weight, (R, dim);
        differentiable."""

    def compute_tokens(
        self,
        x: Tensor,
        weight: Tensor,
        sharded: Weights,
        common: Weights,
        *,
        permutation: Permutation,
        weight_first: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Dispatch tokens to experts, run them, and sum each token's results by routing weight;
        differentiable.

        Args:
            x: (tokens, dim).
            weight: (R,) routing weights in the order of the routing.
            sharded: as in `ExpertCall`.
            common: as in `ExpertCall`.
            permutation: the routing, sorted by expert.
            weight_first: multiply by the routing weight before the expert rather than after it.
            dtype: dtype of the result; None for that of `x`.

        Returns:
            (tokens, dim).
        """
        rows = permute(x, permutation)
        # in the order of the rows; 0 for copies that are not sent, whose rows hold arbitrary values
        gates = only_sent(in_expert_order(weight, permutation), permutation)
        if weight_first:
            rows = rows * gates.to(rows.dtype).unsqueeze(1)
        call = ExpertCall(
            sharded, common, rows, gates=None if weight_first else gates, ends=permutation.ends
        )
        out = self.compute(call)
        return unpermute(out, permutation, dtype=x.dtype if dtype is None else dtype)

    def reset_parameters(self) -> None:
        """Initialise weights and biases as in a new layer; by default with the `reset_parameters`
        of the modules inside."""
        for module in self.children():
            reset_all(module)

    def mark(self, mark: Callable[[nn.Parameter], object]) -> None:
        """Call `mark` on each parameter, and on each one that takes its place later, in `to_empty`
        or a copy of the experts.

        Attributes and hooks of a parameter would be lost with it.

        Args:
            mark: a function or lambda, which copies of the experts share.
        """
        self._marks.append(mark)
        self.mark_all()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_all()

    def mark_all(self) -> None:
        """Mark the parameters that took the place of marked ones, such as those of FSDP2."""
        if not self._marks:
            return
        for parameter in self.parameters():
            num_marks = getattr(parameter, _NUM_MARKS, 0)
            for mark in self._marks[num_marks:]:
                mark(parameter)
            setattr(parameter, _NUM_MARKS, len(self._marks))

    @abstractmethod
    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Draw the weights from normal distributions and set biases to zero. Modules of the user's
        own stay as they are.

        Args:
            std: standard deviation of the matrices that read the token.
            out_std: standard deviation of the matrices that write the result.
            draw: what the numbers come from.
        """

    @abstractmethod
    def pack(self, sharded: Weights) -> Tensor:
        """Return the split parameters as rows to send, sorted by expert, then by hidden unit."""

    @abstractmethod
    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the split parameters of `num_experts` experts from their rows; the inverse of
        `pack`."""

    def first(self, sharded: Weights, num_experts: int) -> Weights:
        """Return the split parameters of the first experts of `sharded`, as views."""
        return tuple(parameter[:num_experts] for parameter in sharded)

    def trained(self, sharded: Weights) -> Weights:
        """Return split parameters in the form of their gradients, where those of frozen ones have
        no elements."""
        return sharded

    def shard_dim(self, name: str) -> int | None:
        """Return the dimension along which etp splits a parameter; None if etp does not split
        it."""
        return None

    @abstractmethod
    def num_units(self, sharded: Weights) -> int:
        """Return how many rows `pack` makes of one expert."""

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """Return the sizes from which the memory of a call is computed. By default they are
        measured.

        The measurement runs one expert on two rows and counts what autograd saves; the backward
        pass is assumed to need twice the forward pass. A unit is one row of the packed weights:
        those of one hidden unit. Nothing is kept from forward to backward besides the row, since
        `gradients` recomputes the result.

        Args:
            sharded: split parameters.
            dtype: dtype of the products.
        """
        numbers_per_unit = self.pack(self.first(sharded, 1)).shape[1]
        units = self.num_units(sharded)
        saved_per_row = self._saved_per_row(sharded)
        return ExpertSizes(
            dim=self.dim,
            units=units,
            unit_numbers=numbers_per_unit,
            kept=0,
            # numbers per row: what autograd saves, and the result
            forward=saved_per_row + self.dim,
            backward=2 * (saved_per_row + self.dim),
            element_bytes=dtype.itemsize,
        )

    def _saved_per_row(self, sharded: Weights) -> int:
        """Return how many numbers per row autograd saves for one expert, not counting parameters;
        measured on two rows."""
        weights = tuple(weight.detach().requires_grad_() for weight in self.first(sharded, 1))
        weight_addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        numbers_by_address = dict[int, int]()

        def note(value: Tensor) -> Tensor:
            """Count what autograd saves, each storage once and no weights."""
            storage = value.untyped_storage()
            address = storage.data_ptr()
            if address not in weight_addresses:
                numbers_by_address[address] = storage.nbytes() // value.element_size()
            return value

        rows = weights[0].new_zeros(2, self.dim).requires_grad_()
        ends = torch.tensor([len(rows)], dtype=torch.int32, device=rows.device)
        devices = [rows.device] if rows.is_cuda else []
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda value: value)
        with torch.enable_grad(), torch.random.fork_rng(devices), hooks:
            self.compute(ExpertCall(weights, common=(), rows=rows, gates=None, ends=ends))
        saved_numbers = sum(numbers_by_address.values())
        return math.ceil(saved_numbers / len(rows))

    def forward(
        self,
        rows: Tensor,
        weight: Tensor | None,
        ends: Tensor | None = None,
        run: Runner | None = None,
    ) -> Tensor:
        """Run the experts with their own weights.

        Args:
            rows: (R, dim), sorted by expert; with `run`, the rows that `run` takes.
            weight: (R,) routing weights, or None for weights of 1.
            ends: (num_experts,) int32, one past the last row of each expert; None only with `run`.
            run: computes the result instead, for example on a mesh. It is called in here because
                wrappers such as FSDP have gathered the parameters by now.

        Returns:
            (R, dim), or what `run` returns.
        """
        sharded, common = self.weights_in(compute_dtype(rows.dtype, rows.device))
        if run is not None:
            return run(rows, weight, sharded, common)
        assert ends is not None
        return self.compute(ExpertCall(sharded, common, rows, gates=weight, ends=ends))

    def weights(self) -> tuple[Weights, Weights]:
        """Return the parameters of `names`; of a DTensor, this rank's part."""
        sharded, common = self.names
        return tuple(map(self._local, sharded)), tuple(map(self._local, common))

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """Return `weights`, with those that enter products cast to `dtype`; by default nothing is
        cast."""
        return self.weights()

    def begin_step(self) -> None:
        """Prepare for a new optimizer step, during which the parameters do not change."""

    def _local(self, name: str) -> Tensor:
        """Return a parameter, or this rank's part of a sharded one."""
        owner, _, leaf = name.rpartition(".")
        # a plain tensor within `functional_call`
        parameter: Tensor = getattr(self.get_submodule(owner), leaf)
        # only a DTensor has placements; its class would cost a second of imports
        placements = getattr(parameter, "placements", None)
        if placements is None:
            return parameter
        local: Tensor = parameter.to_local(grad_placements=placements)  # type: ignore[attr-defined]
        return local

    @torch.no_grad()
    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        """Return the result of `compute` and what `gradients` needs, always the same number of
        tensors.

        By default these are the states of the random generators, so that a recomputation draws the
        same dropout.
        """
        rows = call.rows
        states = [torch.get_rng_state()]
        if rows.is_cuda:
            states.append(torch.cuda.get_rng_state(rows.device))
        return self.compute(call), tuple(states)

    def gradients(
        self,
        call: ExpertCall,
        kept: Weights,
        dy: Tensor,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> ExpertGradients:
        """Return the gradients of rows, gates, split and common parameters; by default by
        recomputing the result.

        Args:
            call: as for `run`.
            kept: the second result of `run`.
            dy: (R, dim), gradient of the result.
            deferred_wgrad: a list to which this may append deferred work for the split parameters'
                gradients, so that the rows' gradient can be sent first. None: all gradients are
                complete on return.
        """
        rows = call.rows.detach().requires_grad_()
        sharded = tuple(weight.detach().requires_grad_() for weight in call.sharded)
        common = tuple(weight.detach().requires_grad_() for weight in call.common)
        gates = None if call.gates is None else call.gates.detach().requires_grad_()

        devices = [rows.device] if rows.is_cuda else []
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.set_rng_state(kept[0])  # the states in which `run` began
            if rows.is_cuda:
                torch.cuda.set_rng_state(kept[1], rows.device)
            again = ExpertCall(sharded, common, rows, gates, ends=call.ends, shards=call.shards)
            out = self.compute(again)

        inputs = [rows, *sharded, *common]  # then the gates, if any
        if gates is not None:
            inputs.append(gates)
        d_rows, *d_others = torch.autograd.grad(out, inputs, dy, materialize_grads=True)
        d_gates = None if gates is None else d_others.pop()
        return ExpertGradients(
            d_rows,
            d_gates,
            sharded=tuple(d_others[: len(sharded)]),
            common=tuple(d_others[len(sharded) :]),
        )


def reset_all(tree: nn.Module) -> None:
    """Call `reset_parameters` of every module of a tree that has it."""
    for module in tree.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of products with rows of a dtype on a device: autocast's if it is enabled,
    else that of the rows."""
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def in_product_dtype(x: Tensor) -> Tensor:
    """Return tokens in the dtype of their products if autocast makes that narrower, else as they
    are: one cast serves all stages of a call."""
    dtype = compute_dtype(x.dtype, x.device)
    return x.to(dtype) if dtype.itemsize < x.dtype.itemsize else x


def in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter in a dtype; one of integers, such as codes of four bits, as it is."""
    return weight.to(dtype) if weight.is_floating_point() else weight


class StackedExperts(AbstractExperts):
    """Base of the built-in experts: matrices that read the token, an activation, and one matrix
    that writes the result.

    Args:
        hidden: inner width of one expert.
        bias: add biases.
        device: device on which the parameters are created; None for torch's default device.
        dtype: dtype of the parameters; None for torch's default dtype.
    """

    gathers = True
    ups: tuple[str, ...]
    """Names of the matrices that read the token; w1's bias is b1. Two of them, w1 and w3, are one
    parameter, w13, with b13."""
    w2: nn.Parameter
    activation: str
    """The activation between the products. If two matrices read the token, the activated first
    product gates the second."""
    clamp: Clamp | None = None
    """The clamp of clamped SwiGLU; None for other experts."""
    kernel: str = "auto"
    """The kernel of the matrix products: a name in `kernels.pick.TIERS`, or "auto" to choose one
    for the device."""

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
        """The casts of this optimizer step, by the names of parameters; empty before the first
        `begin_step`."""
        up_shape = (hidden, dim)
        shapes: dict[str, tuple[int, ...]] = {
            self._up: up_shape if len(self.ups) == 1 else (len(self.ups), *up_shape),
            "w2": (dim, hidden),
        }
        # a bias has a number for each output, and the last dimension of a matrix is its input
        shapes |= {_bias_of(name): shape[:-1] for name, shape in shapes.items()}

        for name, shape in shapes.items():
            if name.startswith("b") and not bias:
                self.register_parameter(name, None)
                continue
            tensor = torch.empty(num_experts, *shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(tensor))
        self.reset_parameters()

    @property
    def _up(self) -> str:
        """The name of the parameter that holds all matrices that read the token."""
        return "w" + "".join(name.removeprefix("w") for name in self.ups)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        # up, down and the biases of up: other methods take them in this order
        if not self.bias:
            return (self._up, "w2"), ()
        return (self._up, "w2", _bias_of(self._up)), ("b2",)

    def shard_dim(self, name: str) -> int | None:
        if name == "b2":
            return None
        if name == "w2":
            return 2
        # the hidden units follow the experts, and gate and up where they are one parameter: they
        # are dimension 1 with one matrix, and 2 with two
        return len(self.ups)

    @property
    def paired(self) -> tuple[str, ...]:
        """Names of the parameters whose second dimension is (gate, up); () for experts without a
        gate."""
        return () if len(self.ups) == 1 else (self._up, _bias_of(self._up))

    def begin_step(self) -> None:
        """Drop the casts of the previous step, and start to keep those of this one."""
        self._casts = {
            name: _KeptCast(self.get_parameter(name)) for names in self.names for name in names
        }

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        """Return the parameters in a dtype. In training, each is cast once per optimizer step,
        after `begin_step` was called.

        A parameter that was changed since, for example by loading a checkpoint, is cast again.
        Parameters that FSDP gathers for a call are not kept, since FSDP frees them between calls
        (`shard_over_data` can gather them in `dtype`).
        """
        sharded_names, common_names = self.names
        sharded = tuple(self._cast(name, dtype) for name in sharded_names)
        common = tuple(self._cast(name, dtype) for name in common_names)
        return sharded, common

    def _cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter in a dtype; in training the cast is kept until the parameter
        changes."""
        parameter = self._local(name)
        if parameter.dtype == dtype or torch.compiler.is_compiling():
            return parameter.to(dtype)
        # nothing is kept outside training
        if not self.training or not torch.is_grad_enabled():
            return parameter.to(dtype)

        kept = self._casts.get(name)
        # another parameter may have its place, such as one that FSDP gathered for this call
        if kept is None or kept.parameter is not self._parameters[name]:
            return parameter.to(dtype)
        # A captured graph must cast the values that the parameter has at each replay.
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return parameter.to(dtype)

        # torch counts a parameter's changes in `_version`
        is_changed = kept.version != parameter._version
        if kept.cast is None or is_changed or kept.cast.dtype != dtype:
            kept.cast = parameter.detach().to(dtype)
            kept.version = parameter._version
        cast: Tensor = _Cast.apply(parameter, kept.cast)
        return cast

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the casts of this step, since a copy has parameters of its own."""
        return {**self.__dict__, "_casts": {}}

    def reset_parameters(self) -> None:
        """Initialise every matrix and bias as `nn.Linear` would: uniformly in +-1/sqrt(its input
        width)."""
        for name in (self._up, "w2"):
            weight = getattr(self, name)
            bias = getattr(self, _bias_of(name))
            bound = 1 / math.sqrt(weight.shape[-1])
            fill = partial(nn.init.uniform_, a=-bound, b=bound)
            draw_globally(weight, fill, by_expert=True)
            if bias is not None:
                draw_globally(bias, fill, by_expert=True)

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Draw the weights from normal distributions and set biases to zero."""
        for name, deviation in ((self._up, std), ("w2", out_std)):
            draw(getattr(self, name), partial(nn.init.normal_, std=deviation), by_expert=True)
            bias = getattr(self, _bias_of(name))
            if bias is not None:
                nn.init.zeros_(bias)

    def compute(self, call: ExpertCall) -> Tensor:
        dtype = compute_dtype(call.rows.dtype, call.rows.device)
        return expert_ffn(self.work(_cast_to(dtype, call)))

    def compute_tokens(
        self,
        x: Tensor,
        weight: Tensor,
        sharded: Weights,
        common: Weights,
        *,
        permutation: Permutation,
        weight_first: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Run the experts on tokens, gathered and summed by the kernels."""
        call = ExpertCall(
            sharded,
            common,
            rows=x,
            gates=in_expert_order(weight, permutation),
            ends=permutation.ends,
        )
        cast = _cast_to(compute_dtype(x.dtype, x.device), call)
        work = self.work(cast, permutation.dispatch, gates_first=weight_first)
        return expert_ffn(work, x.dtype if dtype is None else dtype)

    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        """Run the experts, and keep the pre-activations, which the matrices that read the token
        produce."""
        out, pre = run_experts(self.work(call))
        return out, (pre,)

    def gradients(
        self,
        call: ExpertCall,
        kept: Weights,
        dy: Tensor,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> ExpertGradients:
        """Return the gradients by explicit products."""
        grads = expert_gradients(
            self.work(call), kept[0], dy, deferred_wgrad=deferred_wgrad is not None
        )
        assert grads.x is not None
        assert grads.up is not None
        assert grads.down is not None
        if deferred_wgrad is not None and grads.finish is not None:
            deferred_wgrad.append(grads.finish)

        # the shapes of the parameters, which have no dimension of one matrix without a gate
        sharded: Weights = (grads.up.view(call.sharded[0].shape), grads.down)
        if grads.up_bias is not None:  # the third of the split parameters, see `names`
            sharded += (grads.up_bias.view(call.sharded[2].shape),)
        # each shard added its part of b2, since the shards' results are summed
        common = () if grads.down_bias is None else (grads.down_bias / call.shards,)
        return ExpertGradients(grads.x, grads.gates, sharded=sharded, common=common)

    def work(
        self, call: ExpertCall, dispatch: Dispatch | None = None, *, gates_first: bool = False
    ) -> ExpertWork:
        """Return one call in the form that the kernels take.

        Args:
            dispatch: where each row's token is, if the call's rows are tokens; None for rows.
            gates_first: multiply by the gates before the expert rather than after it.
        """
        up, down, up_bias = self._with_gate_dim(call.sharded)
        # the results of an expert's shards are summed, so that each adds its part of the bias
        down_bias = call.common[0] / call.shards if call.common else None
        return ExpertWork(
            x=call.rows,
            dispatch=dispatch,
            gates=call.gates,
            gates_first=gates_first,
            ends=call.ends,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            activation=self.activation,
            clamp=self.clamp,
            kernel=self.kernel,
            places=call.places,
        )

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert."""
        return sharded[1].shape[2]

    def sizes(self, sharded: Weights, dtype: torch.dtype) -> ExpertSizes:
        """Return the sizes from which the memory of a call is computed, by the kernel that runs;
        `dtype` is that of the products."""
        matrices = len(self.ups) + 1
        return ExpertSizes.stacked(
            self.dim,
            self.num_units(sharded),
            matrices,
            dtype.itemsize,
            bias=self.bias,
            kernel=kind_of(sharded[0].device),
            converts=converts(dtype),
            # routing weights in float16 may be too small to divide by, so they are applied late
            # (`kernels/by_expert.py`)
            weights_late=dtype == torch.float16,
        )

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * hidden, columns). A row holds one hidden unit's entries of every
        matrix, and its biases."""
        up, down, bias = self._with_gate_dim(sharded)
        # each (num_experts, hidden, columns), by bringing the hidden units to dimension 1
        columns = [up.transpose(1, 2).flatten(2), down.transpose(1, 2)]
        if bias is not None:
            columns.append(bias.transpose(1, 2))
        return torch.cat(columns, dim=2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the parameters from the rows of `pack`, as views."""
        num_ups = len(self.ups)
        widths = [num_ups * self.dim, self.dim]
        if self.bias:
            widths.append(num_ups)
        by_unit = rows.view(num_experts, -1, sum(widths))  # (num_experts, hidden, columns)
        up, down, *biases = by_unit.split(widths, dim=2)

        # the hidden units go back behind gate and up
        up = up.unflatten(2, (num_ups, self.dim)).transpose(1, 2)
        biases = [bias.transpose(1, 2) for bias in biases]
        if num_ups == 1:
            up = up.squeeze(1)
            biases = [bias.squeeze(1) for bias in biases]
        return (up, down.transpose(1, 2), *biases)

    def _with_gate_dim(self, sharded: Weights) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return up, (experts, 1 or 2, hidden, dim), down, and the biases of up, (experts, 1 or 2,
        hidden)."""
        up, down, *biases = sharded
        bias = biases[0] if biases else None
        if len(self.ups) > 1:
            return up, down, bias
        if bias is not None:
            bias = bias.unsqueeze(1)
        return up.unsqueeze(1), down, bias


@dataclass
class _KeptCast:
    """A parameter cast to the dtype of a step's products."""

    parameter: nn.Parameter
    version: int = 0
    """The parameter's version when it was cast."""
    cast: Tensor | None = None


class _Cast(torch.autograd.Function):
    """A parameter in another dtype, cast earlier. The gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class PlainExperts(StackedExperts):
    """Two matrices: `act(x @ w1.T + b1) @ w2.T + b2`; biases are (num_experts, hidden) and
    (num_experts, dim).

    The other arguments are those of `StackedExperts`.

    Args:
        activation: a key of `ACTIVATIONS`: "gelu", "gelu_tanh", "relu", "relu2" (relu squared) or
            "silu".
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
        self.activation = _known_activation(activation)


class GatedExperts(StackedExperts):
    """Three matrices: `(act(x @ w1.T + b1) * (x @ w3.T + b3)) @ w2.T + b2`. With silu this is
    SwiGLU; names are Mixtral's.

    The parameters are w13, (num_experts, 2, hidden, dim), and w2, (num_experts, dim, hidden). With
    biases there are also b13, (num_experts, 2, hidden), and b2. w1, w3, b1 and b3 are views. The
    other arguments are those of `StackedExperts`.

    Args:
        activation: a key of `ACTIVATIONS`.
        clamp: clamps gate and up, as in gpt-oss ("clamped SwiGLU"); see `Clamp`.

    Raises:
        InputError: for an unknown activation, or a clamp with an activation other than silu.
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
        self.activation = _known_activation(activation)
        self.clamp = clamp
        if clamp is not None and activation != "silu":
            raise InputError(
                f"GatedExperts: clamp belongs to silu, not to {activation}: leave one of the "
                "two out"
            )

    @property
    def w1(self) -> Tensor:
        """(num_experts, hidden, dim): the gate, a view of `w13`."""
        return self.w13.select(1, 0)

    @property
    def w3(self) -> Tensor:
        """(num_experts, hidden, dim): the matrix whose product is gated, a view of `w13`."""
        return self.w13.select(1, 1)

    @property
    def b1(self) -> Tensor | None:
        """(num_experts, hidden): the gate's bias, a view of `b13`; None without biases."""
        return None if self.b13 is None else self.b13.select(1, 0)

    @property
    def b3(self) -> Tensor | None:
        """(num_experts, hidden): the bias of the gated product, a view of `b13`; None without
        biases."""
        return None if self.b13 is None else self.b13.select(1, 1)


class BorrowedExperts(StackedExperts):
    """Stacked experts whose parameters are another module's, such as another library's, which keeps
    and initialises them.

    Args:
        dim: width of a token.
        num_experts: experts of all ranks together.
        read: returns this rank's part of the parameters as (split, common), in the order of
            `names`; differentiable.
        gated: whether two matrices read the token, as in `GatedExperts`.
        activation: a key of `ACTIVATIONS`.
        clamp: as for `GatedExperts`.
        bias: whether the parameters include biases.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        read: Callable[[], tuple[Weights, Weights]],
        gated: bool = True,
        activation: str = "silu",
        clamp: Clamp | None = None,
        bias: bool = False,
    ) -> None:
        # skips StackedExperts, which would create parameters
        AbstractExperts.__init__(self, dim, num_experts)
        self.ups = ("w1", "w3") if gated else ("w1",)
        self.activation = _known_activation(activation)
        self.clamp = clamp
        self.bias = bias
        self.is_spread = True  # `read` returns this rank's part
        self._read = read

    def weights(self) -> tuple[Weights, Weights]:
        return self._read()

    def weights_in(self, dtype: torch.dtype) -> tuple[Weights, Weights]:
        return self._read()


def _cast_to(dtype: torch.dtype, call: ExpertCall) -> ExpertCall:
    """Return a call with rows and parameters cast to a dtype. It has no places: only `run` and
    `gradients`, which cast nothing, get calls with some."""
    return ExpertCall(
        sharded=tuple(weight.to(dtype) for weight in call.sharded),
        common=tuple(weight.to(dtype) for weight in call.common),
        rows=call.rows.to(dtype),
        gates=call.gates,
        ends=call.ends,
        shards=call.shards,
    )


def _known_activation(activation: str) -> str:
    """Return the name of an activation, after a check that it is known."""
    if activation not in ACTIVATIONS:
        raise InputError(
            f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}"
        )
    return activation


def _bias_of(name: str) -> str:
    return f"b{name[1:]}"
