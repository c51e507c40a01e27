"""The choice of experts as one differentiable operation: top-k, routing weights, counts, and the
sums that the losses read.

The logits are the only (T, E) matrix that is saved for backward, which computes the scores again.
Both passes are custom ops with fake implementations: `torch.compile` and export see one node each.
GPUs run two Triton kernels forward and one backward, other devices the torch functions of this
file. Nothing waits for a device, and every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.choice_call import ChoiceGradients, ChoiceResult, ChoiceRule, WantedSums
from moesaic.kernels.operator import operator
from moesaic.kernels.pick import kind_of
from moesaic.kernels.top_k import in_best_groups, top_k_indices

MOST_COLUMNS = 2048
MOST_CHOICES = 32
"""The most experts and the largest `top_k` that the Triton kernels support."""
FEWEST_COLUMNS = 16
"""The number of columns from which torch's CPU softmax over a row is vectorized; measured,
docs/kernels.md."""


def choose(
    logits: Tensor,
    rule: ChoiceRule,
    wanted: WantedSums,
    *,
    bias: Tensor | None = None,
    valid_T: Tensor | None = None,
    expert: Tensor | None = None,
) -> ChoiceResult:
    """Choose experts for tokens, differentiable in the logits.

    Args:
        logits: (T, E), float32 or float64.
        rule: how to choose.
        wanted: which sums to compute.
        bias: (E,) balancing bias of sigmoid scores; None for none.
        valid_T: (T,) bool, False for padding; None if no token is padding.
        expert: (N,) int64, experts chosen earlier, to be used again; None to choose.
    """
    return ChoiceResult(*_Choose.apply(logits, bias, valid_T, expert, (*rule, *wanted)))


SETTINGS = (
    "int top_k, bool by_sigmoid, bool normalize, float scale, int num_groups, int top_groups, "
    "bool by_best_two, bool balance, bool z, bool reduced"
)
"""The schema of a `ChoiceRule` and of `WantedSums`."""


def _settings(values: tuple[Any, ...]) -> tuple[ChoiceRule, WantedSums]:
    return ChoiceRule(*values[:-3]), WantedSums(*values[-3:])


def _by_triton(logits: Tensor, rule: ChoiceRule) -> bool:
    """Return whether the Triton kernels run: for float32, rows that fit a tile, and groups that are
    powers of two, as tiles."""
    sizes = (logits.shape[1], rule.num_groups) if rule.num_groups > 1 else ()
    fits = (
        logits.shape[1] <= MOST_COLUMNS
        and rule.top_k <= MOST_CHOICES
        and not any(n & (n - 1) for n in sizes)
    )
    return fits and logits.dtype == torch.float32 and kind_of(logits.device) == "triton"


@operator(
    "choose",
    schema=f"(Tensor logits, Tensor? bias, Tensor? valid, Tensor? expert, {SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def choose_forward(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, expert: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    """Return the fields of `ChoiceResult`."""
    rule, wanted = _settings(settings)
    if _by_triton(logits, rule):
        from moesaic.kernels.triton.rows.choose import choose_by_triton

        chosen = empty_chosen(logits, rule, wanted)
        choose_by_triton(
            logits, bias, valid=valid, given=expert, rule=rule, wanted=wanted, chosen=chosen
        )
        return tuple(chosen)
    num_tokens, num_experts = logits.shape
    gates = _gates(logits, rule, wanted)
    expert_TK = (
        _ranked(logits, gates, bias, rule)
        if expert is None
        else expert.view(-1, rule.top_k).clone()
    )
    weight = _weights(logits, gates, expert_TK, rule).view(-1)
    expert = expert_TK.view(-1)
    weight = weight if rule.scale == 1 else weight * rule.scale
    zero_if_finite = weight - weight
    counted = expert
    if valid is None:
        num_valid = torch.full((), num_tokens, device=logits.device)
        counts = _counts(expert, num_experts)
    else:
        is_padding = ~valid.repeat_interleave(rule.top_k, output_size=len(expert))
        zero_if_finite = zero_if_finite.masked_fill(is_padding, 0.0)
        counted = expert.masked_fill(is_padding, num_experts)
        num_valid = valid.sum()
        counts = _counts(counted, num_experts + 1)[:num_experts].clone()
    balance, z = _sums(
        logits, gates, valid=valid, counts=counts, num_valid=num_valid, rule=rule, wanted=wanted
    )
    place = torch.arange(len(expert), device=logits.device)
    token = place // rule.top_k
    slot = place % rule.top_k
    return (
        weight,
        balance,
        z,
        expert,
        token,
        slot,
        counts,
        zero_if_finite.count_nonzero(),
        num_valid,
    )


def empty_chosen(logits: Tensor, rule: ChoiceRule, wanted: WantedSums) -> ChoiceResult:
    """Return a result with undefined values."""
    num_tokens, num_experts = logits.shape
    num_copies = num_tokens * rule.top_k
    balance: tuple[int, ...] = (0,)
    if wanted.balance:
        balance = () if wanted.reduced else (1, num_experts)
    new_ints = logits.new_empty(0, dtype=torch.int64).new_empty
    return ChoiceResult(
        weight=logits.new_empty(num_copies),
        balance=logits.new_empty(balance),
        z=logits.new_empty(() if wanted.z else 0),
        expert=new_ints(num_copies),
        token=new_ints(num_copies),
        slot=new_ints(num_copies),
        counts=new_ints(num_experts),
        nonfinite=new_ints(()),
        num_valid=new_ints(()),
    )


@torch.library.register_fake(choose_forward.overload)
def _(logits: Tensor, bias: Any, valid: Any, expert: Any, *settings: Any) -> tuple[Tensor, ...]:
    return tuple(empty_chosen(logits, *_settings(settings)))


@operator(
    "choose_backward",
    schema="(Tensor logits, Tensor? valid, Tensor expert, Tensor counts, "
    f"Tensor num_valid, Tensor? d_weight, Tensor? d_balance, Tensor? d_z, {SETTINGS}) -> Tensor",
    refuses_gradient=True,
)
def choose_backward(*arguments: Any) -> Tensor:
    """Return the gradient of the logits, (T, E)."""
    call = ChoiceGradients(*arguments[:8])
    rule, wanted = _settings(arguments[8:])
    if _by_triton(call.logits, rule):
        from moesaic.kernels.triton.rows.choose import choose_backward_by_triton

        return choose_backward_by_triton(call, rule, wanted)
    return _logits_gradient(call, rule, wanted)


@torch.library.register_fake(choose_backward.overload)
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        valid: Tensor | None,
        expert: Tensor | None,
        settings: Any,
    ) -> tuple[Tensor, ...]:
        """Choose experts; save the logits, and of the results what backward reads."""
        chosen = ChoiceResult(*choose_forward(logits, bias, valid, expert, *settings))
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*chosen[3:])
        ctx.save_for_backward(logits, valid, chosen.expert, chosen.counts, chosen.num_valid)
        return tuple(chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_weight, d_balance, d_z = gradients[:3]
        _, wanted = _settings(ctx.settings)
        sums = d_balance if wanted.balance else None, d_z if wanted.z else None
        d_logits: Tensor = choose_backward(*ctx.saved_tensors, d_weight, *sums, *ctx.settings)
        return d_logits, None, None, None, None


def _gates(logits: Tensor, rule: ChoiceRule, wanted: WantedSums) -> Tensor | None:
    """Return the scores of all experts, (T, E); None if nothing reads them."""
    if rule.by_sigmoid:
        return logits.sigmoid()
    return softmax_rows(logits) if wanted.balance or not rule.normalize else None


def _ranked(logits: Tensor, gates: Tensor | None, bias: Tensor | None, rule: ChoiceRule) -> Tensor:
    """Return each token's best experts, (T, K) int64."""
    rank_by = logits
    if rule.by_sigmoid and gates is not None:
        rank_by = gates if bias is None else gates + bias
    if rule.num_groups > 1:
        rank_by = in_best_groups(
            rank_by, rule.num_groups, rule.top_groups, best_two=rule.by_best_two
        )
    return top_k_indices(rank_by, rule.top_k).contiguous()


def _weights(logits: Tensor, gates: Tensor | None, expert_TK: Tensor, rule: ChoiceRule) -> Tensor:
    """Return the weights before scaling, (T, K) or (N,)."""
    if gates is None or (rule.normalize and not rule.by_sigmoid):
        return logits.gather(1, expert_TK).softmax(1)
    return normalized(gates.gather(1, expert_TK)) if rule.normalize else gates.gather(1, expert_TK)


def _counts(expert: Tensor, num_experts: int) -> Tensor:
    """Return how often each number below `num_experts` occurs, int64; `bincount` makes the host
    wait except on a CPU."""
    if expert.device.type == "cpu":
        return expert.bincount(minlength=num_experts)
    return expert.new_zeros(num_experts).scatter_add_(0, expert, torch.ones_like(expert))


def _sums(
    logits: Tensor,
    gates: Tensor | None,
    valid: Tensor | None,
    counts: Tensor,
    num_valid: Tensor,
    rule: ChoiceRule,
    wanted: WantedSums,
) -> tuple[Tensor, Tensor]:
    """Return the fields `balance` and `z` of `ChoiceResult`."""
    balance = z = None
    if wanted.balance and gates is not None:
        probs = gates / gates.sum(1, keepdim=True) if rule.by_sigmoid else gates
        sums = probs.sum(0) if valid is None else (probs * valid.unsqueeze(1)).sum(0)
        if wanted.reduced:
            num_tokens = len(logits) if valid is None else None
            balance = sums.dot(balance_slope(counts, num_valid, rule.top_k, num_tokens, sums.dtype))
        else:
            balance = sums.unsqueeze(0)
    if wanted.z:
        squares = logits.logsumexp(1).square()
        z = (squares if valid is None else squares * valid).sum()
        if wanted.reduced:
            z = z / num_valid.clamp_min(1)
    return logits.new_empty(0) if balance is None else balance, logits.new_empty(
        0
    ) if z is None else z


def balance_slope(
    counts: Tensor, num_valid: Tensor, top_k: int, num_tokens: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the load-balance loss in the summed probabilities, (E,).

    Args:
        counts: (E,) int64, copies per expert, `top_k` of each token that is not padding.
        num_valid: () int64.
        top_k: copies per token.
        num_tokens: the tokens if none is padding, as a number; None to read `num_valid`.
        dtype: dtype of the result.
    """
    copies = counts.to(dtype)
    factor = len(counts) / top_k
    if num_tokens is not None:
        return copies * (factor / max(num_tokens, 1) ** 2)
    return copies * factor / num_valid.clamp_min(1).square()


def _logits_gradient(call: ChoiceGradients, rule: ChoiceRule, wanted: WantedSums) -> Tensor:
    """Return the gradient of the logits, (T, E); see `choose_backward`."""
    logits = call.logits
    expert_TK = call.expert.view(-1, rule.top_k)
    d_weight = call.d_weight
    d_probs = call.d_balance
    if d_probs is not None:  # (E,) or (1, E), or (T, E) with padding
        if wanted.reduced:
            num_tokens = len(logits) if call.valid is None else None
            d_probs = d_probs * balance_slope(
                call.counts, call.num_valid, rule.top_k, num_tokens, logits.dtype
            )
        if call.valid is not None:
            d_probs = d_probs * call.valid.unsqueeze(1)
    if d_weight is not None:
        d_weight = d_weight.reshape(expert_TK.shape)
        d_weight = d_weight if rule.scale == 1 else d_weight * rule.scale
    if rule.by_sigmoid:
        d_logits = _through_sigmoid(logits, expert_TK, d_weight, d_probs, rule)
    else:
        d_logits = _through_softmax(logits, expert_TK, d_weight, d_probs, rule)
    if call.d_z is not None:
        log_sums = logits.logsumexp(1, keepdim=True)
        factor = 2 * call.d_z / call.num_valid.clamp_min(1) if wanted.reduced else 2 * call.d_z
        d_squares = (
            factor * log_sums if call.valid is None else factor * log_sums * call.valid.unsqueeze(1)
        )
        d_logits = d_logits + d_squares * (logits - log_sums).exp()
    return d_logits.contiguous()


def _through_softmax(
    logits: Tensor,
    expert_TK: Tensor,
    d_weight: Tensor | None,
    d_probs: Tensor | None,
    rule: ChoiceRule,
) -> Tensor:
    """Return the gradient of the logits, given those of softmax weights and probabilities."""
    d_gates = None if d_probs is None else d_probs.expand_as(logits)
    if d_weight is not None and not rule.normalize:
        d_gates = torch.zeros_like(logits) if d_gates is None else d_gates.contiguous()
        d_gates = d_gates.scatter_add(1, expert_TK, d_weight)
        d_weight = None
    d_logits = (
        torch.zeros_like(logits)
        if d_gates is None
        else _softmax_gradient(d_gates, softmax_rows(logits))
    )
    if d_weight is None:
        return d_logits
    weights_TK = logits.gather(1, expert_TK).softmax(1)
    return d_logits.scatter_add(1, expert_TK, _softmax_gradient(d_weight, weights_TK))


def _through_sigmoid(
    logits: Tensor,
    expert_TK: Tensor,
    d_weight: Tensor | None,
    d_probs: Tensor | None,
    rule: ChoiceRule,
) -> Tensor:
    """Return the gradient of the logits, given those of sigmoid weights and probabilities."""
    gates = logits.sigmoid()
    d_gates = torch.zeros_like(logits)
    if d_probs is not None:
        d_gates = _quotient_gradient(d_probs, gates, 0.0)
    if d_weight is not None:
        if rule.normalize:
            d_weight = _quotient_gradient(
                d_weight, gates.gather(1, expert_TK), torch.finfo(gates.dtype).tiny
            )
        d_gates = d_gates.scatter_add(1, expert_TK, d_weight)
    return d_gates * gates * (1 - gates)


def _softmax_gradient(grad: Tensor, result: Tensor) -> Tensor:
    """Return the gradient of the argument of a softmax over rows."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data(grad, result, 1, result.dtype)
    return gradient


def _quotient_gradient(grad: Tensor, values: Tensor, least: float) -> Tensor:
    """Return d_values, given `grad` = d_q of q = values / max(sum(values), least), row by row.

    d_values = (d_q - sum(d_q * q)) / sum(values). Where the sum is below `least`, the divisor is a
    constant, so d_values = d_q / least. Values are at least 0.
    """
    total = values.sum(1, keepdim=True)
    through_total = (grad * values).sum(1, keepdim=True) / total
    return (grad - torch.where(total < least, 0.0, through_total)) / total.clamp_min(least)


def softmax_rows(logits: Tensor) -> Tensor:
    """Return the softmax of each row, (rows, columns), differentiable.

    On a CPU torch does not vectorize rows that are shorter than a vector register. Such rows are
    passed as columns, which torch vectorizes across; that takes a quarter of the time.
    """
    if logits.device.type != "cpu" or logits.shape[1] >= FEWEST_COLUMNS:
        return logits.softmax(1)
    return logits.t().softmax(0).t()


def normalized(gates_TK: Tensor) -> Tensor:
    """Return each row of non-negative gates divided by its sum; a row of zeros stays zero.

    Args:
        gates_TK: (tokens, top_k).

    Returns:
        (tokens * top_k,): one weight per copy.
    """
    total = gates_TK.sum(-1, keepdim=True)
    return (gates_TK / total.clamp_min(torch.finfo(total.dtype).tiny)).reshape(-1)
