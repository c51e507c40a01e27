"""The interface of a router, and the parts that several routers share: linear scores, the
deterministic top-k, its weights.

The routers themselves are in `routers/`, one published method per file. A router owns the weights
that score experts and the rule that picks them. It depends on no capacity, loss or transport.
Scoring and choosing are separate steps: under activation checkpointing a recorded choice is
replayed, while the scores, which carry the gradient, are computed again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.initial_values import Draw, draw_globally
from moesaic.kernels.choice_call import ChoiceRule
from moesaic.kernels.router_product import router_logits
from moesaic.kernels.top_k import top_k_indices
from moesaic.program.grid import Grid
from moesaic.routing.routing import Choice, Scores


class KeepsFloat32(nn.Module):
    """A module whose `float32_buffers` stay float32 under `.bfloat16()`, `.half()` and
    `.to(dtype)`, but move across devices.

    These buffers must not take the model's precision: a step of 0.001 on a bias of 0.5 is lost in
    bfloat16.
    """

    float32_buffers: tuple[str, ...] = ()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert the module, but keep some buffers in float32."""
        before = {name: self.get_buffer(name) for name in self.float32_buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


class FusedChoice(NamedTuple):
    """A router as the one operation of `kernels/choice.py`, which computes what `choose` and
    `weigh` compute from `scores`."""

    logits: Callable[[Tensor], Tensor]
    """(tokens, dim) of any floating dtype -> (tokens, num_experts) float32 or float64."""
    rule: ChoiceRule
    """How experts are chosen and weighed."""
    bias: Tensor | None = None
    """(num_experts,): the balancing bias of sigmoid scores."""


Recorded = Callable[[int, int, torch.device], Choice]
"""Returns the choice of a trace for a number of tokens and of experts per token, on a device."""


class AbstractRouter(KeepsFloat32, ABC):
    """The interface of a router: a module that scores the experts for each token and chooses among
    them.

    Args:
        num_experts: the number of experts to choose from.
    """

    needs_token_ids = False
    """True for a router that reads token ids instead of activations (`Hash`)."""
    takes_best_ranked = True
    """True if each token's experts are ranked by `Scores.rank_by` alone; setting an entry to -inf
    then excludes that expert."""

    recorded: Recorded | None = None
    """The choices of a trace that is replayed (`routing/replay.py`); None if the router chooses."""

    @property
    def looks_across_tokens(self) -> bool:
        """Whether the choice for a token depends on the token's rank or on the other tokens, in the
        router's current mode (training or evaluation)."""
        return False

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        if dim < 1 or num_experts < 1:
            raise InputError(
                f"a router needs dim and num_experts of at least 1, got dim={dim}, "
                f"num_experts={num_experts}"
            )
        self.dim = dim
        self.num_experts = num_experts

    @abstractmethod
    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Score every expert for every token.

        Args:
            x_TD: (tokens, dim), float32 or float64, whatever the autocast state.
            noise: the random numbers that `draw` returned for this call.
            token_ids: (tokens,) int64 vocabulary ids, or None.
        """

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Pick experts for the tokens, by default the `top_k` highest by `rank_by`. The choice is
        not differentiable.

        Args:
            scores: the return value of `scores`.
            top_k: experts per token (on average, for expert-choice).
            valid_T: (tokens,) bool, False for padding; None if no token is padding.
            noise: the random numbers that `draw` returned for this call.
        """
        return token_choice(top_k_indices(scores.rank_by, top_k))

    @abstractmethod
    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        """Return the routing weight of every chosen copy, (N,), differentiable."""

    def fused(self, top_k: int) -> FusedChoice | None:
        """Return this router as one operation, or None if it has a method of its own, as by
        default."""
        return None

    def is_as_in(self, owner: type[AbstractRouter]) -> bool:
        """Return whether neither a subclass nor the caller has replaced a step of `owner`'s
        routing."""
        kind = type(self)
        for step in ("scores", "choose", "weigh", "logits"):
            if getattr(kind, step, None) is not getattr(owner, step, None):
                return False
            # `replayed` sets the attribute of a router whose recorded choices the caller replays
            is_replayed = step == "choose" and self.recorded is not None
            if step in vars(self) and not is_replayed:
                return False
        return True

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return the random numbers of one call, or None if the router uses none. A replay passes
        the recorded numbers."""
        return None

    def reset_parameters(self) -> None:
        """Redraw the router's matrices uniformly, as `nn.Linear` does, and reset all other state to
        its initial value."""
        for parameter in self.parameters(recurse=False):
            if parameter.dim() > 1:
                draw_linear(parameter)
        self.reset_state()

    def init_normal(self, std: float, draw: Draw = draw_globally) -> None:
        """Redraw the router's matrices from N(0, std), and reset all other state to its initial
        value."""
        for parameter in self.parameters(recurse=False):
            if parameter.dim() > 1:
                draw(parameter, partial(nn.init.normal_, std=std))
        self.reset_state()

    def reset_state(self) -> None:
        """Reset, in place, all state that is not drawn at random: biases, tables, matrices that
        start at zero."""

    def check_fits(self, top_k: int) -> None:
        """Raise an InputError with a one-line message if this router cannot choose `top_k` experts
        per token."""
        check_top_k(top_k, self.num_experts)

    def check(self, top_k: int) -> None:
        """Raise an InputError with a one-line message if this router cannot train with `top_k`
        experts per token."""
        self.check_fits(top_k)

    def join_mesh(self, grid: Grid, origin: int) -> None:
        """Learn on which mesh the experts are; by default a router does not care.

        Args:
            grid: the mesh.
            origin: the index of this process's data-parallel group.
        """

    @property
    def adapts(self) -> bool:
        """Whether `update` changes the router; a wrapper reports this of the router inside."""
        return type(self).update is not AbstractRouter.update

    def update(self, load_E: Tensor) -> None:
        """Adapt to the load of one optimizer step. By default a router does not adapt.

        Args:
            load_E: (num_experts,) int64 token copies per expert since the last step, summed over
                all ranks that train the layer. Padding, evaluation and recomputation are not
                counted.
        """


class LinearRouter(AbstractRouter):
    """A router that computes its logits as one linear map of the tokens.

    Args:
        bias: add a trained bias, initially zero, to the logits (gpt-oss).
        scale: factor on the routing weights (`routed_scaling_factor` of DeepSeek-V2 and V3).
        device: device of the parameters; None for torch's default device.
        dtype: dtype of the parameters; None for torch's default dtype.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        bias: bool = False,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        self.weight = linear_scores(dim, num_experts, device, dtype)
        """(num_experts, dim): maps tokens to logits."""
        self.logit_bias: nn.Parameter | None = None
        """(num_experts,), added to the logits; None for no bias."""
        if bias:
            zeros = torch.zeros(num_experts, device=device, dtype=dtype)
            self.logit_bias = nn.Parameter(zeros)
        self.scale = check_scale(scale)

    @torch.no_grad()
    def reset_state(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias.zero_()

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits, (tokens, num_experts), of tokens, (tokens, dim), in float32 or, for
        float64 tokens, in float64."""
        if x_TD.dtype.itemsize < 4:
            # in float32, without a float32 copy of 16-bit tokens
            logits = router_logits(x_TD, self.weight)
            return logits if self.logit_bias is None else logits + self.logit_bias
        bias = None if self.logit_bias is None else self.logit_bias.to(x_TD.dtype)
        return nn.functional.linear(x_TD, self.weight.to(x_TD.dtype), bias)


class SoftmaxWeights(AbstractRouter):
    """A router that weighs a token's chosen experts by the softmax of their logits.

    With `normalize="after"` the softmax runs over the chosen logits, and a token's weights sum to
    one. With "before" the softmax runs over all logits, and the probabilities of the chosen experts
    are used unchanged.
    """

    scale: float
    normalize: str

    def _set_normalize(self, normalize: str) -> None:
        """Set how weights are normalized, after a check."""
        if normalize not in ("before", "after"):
            raise InputError(
                f'normalize={normalize!r} is unknown: write normalize="before" or normalize="after"'
            )
        self.normalize = normalize

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        if self.normalize == "after":
            weights_TK = chosen(scores.logits, choice, top_k).softmax(1)
        else:
            weights_TK = chosen(scores.gates, choice, top_k)
        return self.scale * weights_TK.reshape(-1)

    def check(self, top_k: int) -> None:
        """Refuse weights that are always 1."""
        super().check(top_k)
        if top_k == 1 and self.normalize == "after" and self.num_experts > 1:
            raise InputError(
                'top_k=1 with normalize="after" gives every token weight 1 and the router no '
                'gradient: write normalize="before"'
            )


class LimitedRouter(AbstractRouter):
    """A wrapper that leaves a router fewer experts to choose from. Scores, weights and all else
    come from that router.

    Args:
        inner: the wrapped router, which must rank experts by scores. It scores, chooses among the
            eligible experts and weighs.
    """

    takes_best_ranked = False

    def __init__(self, inner: AbstractRouter) -> None:
        super().__init__(inner.dim, inner.num_experts)
        if not inner.takes_best_ranked:
            wrapper = type(self).__name__
            raise InputError(
                f"{wrapper} cannot wrap {type(inner).__name__}: give it a router that ranks "
                "by scores"
            )
        self.inner = inner

    @property
    def looks_across_tokens(self) -> bool:
        return self.inner.looks_across_tokens

    def reset_parameters(self) -> None:
        self.inner.reset_parameters()

    def init_normal(self, std: float, draw: Draw = draw_globally) -> None:
        self.inner.init_normal(std, draw)

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        return self.inner.draw(num_tokens, device)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        return self.inner.scores(x_TD, noise, token_ids)

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return self.inner.weigh(scores, choice, top_k)

    def check(self, top_k: int) -> None:
        self.check_fits(top_k)
        self.inner.check(top_k)

    def check_fits(self, top_k: int) -> None:
        self.inner.check_fits(top_k)

    @property
    def adapts(self) -> bool:
        return self.inner.adapts

    def update(self, load_E: Tensor) -> None:
        self.inner.update(load_E)


def is_whole(value: object) -> bool:
    """Return whether `value` is an integer of Python or numpy; a bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise InputError if `top_k` experts cannot be chosen out of `num_experts`."""
    fits = is_whole(top_k) and 1 <= top_k <= num_experts
    if not fits:
        raise InputError(
            f"top_k={top_k} does not fit num_experts={num_experts}: choose 1 <= top_k <= "
            f"{num_experts}"
        )


def check_scale(scale: object) -> float:
    """Return a factor on routing weights; InputError if it is no finite number."""
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise InputError(f"scale={scale!r}: must be a finite number")
    return float(scale)


def linear_scores(
    dim: int,
    num_experts: int,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a router matrix, (num_experts, dim), drawn uniformly from +-1/sqrt(dim) as `nn.Linear`
    does."""
    matrix = torch.empty(num_experts, dim, device=device, dtype=dtype)
    return nn.Parameter(draw_linear(matrix))


@torch.no_grad()
def draw_linear(weight: Tensor) -> Tensor:
    """Redraw a matrix in place, uniformly from +-1/sqrt(its last size), and return it."""
    bound = 1 / math.sqrt(weight.shape[-1])
    return weight.uniform_(-bound, bound)


def token_choice(experts_TK: Tensor) -> Choice:
    """Return the choice of copies, in token order, for each token's list of experts.

    Args:
        experts_TK: (tokens, top_k) int64, best first.
    """
    num_tokens, top_k = experts_TK.shape
    token = torch.arange(num_tokens, device=experts_TK.device).repeat_interleave(top_k)
    slot = torch.arange(top_k, device=experts_TK.device).repeat(num_tokens)
    # a copy: a view of one column would keep the order of all experts
    return Choice(token, experts_TK.contiguous().view(-1), slot, per_token=top_k)


def chosen(values_TE: Tensor, choice: Choice, top_k: int) -> Tensor:
    """Return the values of each token's chosen experts, (tokens, top_k), for a choice made by
    `token_choice`."""
    return values_TE.gather(1, choice.expert.view(-1, top_k))
