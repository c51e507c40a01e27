"""The choice of experts in three kernels forward and one backward; `kernels/choice.py` says what
they compute.

A program holds a tile, some rows of logits, (rows, columns): a row is a token and a column an
expert. `inside` are the entries of the tile that exist. A copy is a token's use of one expert, and
its slot the rank among the token's copies. A place is an integer in the order of float values.

Eager: about forty operators, of which a softmax, the top-k and the sums read or write all T E
scores. Here a program holds rows of logits and reads each once: it ranks, chooses and weighs, and
adds up its tokens' sums, which two further kernels add over the programs in a fixed order. Backward
reads the logits again and writes their gradient. Bytes: 4 T E read forward; 4 T E read and 4 T E
written backward; 28 T K for the copies. Exponentials: T E per pass. Saved: the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.choice_call import ChoiceGradients, ChoiceResult, ChoiceRule, WantedSums
from moesaic.kernels.triton.rows.varying import VARYING

VALUES = 1024
"""The number of logits that one program holds at a time; of more, some would not fit its
registers."""
PROGRAMS = 512
"""The most programs that share the rows. Fixed, so that the order of sums does not depend on the
device."""
GROUP = 16
"""The number of programs whose sums one program adds, if there are more than twice as many."""
TAKEN = tl.constexpr(-0x80000000)
"""The place of an entry that cannot be chosen, below that of every number."""
TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, the least sum by which sigmoid weights are divided."""


class ChoiceForm(NamedTuple):
    """The constants for which the kernels of the choice are compiled; see `ChoiceRule` and
    `WantedSums`."""

    top_k: int
    by_sigmoid: bool
    normalize: bool
    groups: int
    top_groups: int
    by_best_two: bool
    balance: bool
    z: bool
    reduced: bool
    slots: int
    """A power of two, at least `top_k`."""
    rows: int
    """Tokens that a program holds at a time."""
    columns: int
    """A power of two, at least the number of experts."""

    @classmethod
    def of(cls, rule: ChoiceRule, wanted: WantedSums, num_experts: int) -> ChoiceForm:
        """Return the constants of a choice among `num_experts`."""
        columns = triton.next_power_of_2(num_experts)
        return cls(
            top_k=rule.top_k,
            by_sigmoid=rule.by_sigmoid,
            normalize=rule.normalize,
            groups=rule.num_groups,
            top_groups=rule.top_groups,
            by_best_two=rule.by_best_two,
            balance=wanted.balance,
            z=wanted.z,
            reduced=wanted.reduced,
            slots=triton.next_power_of_2(rule.top_k),
            rows=max(1, VALUES // columns),
            columns=columns,
        )


class Sums(NamedTuple):
    """The sums over some tokens, without padding. Those that are a number are in parts, added up
    when they are stored."""

    probs: tl.tensor
    """(columns,): each expert's probabilities."""
    copies: tl.tensor
    """(columns,): each expert's copies."""
    squares: tl.tensor
    """Parts of the sum of the squares of the logits' logsumexp."""
    nonfinite: tl.tensor
    """Parts of the number of copies whose weight is not finite."""
    num_valid: tl.tensor
    """Parts of the number of tokens."""


class Copies(NamedTuple):
    """What the choice stores of each copy; see `ChoiceResult`."""

    expert: tl.tensor
    token: tl.tensor
    slot: tl.tensor
    weight: tl.tensor


def choose_by_triton(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    given: Tensor | None,
    rule: ChoiceRule,
    wanted: WantedSums,
    chosen: ChoiceResult,
) -> None:
    """Fill `chosen`; the other arguments are those of `kernels.choice.choose`."""
    num_rows, num_experts = logits.shape
    form = ChoiceForm.of(rule, wanted, num_experts)
    tiles = triton.cdiv(num_rows, form.rows)
    programs = max(1, min(tiles, PROGRAMS))
    # a line for each program: its sums of both dtypes, see `_store_sums`
    floats = torch.empty(programs, form.columns + 1, dtype=torch.float32, device=logits.device)
    ints = torch.empty(programs, form.columns + 2, dtype=torch.int32, device=logits.device)
    _choose_kernel[(programs,)](
        logits.contiguous(),
        bias,
        valid=valid,
        given=given,
        copies=Copies(chosen.expert, chosen.token, chosen.slot, chosen.weight),
        floats=floats,
        ints=ints,
        num_rows=num_rows,
        num_experts=num_experts,
        tiles=tiles,
        scale=rule.scale,
        FORM=form,
    )
    _add_up(floats, ints, num_experts, wanted, chosen)


def _add_up(
    floats: Tensor, ints: Tensor, num_experts: int, wanted: WantedSums, chosen: ChoiceResult
) -> None:
    """Fill the sums of `chosen` from those of each program, lines of `floats` and `ints`. Of many
    programs, groups are added up first, into tables of the same form."""
    columns = triton.next_power_of_2(num_experts)
    step = max(1, VALUES // columns)  # programs whose sums are added at a time
    programs = len(floats)
    if programs > 2 * GROUP:
        groups = triton.cdiv(programs, GROUP)
        group_floats = floats.new_empty(groups, columns + 1)
        group_ints = ints.new_empty(groups, columns + 2)
        _group_kernel[(groups,)](
            floats,
            ints,
            group_floats,
            group_ints,
            programs,
            COLUMNS=columns,
            STEP=step,
            GROUP=GROUP,
        )
        floats = group_floats
        ints = group_ints
    _sum_kernel[(1,)](
        floats,
        ints,
        balance=chosen.balance,
        z=chosen.z,
        counts=chosen.counts,
        nonfinite=chosen.nonfinite,
        num_valid=chosen.num_valid,
        num_experts=num_experts,
        programs=len(floats),
        COLUMNS=columns,
        STEP=step,
        BALANCE=wanted.balance,
        Z=wanted.z,
        REDUCED=wanted.reduced,
    )


def choose_backward_by_triton(
    call: ChoiceGradients, rule: ChoiceRule, wanted: WantedSums
) -> Tensor:
    """Return the gradient of the logits, (T, E) float32."""
    num_rows, num_experts = call.logits.shape
    form = ChoiceForm.of(rule, wanted, num_experts)
    d_logits = torch.empty_like(call.logits, memory_format=torch.contiguous_format)
    d_weight = None if call.d_weight is None else call.d_weight.contiguous()
    d_balance = None if call.d_balance is None else call.d_balance.contiguous()
    if num_rows:
        _choose_backward_kernel[(triton.cdiv(num_rows, form.rows),)](
            call.logits.contiguous(),
            call.valid,
            expert=call.expert,
            counts=call.counts,
            num_valid=call.num_valid,
            d_weight=d_weight,
            d_balance=d_balance,
            d_z=call.d_z,
            d_logits=d_logits,
            num_rows=num_rows,
            num_experts=num_experts,
            scale=rule.scale,
            FORM=form,
        )
    return d_logits


@triton.jit
def place_of(value: tl.tensor) -> tl.tensor:
    """Return int32 in the order of float32 values: -0 equals 0, and NaN is above all numbers.

    The bits of positive floats are ordered like the floats; those of negative ones, but for the
    sign, are turned.
    """
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_at(place: tl.tensor) -> tl.tensor:
    """Return the float32 values at the places that `place_of` returned."""
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_best(place: tl.tensor, num_columns: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the first column with the largest place of each row of (rows, COLUMNS), below
    `num_columns`."""
    is_best = place == tl.max(place, 1)[:, None]
    column = tl.arange(0, COLUMNS)
    first = tl.min(tl.where(is_best, column[None, :], COLUMNS), 1)
    return tl.minimum(first, num_columns - 1)


@triton.jit
def _load_rows(
    logits: tl.tensor,
    valid: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return the logits of rows, (rows, COLUMNS), -inf outside; which entries are inside; which
    rows are valid tokens."""
    column = tl.arange(0, COLUMNS)
    is_row = row < num_rows
    inside = is_row[:, None] & (column < num_experts)[None, :]
    pointers = logits + row.to(tl.int64)[:, None] * num_experts + column[None, :]
    x = tl.load(pointers, mask=inside, other=float("-inf"))
    is_valid = is_row
    if valid is not None:
        is_valid = tl.load(valid + row, mask=is_row, other=0).to(tl.int1)
    return x, inside, is_valid


@triton.jit
def _softmax(x: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the softmax of each row's entries inside, 0 for the others, and the rows'
    logsumexp."""
    largest = tl.max(tl.where(inside, x, float("-inf")), 1)
    exponentials = tl.where(inside, tl.exp(x - largest[:, None]), 0.0)
    total = tl.sum(exponentials, 1)
    return exponentials / total[:, None], largest + tl.log(total)


@triton.jit
def _sigmoid(x: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return the sigmoid of the entries inside, 0 for the others; divided exactly, as it ranks
    experts."""
    return tl.where(inside, tl.div_rn(1.0, 1.0 + tl.exp(-x)), 0.0)


@triton.jit
def _divisor(values: tl.tensor) -> tl.tensor:
    """Return each row's sum, (rows, 1), at least `TINY`; a sum of NaN stays NaN."""
    total = tl.sum(values, 1)
    return tl.where(total < TINY, TINY, total)[:, None]


@triton.jit
def _normalized(picked: tl.tensor, is_copy: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return the weights of the chosen experts before scaling, from their scores, or from logits
    that softmax normalizes."""
    if FORM.normalize and not FORM.by_sigmoid:
        picked, _ = _softmax(picked, is_copy)
    elif FORM.normalize:
        picked = picked / _divisor(tl.where(is_copy, picked, 0.0))
    return picked


@triton.jit
def _in_best_groups(place: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return the places with that of -inf outside each row's best groups, as `in_best_groups` of
    `kernels/top_k.py`."""
    ROWS: tl.constexpr = FORM.rows
    GROUPS: tl.constexpr = FORM.groups
    TOP_GROUPS: tl.constexpr = FORM.top_groups
    SIZE: tl.constexpr = FORM.columns // GROUPS
    # a group's value is that of its best expert, or the sum of its best two
    grouped = tl.reshape(place, (ROWS * GROUPS, SIZE))
    group_value = value_at(tl.max(grouped, 1))
    if FORM.by_best_two and SIZE > 1:
        first = first_best(grouped, SIZE, SIZE)
        rest = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], TAKEN, grouped)
        group_value = group_value + value_at(tl.max(rest, 1))
    group_place = tl.reshape(place_of(group_value), (ROWS, GROUPS))

    group = tl.arange(0, GROUPS)
    is_eligible = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        index = first_best(group_place, GROUPS, GROUPS)
        is_taken = group[None, :] == index[:, None]
        is_eligible = tl.where(is_taken, 1, is_eligible)
        group_place = tl.where(is_taken, TAKEN, group_place)

    is_kept = tl.reshape(is_eligible, (ROWS * GROUPS, 1)) != 0
    kept = tl.where(is_kept, grouped, -0x7F800001)  # the place of -inf
    return tl.reshape(kept, (ROWS, FORM.columns))


@triton.jit
def _scores(x: tl.tensor, inside: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return the experts' scores, their probabilities, and the rows' logsumexp."""
    probabilities, log_sum = _softmax(x, inside)
    gates = probabilities
    if FORM.by_sigmoid:
        gates = _sigmoid(x, inside)
        probabilities = gates / tl.sum(gates, 1)[:, None]
    return gates, probabilities, log_sum


@triton.jit
def _ranks(
    x: tl.tensor,
    gates: tl.tensor,
    inside: tl.tensor,
    bias: tl.tensor,
    num_experts: tl.tensor,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Return the places by which experts are ranked, from logits or scores; `TAKEN` outside."""
    rank_by = x
    if FORM.by_sigmoid:
        rank_by = gates
        if bias is not None:
            column = tl.arange(0, FORM.columns)
            biases = tl.load(bias + column, mask=column < num_experts, other=0.0)
            rank_by = gates + biases[None, :]
    place = tl.where(inside, place_of(rank_by), TAKEN)
    if FORM.groups > 1:
        place = _in_best_groups(place, FORM)
    return place


@triton.jit
def _copies_of(row: tl.tensor, num_rows: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return which slots of rows, (rows, slots), are copies, and the copies' numbers."""
    slot = tl.arange(0, FORM.slots)
    is_copy = (row < num_rows)[:, None] & (slot < FORM.top_k)[None, :]
    return is_copy, row.to(tl.int64)[:, None] * FORM.top_k + slot[None, :]


@triton.jit
def _store_copies(
    copies: Copies,
    expert: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    copy: tl.tensor,
    is_copy: tl.tensor,
) -> None:
    """Store experts and weights of (rows, slots), with their tokens and slots."""
    slot = tl.arange(0, expert.shape[1]).to(tl.int64)
    token = row.to(tl.int64)
    tl.store(copies.expert + copy, expert.to(tl.int64), mask=is_copy)
    tl.store(copies.token + copy, tl.broadcast_to(token[:, None], expert.shape), mask=is_copy)
    tl.store(copies.slot + copy, tl.broadcast_to(slot[None, :], expert.shape), mask=is_copy)
    tl.store(copies.weight + copy, weight, mask=is_copy)


@triton.jit
def _store_sums(floats: tl.tensor, ints: tl.tensor, line: tl.tensor, sums: Sums) -> None:
    """Store sums in a line of both tables, which `_sums_of` reads: (columns + 1) floats,
    probabilities and squares, and (columns + 2) ints, copies, copies that are not finite, and
    tokens."""
    COLUMNS: tl.constexpr = sums.probs.shape[0]
    column = tl.arange(0, COLUMNS)
    to_floats = floats + line * (COLUMNS + 1)
    to_ints = ints + line * (COLUMNS + 2)
    tl.store(to_floats + column, sums.probs)
    tl.store(to_floats + COLUMNS, tl.sum(sums.squares, 0))
    tl.store(to_ints + column, sums.copies)
    tl.store(to_ints + COLUMNS, tl.sum(sums.nonfinite, 0))
    tl.store(to_ints + COLUMNS + 1, tl.sum(sums.num_valid, 0))


@triton.jit(do_not_specialize=VARYING)
def _choose_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    valid: tl.tensor,
    given: tl.tensor,
    copies: Copies,
    floats: tl.tensor,
    ints: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Choose experts for every `num_programs`-th tile, or take `given` ones; store their sums."""
    ROWS: tl.constexpr = FORM.rows
    COLUMNS: tl.constexpr = FORM.columns
    SLOTS: tl.constexpr = FORM.slots
    TOP_K: tl.constexpr = FORM.top_k
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    counts = tl.zeros((COLUMNS,), tl.int32)
    probs = tl.zeros((COLUMNS,), tl.float32)
    nonfinite = tl.zeros((ROWS,), tl.int32)
    num_valid = tl.zeros((ROWS,), tl.int32)
    squares = tl.zeros((ROWS,), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        x, inside, is_valid = _load_rows(logits, valid, row, num_rows, num_experts, COLUMNS)
        gates, probabilities, log_sum = _scores(x, inside, FORM)
        place = _ranks(x, gates, inside, bias, num_experts, FORM)
        is_copy, copy = _copies_of(row, num_rows, FORM)

        # registers cannot be indexed: values of a column or a slot are picked by comparisons
        weighed_by = x if FORM.normalize and not FORM.by_sigmoid else gates
        experts = tl.zeros((ROWS, SLOTS), tl.int32)
        picked = tl.full((ROWS, SLOTS), float("-inf"), tl.float32)
        for k in tl.static_range(TOP_K):
            if given is not None:
                to_given = given + row.to(tl.int64) * TOP_K + k
                index = tl.load(to_given, mask=row < num_rows, other=0).to(tl.int32)
            else:
                index = first_best(place, num_experts, COLUMNS)
            is_chosen = column[None, :] == index[:, None]
            place = tl.where(is_chosen, TAKEN, place)
            experts = tl.where(slot[None, :] == k, index[:, None], experts)
            value = tl.sum(tl.where(is_chosen, weighed_by, 0.0), 1)
            picked = tl.where(slot[None, :] == k, value[:, None], picked)
            counts += tl.sum((is_chosen & is_valid[:, None]).to(tl.int32), 0)
        weights = scale * _normalized(picked, is_copy, FORM)
        _store_copies(copies, experts, weights, row, copy, is_copy)
        is_wrong = is_copy & is_valid[:, None] & (weights - weights != 0.0)  # NaN or infinite
        nonfinite += tl.sum(is_wrong.to(tl.int32), 1)
        num_valid += is_valid.to(tl.int32)
        if FORM.balance:
            probs += tl.sum(tl.where(is_valid[:, None], probabilities, 0.0), 0)
        if FORM.z:
            squares += tl.where(is_valid, log_sum * log_sum, 0.0)
    sums = Sums(probs, counts, squares, nonfinite, num_valid)
    _store_sums(floats, ints, tl.program_id(0), sums)


@triton.jit
def _slope(counts: tl.tensor, num_valid: tl.tensor, num_experts: tl.tensor) -> tl.tensor:
    """Return the gradient of the load-balance loss in the summed probabilities, (columns,): `E
    counts / (copies * tokens)`, with the copies of all experts."""
    copies = tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    return counts.to(tl.float32) * (
        num_experts / (copies * tl.maximum(num_valid, 1).to(tl.float32))
    )


@triton.jit
def _sums_of(
    floats: tl.tensor,
    ints: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Return the `Sums` of programs from `start` to before `end`, STEP at a time.

    They are in the lines that `_store_sums` wrote. Of each program, `floats` has COLUMNS sums of
    probabilities, then that of the squares; `ints` has COLUMNS counts of copies, then the numbers
    of copies that are not finite and of tokens.
    """
    column = tl.arange(0, COLUMNS)
    probs = tl.zeros((COLUMNS,), tl.float32)
    copies = tl.zeros((COLUMNS,), tl.int32)
    squares = tl.zeros((STEP,), tl.float32)
    nonfinite = tl.zeros((STEP,), tl.int32)
    num_valid = tl.zeros((STEP,), tl.int32)
    for first in range(start, end, STEP):
        program = first + tl.arange(0, STEP)
        is_program = program < end
        to_floats = floats + program * (COLUMNS + 1)
        to_ints = ints + program * (COLUMNS + 2)
        probs += tl.sum(
            tl.load(to_floats[:, None] + column[None, :], mask=is_program[:, None], other=0.0), 0
        )
        copies += tl.sum(
            tl.load(to_ints[:, None] + column[None, :], mask=is_program[:, None], other=0), 0
        )
        squares += tl.load(to_floats + COLUMNS, mask=is_program, other=0.0)
        nonfinite += tl.load(to_ints + COLUMNS, mask=is_program, other=0)
        num_valid += tl.load(to_ints + COLUMNS + 1, mask=is_program, other=0)
    return Sums(probs, copies, squares, nonfinite, num_valid)


@triton.jit(do_not_specialize=VARYING)
def _group_kernel(
    floats: tl.tensor,
    ints: tl.tensor,
    group_floats: tl.tensor,
    group_ints: tl.tensor,
    programs: tl.tensor,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Add up the sums of GROUP programs of `_choose_kernel`."""
    group = tl.program_id(0)
    start = group * GROUP
    end = tl.minimum(programs, start + GROUP)
    sums = _sums_of(floats, ints, start, end, COLUMNS, STEP)
    _store_sums(group_floats, group_ints, group, sums)


@triton.jit(do_not_specialize=VARYING)
def _sum_kernel(
    floats: tl.tensor,
    ints: tl.tensor,
    balance: tl.tensor,
    z: tl.tensor,
    counts: tl.tensor,
    nonfinite: tl.tensor,
    num_valid: tl.tensor,
    num_experts: tl.tensor,
    programs: tl.tensor,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BALANCE: tl.constexpr,
    Z: tl.constexpr,
    REDUCED: tl.constexpr,
) -> None:
    """Add up the sums of all programs, and store them as fields of `ChoiceResult`; one program."""
    column = tl.arange(0, COLUMNS)
    sums = _sums_of(floats, ints, 0, programs, COLUMNS, STEP)
    squares = tl.sum(sums.squares, 0)
    wrong = tl.sum(sums.nonfinite, 0)
    tokens = tl.sum(sums.num_valid, 0)
    is_expert = column < num_experts
    tl.store(counts + column, sums.copies.to(tl.int64), mask=is_expert)
    tl.store(nonfinite, wrong.to(tl.int64))
    tl.store(num_valid, tokens.to(tl.int64))
    if BALANCE:
        if REDUCED:
            slope = _slope(sums.copies, tokens, num_experts)
            tl.store(balance, tl.sum(sums.probs * slope, 0))
        else:
            tl.store(balance + column, sums.probs, mask=is_expert)
    if Z:
        total = squares
        if REDUCED:
            total = total / tl.maximum(tokens, 1).to(tl.float32)
        tl.store(z, total)


@triton.jit
def _d_normalized(
    picked: tl.tensor, grad: tl.tensor, is_copy: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    """Return the gradient of what `_normalized` gets, from that of its result: of scores, or of the
    chosen logits. `picked` are the chosen logits."""
    if FORM.by_sigmoid:
        # the gradient of a quotient, as in `_quotient_gradient` of `kernels/choice.py`
        scores = _sigmoid(picked, is_copy)
        total = tl.sum(scores, 1)[:, None]
        through_total = tl.sum(grad * scores, 1)[:, None] / total
        grad = (grad - tl.where(total < TINY, 0.0, through_total)) / _divisor(scores)
    else:
        shares, _ = _softmax(picked, is_copy)
        grad = shares * (grad - tl.sum(grad * shares, 1)[:, None])
    return grad


@triton.jit
def _spread(grad: tl.tensor, index: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return the gradients of copies, (rows, slots), in their experts' columns, (rows, columns)."""
    ROWS: tl.constexpr = FORM.rows
    COLUMNS: tl.constexpr = FORM.columns
    TOP_K: tl.constexpr = FORM.top_k
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, FORM.slots)
    spread = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(TOP_K):
        # sums over one slot pick its value
        is_slot = slot[None, :] == k
        slot_expert = tl.sum(tl.where(is_slot, index, 0), 1)[:, None]
        slot_grad = tl.sum(tl.where(is_slot, grad, 0.0), 1)[:, None]
        spread = tl.where(column[None, :] == slot_expert, slot_grad, spread)
    return spread


@triton.jit(do_not_specialize=VARYING)
def _choose_backward_kernel(
    logits: tl.tensor,
    valid: tl.tensor,
    expert: tl.tensor,
    counts: tl.tensor,
    num_valid: tl.tensor,
    d_weight: tl.tensor,
    d_balance: tl.tensor,
    d_z: tl.tensor,
    d_logits: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    scale: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Write the gradient of a tile of logits, `direct`; `d_gates` is that of the scores."""
    ROWS: tl.constexpr = FORM.rows
    COLUMNS: tl.constexpr = FORM.columns
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x, inside, is_valid = _load_rows(logits, valid, row, num_rows, num_experts, COLUMNS)
    probabilities, log_sum = _softmax(x, inside)
    gates = _sigmoid(x, inside) if FORM.by_sigmoid else probabilities
    d_gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    direct = tl.zeros((ROWS, COLUMNS), tl.float32)  # at first without what the scores pass on
    if d_balance is not None:
        is_expert = column < num_experts
        if FORM.reduced:
            copies = tl.load(counts + column, mask=is_expert, other=0)
            d_probs = tl.load(d_balance) * _slope(copies, tl.load(num_valid), num_experts)
        else:
            d_probs = tl.load(d_balance + column, mask=is_expert, other=0.0)
        d_gates += tl.where(is_valid[:, None], d_probs[None, :], 0.0)
        if FORM.by_sigmoid:
            total = tl.sum(gates, 1)[:, None]  # probabilities are gates divided by it
            d_gates = (d_gates - tl.sum(d_gates * gates, 1)[:, None] / total) / total
    if d_weight is not None:
        is_copy, copy = _copies_of(row, num_rows, FORM)
        index = tl.load(expert + copy, mask=is_copy, other=0).to(tl.int32)
        grad = tl.load(d_weight + copy, mask=is_copy, other=0.0) * scale
        if FORM.normalize:
            element = row.to(tl.int64)[:, None] * num_experts + index
            picked = tl.load(logits + element, mask=is_copy, other=0.0)
            grad = _d_normalized(picked, grad, is_copy, FORM)
        if FORM.normalize and not FORM.by_sigmoid:
            direct += _spread(grad, index, FORM)
        else:
            d_gates += _spread(grad, index, FORM)

    if FORM.by_sigmoid:  # the derivatives of the sigmoid and of the softmax
        direct += d_gates * gates * (1.0 - gates)
    else:
        direct += gates * (d_gates - tl.sum(tl.where(inside, d_gates * gates, 0.0), 1)[:, None])
    if d_z is not None:
        factor = 2.0 * tl.load(d_z)
        if FORM.reduced:
            factor = factor / tl.maximum(tl.load(num_valid), 1).to(tl.float32)
        direct += tl.where(is_valid, factor * log_sum, 0.0)[:, None] * probabilities
    to_logits = d_logits + row.to(tl.int64)[:, None] * num_experts + column[None, :]
    tl.store(to_logits, direct, mask=inside)
