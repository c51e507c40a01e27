"""The dense reference of the MoE layer, written as plainly as possible: float64, token-by-expert
tables, no grouped product.

The fast layer and this module share no arithmetic. Softmax and sigmoid top-k routing is computed
here. Other routers provide their own scores, choices and weights in float64, which their own tests
check. Capacity, experts, combine and every auxiliary loss are always computed here.

A copy is a token at one of its experts, and a copy that the capacity admits is sent; a twin is the
float64 copy of a layer. Letters after a name are its dimensions: T tokens, E experts, K slots (a
token's first choice, second choice, ...), D the width of a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from moesaic.experts import AbstractExperts, GatedExperts, ModuleExperts, PlainExperts
from moesaic.layer import MoE
from moesaic.routing.capacity import AbstractCapacity, Capacity
from moesaic.routing.losses import AbstractLoss, Importance, LoadBalance, ZLoss
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import SigmoidTopK, SoftmaxTopK

T = TypeVar("T")


class Copy(NamedTuple):
    """One token copy that a router chose."""

    token: int
    expert: int
    slot: int
    weight: Tensor
    """(): float64, differentiable."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Results of the reference for one call."""

    y: Tensor
    """The output, of the tokens' shape, float64, differentiable; no auxiliary loss is injected into
    its gradient."""
    rows: list[tuple[int, int]]
    """(token, expert) of each copy that the capacity admits, in token order."""
    requested: list[int]
    """Copies per expert before capacity."""
    losses: dict[str, Tensor]
    """() float64 each, differentiable: the auxiliary losses before their coefficient."""
    loss: Tensor
    """(): the sum of coefficient * loss, float64, differentiable."""


def in_float64(layer: MoE) -> MoE:
    """Return a float64 copy of `layer` in the same mode (training or evaluation), without
    gradients."""
    twin = deepcopy(layer).double()
    twin.zero_grad(set_to_none=True)
    return twin


def reference(
    twin: MoE,
    x: Tensor,
    *,
    mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    top_k: int | None = None,
    capacity: AbstractCapacity | None = None,
    noise: Tensor | None = None,
    sequence_T: Tensor | None = None,
    domains: Sequence[range] | None = None,
    output: Callable[[MoE, Tensor, Sequence[Copy]], Tensor] | None = None,
) -> Reference:
    """Compute the layer densely.

    If the router draws random numbers and `noise` is None, seed torch as before the call of the
    layer.

    Args:
        twin: the float64 copy of the layer that `in_float64` returned.
        x: (..., dim) float64.
        mask: (...) bool, False for padding.
        token_ids: (...) int64.
        top_k: experts per token; None for the layer's own value in its mode.
        capacity: None for the layer's own capacity in its mode.
        noise: the random numbers that the router's `draw` returned; None to draw them.
        sequence_T: (tokens,) the index of each token's sequence; None if x is (sequences, length,
            dim).
        domains: consecutive ranges of tokens, one per routing rank, for a capacity per rank; None
            for one range of all tokens.
        output: sums the copies' results into tokens; None for `reference_output`.
    """
    assert x.dtype == torch.float64, f"the reference computes in float64, got {x.dtype}"
    if top_k is None:
        top_k = _of_mode(twin, twin.top_k, twin.eval_top_k)
    if capacity is None:
        capacity = _of_mode(twin, twin.capacity, twin.eval_capacity)
    x_TD = x.reshape(-1, twin.dim)
    if sequence_T is None:
        sequence_T = _sequences_of(x)
    valid_T = torch.ones(len(x_TD), dtype=torch.bool) if mask is None else mask.reshape(-1)
    if noise is None:
        noise = twin.router.draw(len(x_TD), x.device)
    ids_T = None if token_ids is None else token_ids.reshape(-1)
    logits, probs, copies = reference_choice(twin, x_TD, valid_T, noise, ids_T, top_k)
    sent = _admitted(capacity, copies, valid_T, domains, top_k, twin.num_experts)
    y_TD = (output or reference_output)(twin, x_TD, sent)
    if twin.shared is not None:
        y_TD = y_TD + _shared_of_valid(twin, x_TD, valid_T)
    losses = _losses(twin, logits, probs, copies, valid_T, sequence_T)
    total = torch.zeros((), dtype=torch.float64)
    for loss in twin.losses:
        total = total + loss.coefficient * losses[loss.name]
    return Reference(
        y=y_TD.view(x.shape),
        rows=sorted((copy.token, copy.expert) for copy in sent),
        requested=_per_expert(copies, twin.num_experts),
        losses=losses,
        loss=total,
    )


def _of_mode(twin: MoE, trained: T, evaluated: T | None) -> T:
    """Return the setting of a layer in its mode, given that of training, and that of evaluation if
    it has another."""
    return trained if twin.training or evaluated is None else evaluated


def _losses(
    twin: MoE,
    logits: Tensor,
    probs: Tensor,
    copies: Sequence[Copy],
    valid_T: Tensor,
    sequence_T: Tensor,
) -> dict[str, Tensor]:
    """Return the layer's auxiliary losses by name; see `reference_loss`."""
    return {
        loss.name: reference_loss(
            loss,
            logits,
            probs=probs,
            copies=copies,
            valid_T=valid_T,
            sequence_T=sequence_T,
            earlier_E=twin.step_counts,
        )
        for loss in twin.losses
    }


def _sequences_of(x: Tensor) -> Tensor:
    """Return the index of each token's sequence, (tokens,), for x of (sequences, length, dim)."""
    num_tokens = math.prod(x.shape[:-1])
    if not x.numel():  # no tokens
        return torch.arange(num_tokens)
    num_sequences = math.prod(x.shape[:-2])
    length = num_tokens // num_sequences
    return torch.arange(num_tokens) // length


def _shared_of_valid(twin: MoE, x_TD: Tensor, valid_T: Tensor) -> Tensor:
    """Return the shared expert's output, (tokens, dim); 0 for padding, whose rows may hold
    anything, NaN included."""
    is_padding = ~valid_T.unsqueeze(1)
    out = reference_shared(twin, x_TD.masked_fill(is_padding, 0.0))
    return out.masked_fill(is_padding, 0.0)


def _admitted(
    capacity: AbstractCapacity,
    copies: Sequence[Copy],
    valid_T: Tensor,
    domains: Sequence[range] | None,
    top_k: int,
    num_experts: int,
) -> list[Copy]:
    """Return the copies that a capacity admits, over all tokens or in each domain.

    Args:
        domains: ranges of tokens, one per routing rank; None for one process.
    """
    # a capacity that spans the mesh counts all tokens together, others those of each domain
    parts: Sequence[range] = [range(len(valid_T))]
    if domains is not None and not capacity.spans_mesh:
        parts = domains
    order = "score" if capacity.admits_by_score else "position"
    sent: list[Copy] = []
    for tokens in parts:
        inside = [copy for copy in copies if copy.token in tokens]
        if domains is not None and capacity.is_padded:  # its size is known before routing
            num_counted = len(tokens)
        else:
            num_counted = int(valid_T[tokens.start : tokens.stop].sum())
        limit = reference_limit(capacity, _per_expert(inside, num_experts), num_counted, top_k)
        sent += reference_admission(inside, limit, order)
    return sent


def _per_expert(copies: Sequence[Copy], num_experts: int) -> list[int]:
    """Return the number of copies for each expert."""
    counts = [0] * num_experts
    for copy in copies:
        counts[copy.expert] += 1
    return counts


def reference_choice(
    twin: MoE,
    x_TD: Tensor,
    valid_T: Tensor,
    noise: Tensor | None,
    token_ids: Tensor | None,
    top_k: int,
) -> tuple[Tensor, Tensor, list[Copy]]:
    """Return the logits (T, E), the probabilities (T, E) and the valid tokens' copies before
    capacity, all float64."""
    router = twin.router
    x_TD = x_TD.masked_fill(~valid_T.unsqueeze(1), 0.0)
    if not isinstance(router, (SoftmaxTopK, SigmoidTopK)):
        return _choice_of_router(router, x_TD, valid_T, noise, token_ids, top_k)
    logits = x_TD @ router.weight.T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    # gates become weights, probabilities are for the losses, and `rank_by` decides who is chosen
    if isinstance(router, SoftmaxTopK):
        gates = logits.exp() / logits.exp().sum(1, keepdim=True)
        probs = gates
        rank_by = logits
        sums_to_one = router.normalize == "after"  # a text here, a flag below
    else:
        gates = 1 / (1 + (-logits).exp())
        probs = gates / gates.sum(1, keepdim=True)
        rank_by = gates + router.bias
        sums_to_one = router.normalize

    # the experts of each token, best first
    best = [_largest(scores, top_k) for scores in rank_by.tolist()]
    best_TK = torch.tensor(best, dtype=torch.int64).view(-1, top_k)
    weights_TK = gates.gather(1, best_TK)
    if sums_to_one:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    weights_TK = router.scale * weights_TK

    weights = list(weights_TK.flatten().unbind())  # at token * top_k + slot
    copies = []
    for token, is_valid in enumerate(valid_T.tolist()):
        if is_valid:
            for slot, expert in enumerate(best[token]):
                copies.append(Copy(token, expert, slot, weights[token * top_k + slot]))
    return logits, probs, copies


def _largest(scores: Sequence[float], count: int) -> list[int]:
    """Return the experts with the largest scores, best first; of equal ones the earlier expert."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:count]


def _choice_of_router(
    router: AbstractRouter,
    x_TD: Tensor,
    valid_T: Tensor,
    noise: Tensor | None,
    token_ids: Tensor | None,
    top_k: int,
) -> tuple[Tensor, Tensor, list[Copy]]:
    """Return what `reference_choice` does, from a router's own scores, choices and weights."""
    valid = valid_T.tolist()
    scores = router.scores(x_TD, noise, token_ids)
    mask_T = None if all(valid) else valid_T  # None: there is no padding
    choice = router.choose(scores, top_k, mask_T, noise)
    tokens = choice.token.tolist()
    experts = choice.expert.tolist()
    slots = choice.slot.tolist()
    weights = router.weigh(scores, choice, top_k).unbind()
    # None: the router sends all that it chose
    is_sent = [True] * len(tokens) if choice.sent is None else choice.sent.tolist()
    copies = []
    for index, token in enumerate(tokens):
        if is_sent[index] and valid[token]:
            copies.append(Copy(token, experts[index], slots[index], weights[index]))
    return scores.logits, scores.probs, copies


def _tables(copies: Sequence[Copy], num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return two (tokens, experts) float64 tables: the routing weight of each copy, and 1 for each
    copy; 0 elsewhere."""
    token = torch.tensor([copy.token for copy in copies], dtype=torch.int64)
    expert = torch.tensor([copy.expert for copy in copies], dtype=torch.int64)
    ones = torch.ones(len(copies), dtype=torch.float64)
    # without copies both are empty, and `stack` refuses an empty list
    weights = torch.stack([copy.weight for copy in copies]).double() if copies else ones
    zeros = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    weight_table = zeros.index_put((token, expert), weights)
    copies_table = zeros.index_put((token, expert), ones)
    return weight_table, copies_table


def reference_output(twin: MoE, x_TD: Tensor, sent: Sequence[Copy]) -> Tensor:
    """Return each token's sum of weighted expert outputs, (tokens, dim)."""
    y_TD = torch.zeros_like(x_TD)
    for expert in sorted({copy.expert for copy in sent}):
        own = [copy for copy in sent if copy.expert == expert]
        token = torch.tensor([copy.token for copy in own])
        weight = torch.stack([copy.weight for copy in own]).unsqueeze(1)
        if twin.apply_weight == "before":
            out = reference_expert(twin.experts, expert, weight * x_TD[token])
        else:
            out = weight * reference_expert(twin.experts, expert, x_TD[token])
        y_TD = y_TD.index_add(0, token, out)
    return y_TD


def reference_shared(twin: MoE, row: Tensor) -> Tensor:
    """Return the shared expert's gated output for one token, (dim,), or for several, (rows,
    dim)."""
    assert twin.shared is not None
    out = reference_expert(twin.shared, 0, row)
    if twin.shared_gate is None:
        return out
    return out / (1 + (-row @ twin.shared_gate.weight.T).exp())  # times the sigmoid of the gate


def reference_expert(experts: AbstractExperts, expert: int, row: Tensor) -> Tensor:
    """Return one expert's output for one row, (dim,), or for several, (rows, dim), unweighted."""
    if isinstance(experts, ModuleExperts):
        module = list(experts.experts.children())[expert]
        return cast(Tensor, module(row.view(-1, experts.dim)).view(row.shape))
    assert isinstance(experts, (GatedExperts, PlainExperts)), (
        f"no reference for {type(experts).__name__}"
    )

    def linear(number: int, inputs: Tensor) -> Tensor:
        """Return the expert's linear map w1, w2 or w3, with its bias if it has one."""
        out: Tensor = inputs @ getattr(experts, f"w{number}")[expert].T
        return out + getattr(experts, f"b{number}")[expert] if experts.bias else out

    hidden = linear(1, row)
    clamp = experts.clamp
    if clamp is not None:  # the clamped SwiGLU of gpt-oss
        gate = torch.minimum(hidden, torch.tensor(clamp.limit))
        up = linear(3, row)
        # the gate is clamped from above only, `up` on both sides
        up = torch.where(up.abs() > clamp.limit, clamp.limit * up.sign(), up)
        return linear(2, gate / (1 + (-clamp.alpha * gate).exp()) * (up + clamp.offset))
    hidden = reference_activation(hidden, experts.activation)
    if isinstance(experts, GatedExperts):
        hidden = hidden * linear(3, row)
    return linear(2, hidden)


def reference_activation(x: Tensor, name: str) -> Tensor:
    """Return an activation of `ACTIVATIONS`, computed from its formula."""
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if name == "silu":
        return x / (1 + (-x).exp())
    positive = x if name == "relu" else x * x  # else squared ReLU
    return torch.where(x > 0, positive, 0)


def reference_limit(
    capacity: AbstractCapacity, requested: Sequence[int], num_valid: int, top_k: int
) -> int | None:
    """Return the largest number of rows that an expert accepts; None for no limit.

    Args:
        requested: copies of each expert before capacity.
        num_valid: number of tokens that count, without padding.
        top_k: experts per token.
    """
    if not isinstance(capacity, Capacity):
        return None
    if capacity.factor is None:  # room for all copies of the busiest expert
        return max(requested)
    # exact, since a rounding error would add a row
    limit = math.ceil(Fraction(capacity.factor) * top_k * num_valid / len(requested))
    # `fit`: no more rows than the busiest expert needs
    return min(limit, max(requested)) if capacity.fit else limit


def reference_admission(
    copies: Sequence[Copy], limit: int | None, order: str = "position"
) -> list[Copy]:
    """Return the copies that the capacity admits: all first choices in turn, then all second
    choices, while experts have room.

    Args:
        copies: the copies before capacity.
        limit: rows per expert, None for no limit.
        order: "position" admits tokens in their order, "score" tokens with a larger best weight
            first.
    """
    if limit is None:
        return list(copies)
    best_weight: dict[int, float] = {}  # by token
    for copy in copies:
        weight = float(copy.weight.detach())
        best_weight[copy.token] = max(best_weight.get(copy.token, 0.0), weight)

    def turn(index: int) -> tuple[int, float, int]:
        """Return what copies are sorted by: choices in turn, then larger weights, then tokens."""
        copy = copies[index]
        precedence = -best_weight[copy.token] if order == "score" else 0.0
        return copy.slot, precedence, copy.token

    load: Counter[int] = Counter()  # rows so far, by expert
    sent = []
    for index in sorted(range(len(copies)), key=turn):
        expert = copies[index].expert
        if load[expert] < limit:
            load[expert] += 1
            sent.append(index)
    # in the order of `copies` again
    return [copies[index] for index in sorted(sent)]


def reference_loss(
    loss: AbstractLoss,
    logits: Tensor,
    probs: Tensor,
    copies: Sequence[Copy],
    valid_T: Tensor,
    sequence_T: Tensor,
    earlier_E: Tensor,
) -> Tensor:
    """Return one auxiliary loss before its coefficient, () float64, differentiable; 0 without valid
    tokens.

    Args:
        logits: (tokens, experts) float64.
        probs: (tokens, experts) float64.
        copies: the valid tokens' copies before capacity.
        valid_T: (tokens,) bool, False for padding.
        sequence_T: (tokens,) the index of each token's sequence.
        earlier_E: (experts,) copies of earlier micro-batches of the step, for losses over the
            global batch.
    """
    if not bool(valid_T.any()):
        return 0 * logits.sum()
    if isinstance(loss, ZLoss):
        return logits[valid_T].exp().sum(1).log().square().mean()
    num_tokens, num_experts = logits.shape
    weight_TE, copies_TE = _tables(copies, num_tokens, num_experts)
    if isinstance(loss, Importance):  # the squared coefficient of variation
        importance_E = weight_TE.sum(0)
        mean = importance_E.mean()
        if float(mean.detach()) == 0:
            return 0 * mean
        return (importance_E - mean).square().mean() / mean**2
    assert isinstance(loss, LoadBalance), f"no reference for {type(loss).__name__}"

    def balance(inside_T: Tensor, load_E: Tensor) -> Tensor:
        """Return E * sum over experts of (the expert's share of copies * its mean probability)."""
        share_E = load_E / load_E.sum().clamp_min(1)
        return len(load_E) * (share_E * probs[inside_T].mean(0)).sum()

    if loss.level == "micro_batch":
        return balance(valid_T, copies_TE.sum(0))
    if loss.level == "global_batch":
        return balance(valid_T, copies_TE.sum(0) + earlier_E)
    # the mean over sequences, weighted by their valid tokens
    total = 0 * logits.sum()
    num_valid = int(valid_T.sum())
    for sequence in set(sequence_T[valid_T].tolist()):
        inside_T = (sequence_T == sequence) & valid_T
        loss_of_sequence = balance(inside_T, copies_TE[inside_T].sum(0))
        total = total + loss_of_sequence * int(inside_T.sum()) / num_valid
    return total


def relative(actual: Tensor | None, expected: Tensor | None, *, least: float = 1.0) -> float:
    """Return the largest difference divided by the largest expected value; inf for NaN and for
    another shape.

    If one of the two is None, return the largest absolute value of the other, undivided; 0 if both
    are None.

    Args:
        actual: None stands for zeros.
        expected: None stands for zeros.
        least: divide by this if the largest expected value is less.
    """
    if actual is None or expected is None:
        present = expected if actual is None else actual
        if present is None or not present.numel():
            return 0.0
        return float(present.abs().max())
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    actual = actual.detach().double()
    expected = expected.detach().double()
    error = float((actual - expected).abs().max())
    if math.isnan(error):
        return math.inf
    return error / max(float(expected.abs().max()), least)


def ratio(actual: Tensor, expected: Tensor, *, within: float = 1e-3) -> float | None:
    """Return the factor by which all of `expected` (n,) must be multiplied to give `actual` (n,);
    None if there is none.

    Args:
        actual: any numbers.
        expected: any numbers.
        within: largest deviation, relative to the largest expected value.
    """
    actual = actual.detach().double()
    expected = expected.detach().double()
    if actual.shape != expected.shape or not bool(expected.any()):
        return None
    factor = actual @ expected / (expected @ expected)  # the least-squares fit
    deviation = (actual - factor * expected).abs().max() / expected.abs().max()
    return float(factor) if float(deviation) <= within else None
