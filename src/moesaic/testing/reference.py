"""What a layer must compute, written as plainly as possible: float64, a loop over copies, no sort, no grouped product.

The fast layer and this page share no arithmetic. Softmax and sigmoid top-k are scored, chosen and weighed here; the
other routers are asked for their scores, choice and weights in float64, which their own tests check. Capacity,
experts, combine and every auxiliary loss are always computed here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moesaic.experts import AbstractExperts, GatedExperts, ModuleExperts, PlainExperts
from moesaic.layer import MoE
from moesaic.routing.capacity import AbstractCapacity, Capacity
from moesaic.routing.losses import AbstractLoss, Importance, LoadBalance, ZLoss
from moesaic.routing.routers import SigmoidTopK, SoftmaxTopK


class Copy(NamedTuple):
    """One token copy that a router chose."""

    token: int
    expert: int
    slot: int
    weight: Tensor
    """(): float64, differentiable."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the reference computes for one call."""

    y: Tensor
    """x's shape, float64, differentiable; no loss is injected."""
    rows: list[tuple[int, int]]
    """(token, expert) of the copies that are sent, in token order."""
    requested: list[int]
    """Copies per expert before capacity."""
    losses: dict[str, Tensor]
    """() float64 each, differentiable: the auxiliary losses before their coefficient."""
    loss: Tensor
    """(): the sum of coefficient * loss, float64, differentiable."""


def in_float64(layer: MoE) -> MoE:
    """Return a float64 copy of `layer` in the same mode, with gradients of its own."""
    twin = copy.deepcopy(layer).double()
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
) -> Reference:
    """Compute the layer densely. A router that draws random numbers needs the seed that the layer was called with.

    Args:
        twin: what `in_float64` returned.
        x: (..., dim) float64.
        mask: x's shape without dim, bool.
        token_ids: x's shape without dim, int64.
        top_k: experts per token; None for the layer's in its mode.
        capacity: capacity; None for the layer's in its mode.
    """
    assert x.dtype == torch.float64, f"the reference computes in float64, got {x.dtype}"
    if top_k is None:
        top_k = twin.top_k if twin.training or twin.eval_top_k is None else twin.eval_top_k
    if capacity is None:
        capacity = twin.capacity if twin.training or twin.eval_capacity is None else twin.eval_capacity
    x_TD = x.reshape(-1, twin.dim)
    valid = [True] * len(x_TD) if mask is None else mask.reshape(-1).tolist()
    logits, probs, copies = reference_choice(twin, x_TD, valid, token_ids, top_k)
    requested = [sum(c.expert == e for c in copies) for e in range(twin.num_experts)]
    limit = reference_limit(capacity, requested, sum(valid), top_k)
    sent = reference_admission(copies, limit, "score" if capacity.admits_by_score else "position")

    outputs = [torch.zeros(twin.dim, dtype=torch.float64) for _ in range(len(x_TD))]
    for token, expert, _, weight in sent:
        if twin.apply_weight == "before":
            outputs[token] = outputs[token] + reference_expert(twin.experts, expert, weight * x_TD[token])
        else:
            outputs[token] = outputs[token] + weight * reference_expert(twin.experts, expert, x_TD[token])
    y_TD = torch.stack(outputs) if outputs else 0 * x_TD
    if twin.shared is not None and outputs:
        y_TD = y_TD + torch.stack(
            [reference_shared(twin, row) if is_valid else torch.zeros_like(row) for row, is_valid in zip(x_TD, valid)]
        )

    num_sequences = math.prod(x.shape[:-2]) if x.numel() else 1
    losses = {}
    total = torch.zeros((), dtype=torch.float64)
    for loss in twin.losses:
        value = reference_loss(loss, logits, probs, copies, valid, num_sequences, twin.step_counts.tolist())
        losses[loss.name] = value
        total = total + loss.coefficient * value
    rows = sorted((c.token, c.expert) for c in sent)
    return Reference(y=y_TD.view(x.shape), rows=rows, requested=requested, losses=losses, loss=total)


def reference_shared(twin: MoE, row: Tensor) -> Tensor:
    """Return what the shared expert adds to one token, (dim,), or to several, (rows, dim)."""
    assert twin.shared is not None
    added = reference_expert(twin.shared, 0, row)
    return added if twin.shared_gate is None else added / (1 + (-row @ twin.shared_gate.weight.T).exp())


def reference_choice(
    twin: MoE, x_TD: Tensor, valid: Sequence[bool], token_ids: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, list[Copy]]:
    """Return logits (T, E), probabilities (T, E) and the copies of the valid tokens before capacity, all float64."""
    router = twin.router
    if not isinstance(router, (SoftmaxTopK, SigmoidTopK)):
        noise = router.draw(len(x_TD), x_TD.device)
        scores = router.scores(x_TD, noise, None if token_ids is None else token_ids.reshape(-1))
        choice = router.choose(scores, top_k, None if all(valid) else torch.tensor(valid, dtype=torch.bool), noise)
        alive = [True] * len(choice.token) if choice.sent is None else choice.sent.tolist()
        weights = router.weigh(scores, choice, top_k)
        entries = zip(choice.token.tolist(), choice.expert.tolist(), choice.slot.tolist(), weights, alive)
        copies = [Copy(t, e, slot, weight) for t, e, slot, weight, sent in entries if sent and valid[t]]
        return scores.logits, scores.probs, copies

    logits = x_TD @ router.weight.T
    if router.logit_bias is not None:
        logits = logits + router.logit_bias
    copies = []
    if isinstance(router, SoftmaxTopK):
        gates = logits.exp() / logits.exp().sum(1, keepdim=True)
        probs, rank_by, scale = gates, logits, router.scale
    else:
        gates = 1 / (1 + (-logits).exp())
        probs, rank_by, scale = gates / gates.sum(1, keepdim=True), gates + router.bias, router.scale
    for token in range(len(x_TD)):
        ranking = rank_by[token].tolist()
        best = sorted(range(twin.num_experts), key=lambda e: (-ranking[e], e))[:top_k]
        sums_to_one = router.normalize == "after" if isinstance(router, SoftmaxTopK) else router.normalize
        total = gates[token, best].sum() if sums_to_one else 1.0
        if valid[token]:
            copies += [Copy(token, e, slot, scale * gates[token, e] / total) for slot, e in enumerate(best)]
    return logits, probs, copies


def reference_expert(experts: AbstractExperts, expert: int, row: Tensor) -> Tensor:
    """Return one expert's output for one row, (dim,), or for several, (rows, dim), unweighted."""
    if isinstance(experts, ModuleExperts):
        return cast(Tensor, list(experts.experts.children())[expert](row.view(-1, experts.dim)).view(row.shape))
    assert isinstance(experts, (GatedExperts, PlainExperts)), f"no reference for {type(experts).__name__}"

    def linear(number: int, inputs: Tensor) -> Tensor:
        bias = getattr(experts, f"b{number}")[expert] if experts.bias else torch.zeros((), dtype=inputs.dtype)
        return inputs @ getattr(experts, f"w{number}")[expert].T + bias

    hidden, clamp = linear(1, row), experts.clamp
    if clamp is not None:
        gate, up = torch.minimum(hidden, torch.tensor(clamp.limit)), linear(3, row)
        up = torch.where(up.abs() > clamp.limit, clamp.limit * up.sign(), up)
        return linear(2, gate / (1 + (-clamp.alpha * gate).exp()) * (up + clamp.offset))
    hidden = reference_activation(hidden, experts.activation)
    return linear(2, hidden * linear(3, row) if isinstance(experts, GatedExperts) else hidden)


def reference_activation(x: Tensor, name: str) -> Tensor:
    """Return an activation of `ACTIVATIONS`, written out."""
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if name == "silu":
        return x / (1 + (-x).exp())
    return torch.where(x > 0, x if name == "relu" else x * x, 0)


def reference_limit(capacity: AbstractCapacity, requested: Sequence[int], num_valid: int, top_k: int) -> int | None:
    """Return how many rows an expert may take, None for no limit."""
    if not isinstance(capacity, Capacity):
        return None
    if capacity.factor is None:
        return max(requested)
    limit = math.ceil(Fraction(capacity.factor) * top_k * num_valid / len(requested))
    return min(limit, max(requested)) if capacity.fit else limit


def reference_admission(copies: Sequence[Copy], limit: int | None, order: str = "position") -> list[Copy]:
    """Return the copies that are sent: all first choices in turn, then all second choices, while there is room.

    Args:
        copies: the copies before capacity.
        limit: rows per expert, None for no limit.
        order: "position" takes tokens in their order, "score" those with the larger best weight first.
    """
    if limit is None:
        return list(copies)
    best: dict[int, float] = {}
    for token, _, _, weight in copies:
        best[token] = max(best.get(token, 0.0), float(weight.detach()))
    load: dict[int, int] = {}
    sent = []
    turns = sorted(copies, key=lambda c: (c.slot, -best[c.token] if order == "score" else 0.0, c.token))
    for turn in turns:
        if load.get(turn.expert, 0) < limit:
            load[turn.expert] = load.get(turn.expert, 0) + 1
            sent.append(turn)
    return sent


def reference_loss(
    loss: AbstractLoss,
    logits: Tensor,
    probs: Tensor,
    copies: Sequence[Copy],
    valid: Sequence[bool],
    num_sequences: int = 1,
    earlier: Sequence[int] | None = None,
) -> Tensor:
    """Return one auxiliary loss before its coefficient, () float64, differentiable; 0 without valid tokens.

    Args:
        loss: which one.
        logits: (T, E) float64.
        probs: (T, E) float64.
        copies: of the valid tokens, before capacity.
        valid: T flags, False for padding.
        num_sequences: the tokens are this many sequences of equal length.
        earlier: copies per expert since the last optimizer step, for losses over the global batch.
    """
    tokens = [t for t, is_valid in enumerate(valid) if is_valid]
    if not tokens:
        return 0 * logits.sum()
    if isinstance(loss, ZLoss):
        return torch.stack([logits[t].exp().sum().log() ** 2 for t in tokens]).mean()
    if isinstance(loss, Importance):
        return reference_importance(copies, logits.shape[1])
    assert isinstance(loss, LoadBalance), f"no reference for {type(loss).__name__}"
    if loss.level == "micro_batch":
        return reference_load_balance(probs, copies, tokens)
    if loss.level == "global_batch":
        return reference_load_balance(probs, copies, tokens, earlier)
    length = len(valid) // num_sequences
    values = []
    for start in range(0, len(valid), length):
        inside = range(start, start + length)
        own = [t for t in tokens if t in inside]
        if own:
            values.append(len(own) * reference_load_balance(probs, [c for c in copies if c.token in inside], own))
    return torch.stack(values).sum() / len(tokens)


def reference_load_balance(
    probs: Tensor, copies: Sequence[Copy], tokens: Sequence[int], earlier: Sequence[int] | None = None
) -> Tensor:
    """Return `E * sum_e f_e P_e` over `tokens`: f_e from the copies (and earlier counts), P_e from the probabilities."""
    num_experts = probs.shape[1]
    load = [0 if earlier is None else earlier[e] for e in range(num_experts)]
    for _, expert, _, _ in copies:
        load[expert] += 1
    value = torch.zeros((), dtype=torch.float64)
    for e in range(num_experts):
        share = load[e] / max(sum(load), 1)
        value = value + num_experts * share * torch.stack([probs[t, e] for t in tokens]).mean()
    return value


def reference_importance(copies: Sequence[Copy], num_experts: int) -> Tensor:
    """Return the squared coefficient of variation of the summed weights per expert."""
    zero = torch.zeros((), dtype=torch.float64)
    importance = [sum((c.weight for c in copies if c.expert == e), start=zero) for e in range(num_experts)]
    mean = sum(importance, start=zero) / num_experts
    if float(mean.detach()) == 0:
        return zero
    return sum(((value - mean) ** 2 for value in importance), start=zero) / num_experts / mean**2
