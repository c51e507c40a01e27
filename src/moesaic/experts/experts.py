"""The interface of a layer's experts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moesaic.cost.held import ExpertSizes
from moesaic.kernels.permute import Permutation, permute, unpermute

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
