"""The choice of experts as one differentiable operation: top-k, routing weights, counts, and the
sums that the losses read.

The logits are the only (T, E) matrix that is saved for backward, which computes the scores again.
Both passes are custom ops with fake implementations: `torch.compile` and export see one node each.
GPUs run two or three Triton kernels forward and one backward, other devices the torch functions of
this file. Nothing waits for a device, and every sum has a fixed order.

T tokens choose K of E experts each, which makes N = T K copies. Gates are the scores of all
experts, (T, E); a chosen one, perhaps normalized and scaled, is the routing weight of a copy. The
balance loss is `E sum_e f_e P_e`, with the share f_e of copies and the mean probability P_e; the z
loss is the mean square of the logits' logsumexp.
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
    """Return the rule and the wanted sums from an operator's arguments, in the order of
    `SETTINGS`."""
    num_sums = len(WantedSums._fields)
    return ChoiceRule(*values[:-num_sums]), WantedSums(*values[-num_sums:])


def _by_triton(logits: Tensor, rule: ChoiceRule) -> bool:
    """Return whether the Triton kernels run: for float32, rows that fit a tile, and groups whose
    size and number are powers of two, as the sizes of tiles are."""
    if kind_of(logits.device) != "triton" or logits.dtype != torch.float32:
        return False
    num_experts = logits.shape[1]
    if num_experts > MOST_COLUMNS or rule.top_k > MOST_CHOICES:
        return False
    if rule.num_groups == 1:
        return True
    return _is_power_of_two(num_experts) and _is_power_of_two(rule.num_groups)


def _is_power_of_two(number: int) -> bool:
    """Return whether a positive number is a power of two."""
    return number.bit_count() == 1


@operator(
    "choose",
    schema=f"(Tensor logits, Tensor? bias, Tensor? valid, Tensor? expert, {SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def choose_forward(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, expert: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    """Return the fields of `ChoiceResult`.

    Args:
        logits: (T, E).
        bias, valid, expert: as for `choose`.
        settings: the fields of a `ChoiceRule` and of `WantedSums`.
    """
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
    if expert is None:
        expert_TK = _ranked(logits, gates, bias, rule)
    else:
        expert_TK = expert.view(-1, rule.top_k).clone()  # an operator returns no argument
    expert = expert_TK.view(-1)
    weight = _weights(logits, gates, expert_TK, rule).view(-1)
    if rule.scale != 1:
        weight = weight * rule.scale

    zero_if_finite = weight - weight  # NaN for NaN and infinity
    if valid is None:
        num_valid = torch.full((), num_tokens, device=logits.device)
        counts = _counts(expert, num_experts)
    else:
        is_padding = ~valid.repeat_interleave(rule.top_k, output_size=len(expert))
        zero_if_finite = zero_if_finite.masked_fill(is_padding, 0.0)
        num_valid = valid.sum()
        # copies of padding are counted as those of one more expert
        counted = expert.masked_fill(is_padding, num_experts)
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
        zero_if_finite.count_nonzero(),  # NaN is not zero
        num_valid,
    )


def empty_chosen(logits: Tensor, rule: ChoiceRule, wanted: WantedSums) -> ChoiceResult:
    """Return a result with undefined values: for Triton's kernels to fill, or for its shapes."""
    num_tokens, num_experts = logits.shape
    num_copies = num_tokens * rule.top_k
    balance_shape = () if wanted.balance and wanted.reduced else (num_experts * wanted.balance,)
    z_shape = () if wanted.z and wanted.reduced else (int(wanted.z),)
    # makes tensors like the empty one: int64, on the device of the logits
    new_ints = logits.new_empty(0, dtype=torch.int64).new_empty
    return ChoiceResult(
        weight=logits.new_empty(num_copies),
        balance=logits.new_empty(balance_shape),
        z=logits.new_empty(z_shape),
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
    """Return the gradient of the logits, (T, E), from the fields of `ChoiceGradients` and the
    settings."""
    num_tensors = len(ChoiceGradients._fields)
    call = ChoiceGradients(*arguments[:num_tensors])
    rule, wanted = _settings(arguments[num_tensors:])
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
        ctx.mark_non_differentiable(*chosen[3:])  # all but `weight`, `balance` and `z`
        ctx.save_for_backward(logits, valid, chosen.expert, chosen.counts, chosen.num_valid)
        return tuple(chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, from those of the first three results."""
        d_weight, d_balance, d_z = gradients[:3]
        _, wanted = _settings(ctx.settings)
        # a result that was not wanted is empty, and so is its gradient
        if not wanted.balance:
            d_balance = None
        if not wanted.z:
            d_z = None
        # the saved tensors are the first fields of `ChoiceGradients`
        d_logits: Tensor = choose_backward(
            *ctx.saved_tensors, d_weight, d_balance, d_z, *ctx.settings
        )
        return d_logits, None, None, None, None


def _gates(logits: Tensor, rule: ChoiceRule, wanted: WantedSums) -> Tensor | None:
    """Return the scores of all experts, (T, E); None if nothing reads them."""
    if rule.by_sigmoid:
        return logits.sigmoid()
    if wanted.balance or not rule.normalize:
        return softmax_rows(logits)
    return None  # normalized softmax weights come from the chosen logits


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
        # the normalized softmax of all logits is the softmax of the chosen ones
        return logits.gather(1, expert_TK).softmax(1)
    chosen_gates = gates.gather(1, expert_TK)
    return normalized(chosen_gates) if rule.normalize else chosen_gates


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
    if gates is None or not wanted.balance:
        balance = logits.new_empty(0)
    else:
        probs = gates / gates.sum(1, keepdim=True) if rule.by_sigmoid else gates
        if valid is not None:
            probs = probs * valid.unsqueeze(1)
        balance = probs.sum(0)
        if wanted.reduced:
            # the loss is linear in the sums; with padding, `num_valid` is the number of tokens
            num_tokens = len(logits) if valid is None else None
            slope = balance_slope(counts, num_valid, rule.top_k, num_tokens, balance.dtype)
            balance = balance.dot(slope)

    if not wanted.z:
        return balance, logits.new_empty(0)
    squares = logits.logsumexp(1).square()
    if valid is not None:
        squares = squares * valid
    z = squares.sum(0, keepdim=not wanted.reduced)
    return balance, z / num_valid.clamp_min(1) if wanted.reduced else z


def balance_slope(
    counts: Tensor, num_valid: Tensor, top_k: int, num_tokens: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the load-balance loss in the summed probabilities, (E,).

    With T tokens, f_e = copies_e / (K T) and P_e = sums_e / T, so that the gradient of
    `E sum_e f_e P_e` is `E copies_e / (K T**2)`.

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
    if d_weight is not None:
        d_weight = d_weight.reshape(expert_TK.shape)
        if rule.scale != 1:
            d_weight = d_weight * rule.scale

    d_probs = _probs_gradient(call, rule, wanted)
    if rule.by_sigmoid:
        d_logits = _through_sigmoid(logits, expert_TK, d_weight, d_probs, rule)
    else:
        d_logits = _through_softmax(logits, expert_TK, d_weight, d_probs, rule)

    if call.d_z is not None:
        log_sums = logits.logsumexp(1, keepdim=True)
        factor = 2 * call.d_z
        if wanted.reduced:
            factor = factor / call.num_valid.clamp_min(1)
        d_log_sums = factor * log_sums
        if call.valid is not None:
            d_log_sums = d_log_sums * call.valid.unsqueeze(1)
        # the gradient of a logsumexp is the softmax
        d_logits = d_logits + d_log_sums * (logits - log_sums).exp()
    return d_logits.contiguous()


def _probs_gradient(call: ChoiceGradients, rule: ChoiceRule, wanted: WantedSums) -> Tensor | None:
    """Return the gradient of the probabilities: (E,) for all tokens alike, (T, E) with
    padding; None if nothing reads them."""
    d_probs = call.d_balance
    if d_probs is None:
        return None
    if wanted.reduced:
        num_tokens = len(call.logits) if call.valid is None else None
        d_probs = d_probs * balance_slope(
            call.counts, call.num_valid, rule.top_k, num_tokens, call.logits.dtype
        )
    if call.valid is not None:
        d_probs = d_probs * call.valid.unsqueeze(1)
    return d_probs


def _through_softmax(
    logits: Tensor,
    expert_TK: Tensor,
    d_weight: Tensor | None,
    d_probs: Tensor | None,
    rule: ChoiceRule,
) -> Tensor:
    """Return the gradient of the logits, given those of softmax weights and probabilities."""
    # the gates are the probabilities, and weights that are not normalized are chosen gates
    d_gates = None if d_probs is None else d_probs.expand_as(logits)
    if d_weight is not None and not rule.normalize:
        d_gates = torch.zeros_like(logits) if d_gates is None else d_gates.contiguous()
        d_gates = d_gates.scatter_add(1, expert_TK, d_weight)

    if d_gates is None:
        d_logits = torch.zeros_like(logits)
    else:
        d_logits = _softmax_gradient(d_gates, softmax_rows(logits))

    if d_weight is not None and rule.normalize:
        weights_TK = logits.gather(1, expert_TK).softmax(1)
        d_chosen_logits = _softmax_gradient(d_weight, weights_TK)
        d_logits = d_logits.scatter_add(1, expert_TK, d_chosen_logits)
    return d_logits


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
        # probabilities are gates divided by the sum of a token's gates
        d_gates = _quotient_gradient(d_probs, gates, least=0.0)
    if d_weight is not None:
        if rule.normalize:
            chosen_gates = gates.gather(1, expert_TK)
            smallest = torch.finfo(gates.dtype).tiny
            d_weight = _quotient_gradient(d_weight, chosen_gates, least=smallest)
        d_gates = d_gates.scatter_add(1, expert_TK, d_weight)
    return d_gates * gates * (1 - gates)  # the derivative of the sigmoid


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
    divisor = total.clamp_min(torch.finfo(total.dtype).tiny)
    return (gates_TK / divisor).reshape(-1)
