"""Lending: the programs, their sizes, what travels, and the order of their tasks."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.lend import lend
from moesaic.program.passes.multicast import multicast
from moesaic.program.sizes import Sizes
from moesaic.program.task import Op
from moesaic.program.text import from_text, to_text
from moesaic.program.transpose import transpose
from moesaic.program.validate import validate
from moesaic.program.volume import messages_of

GRID = Grid(world=4, ep=4, ranks_per_node=2)
COPIES = np.array([[8, 1, 0, 0], [6, 2, 1, 0], [7, 0, 3, 1], [5, 0, 0, 4]])
TOKENS = COPIES.sum(1)


def lent(*entries: tuple[int, int, int, int]) -> np.ndarray:
    """(origin, expert, helper, copies) each."""
    found = np.zeros((4, 4, 4), dtype=np.int64)
    for origin, expert, helper, copies in entries:
        found[origin, expert, helper] = copies
    return found


def messages(task_name: str, sizes: Sizes, *, backward: bool = False) -> dict[tuple[int, int], int]:
    program = lend(SCHEDULES["s1"](), sizes.num_chunks)
    program = transpose(program) if backward else program
    task = next(task for task in program.tasks if task.name == task_name)
    slots = {slot.name: slot for slot in program.slots}
    return {(source, target): rows for source, target, rows in messages_of(task, slots, sizes)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_lends_both_ways_and_prints(name: str, bias: bool):
    forward = lend(SCHEDULES[name](bias), 2)
    for program in (forward, transpose(forward)):
        validate(program)
        assert from_text(to_text(program)) == program
        for order in ("fifo", "early", "optsche"):
            validate(ORDERS[order](program, None))
    assert sum(task.op is Op.EXPERT for task in forward.tasks) == 3


def test_a_shadowed_expert_takes_no_copies_home_and_sends_its_weights_once_to_each_helper():
    sizes = Sizes(GRID, COPIES, TOKENS, lent=lent((1, 0, 1, 6), (2, 0, 2, 7), (3, 0, 3, 5)), units=16)
    assert messages("h.0", sizes) == {(0, 1): 1, (1, 2): 1, (2, 3): 1}
    assert messages("h.lent", sizes) == {}
    assert messages("w_here", sizes) == {(0, 1): 16, (0, 2): 16, (0, 3): 16}
    assert messages("w_here'", sizes, backward=True) == {(1, 0): 16, (2, 0): 16, (3, 0): 16}


def test_copies_spill_from_any_origin_and_weights_go_only_where_copies_went():
    sizes = Sizes(GRID, COPIES, TOKENS, lent=lent((0, 0, 3, 2), (2, 0, 3, 7)), units=16)
    assert messages("h.lent", sizes) == {(0, 3): 2, (2, 3): 7}
    assert messages("z.lent", sizes) == {(3, 0): 2, (3, 2): 7}
    assert messages("w_here", sizes) == {(0, 3): 16}
    assert messages("h.0", sizes)[(1, 0)] == 6


def test_what_stays_is_cut_into_chunks_and_what_is_lent_is_not():
    sizes = Sizes(GRID, COPIES, TOKENS, 2, lent=lent((1, 0, 2, 2)), units=16)
    assert messages("h.0", sizes)[(1, 0)] == messages("h.1", sizes)[(1, 0)] == 2
    assert messages("h.lent", sizes) == {(1, 2): 2}


def test_helpers_hold_the_experts_they_help_and_no_others():
    sizes = Sizes(GRID, COPIES, TOKENS, lent=lent((0, 0, 3, 2), (0, 1, 3, 1), (1, 2, 0, 1)), units=16)
    here = lend(SCHEDULES["s1"](), 1).slot("w_here").layout
    rows = lend(SCHEDULES["s1"](), 1).slot("h.lent").layout
    assert [sizes.num_held(here, rank) for rank in range(4)] == [1, 0, 0, 2]
    assert [sizes.num_rows(here, rank) for rank in range(4)] == [16, 0, 0, 32]
    assert sizes.rows_per_expert(rows, 3).tolist() == [2, 1]


def test_shards_of_an_expert_help_at_their_own_place():
    grid = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
    copies = np.array([[4, 0], [4, 0], [4, 0], [4, 0]])
    told = np.zeros((4, 2, 2), dtype=np.int64)
    told[2:, 0, 1] = 4
    sizes = Sizes(grid, copies, copies.sum(1), lent=told, units=8)
    assert messages("w_here", sizes) == {(0, 2): 8, (1, 3): 8}
    assert messages("h.lent", sizes) == {(2, 3): 4, (3, 2): 4}


def test_replicas_lend_apart():
    grid = Grid(world=4, ep=2, ranks_per_node=2)
    copies = np.array([[4, 0], [4, 0], [4, 0], [4, 0]])
    told = np.zeros((4, 2, 2), dtype=np.int64)
    told[1, 0, 1] = 4
    sizes = Sizes(grid, copies, copies.sum(1), lent=told, units=8)
    assert [sizes.helped(rank).tolist() for rank in range(4)] == [[False, False], [True, False], *[[False, False]] * 2]
    assert messages("w_here", sizes) == {(0, 1): 8}


def test_nothing_lent_moves_no_weights():
    sizes = Sizes(GRID, COPIES, TOKENS, lent=lent(), units=16)
    assert messages("w_here", sizes) == messages("h.lent", sizes) == {}
    assert sum(messages("h.0", sizes).values()) == COPIES.sum() - np.trace(COPIES)


def test_lent_weights_are_kept_for_the_backward_pass_rather_than_sent_again():
    backward = transpose(lend(SCHEDULES["s1"](), 1))
    assert "w_here" in backward.inputs
    assert [task.name for task in backward.tasks if task.op is Op.MOVE and "w" in task.reads] == []


def test_gradients_of_lent_weights_start_home_before_the_experts_that_stayed_run():
    backward = ORDERS["optsche"](transpose(lend(SCHEDULES["s1"](), 2)), None)
    names = [task.name for task in backward.tasks]
    assert names.index("out.lent'") < names.index("w_here'") < names.index("out.0'")


def test_more_than_there_is_cannot_be_lent():
    with pytest.raises(AssertionError, match="more copies are lent than there are"):
        Sizes(GRID, COPIES, TOKENS, lent=lent((0, 0, 1, 9)))


def test_multicast_and_other_ways_to_move_weights_clash():
    with pytest.raises(InputError, match=r"plan\.lending clashes with plan\.all_to_all=multicast.*choose another"):
        lend(multicast("s1", GRID), 1)
    grid = Grid(world=4, ep=2, etp=2)
    with pytest.raises(InputError, match=r"plan\.lending clashes with plan\.gather_weights.*unset"):
        lend(gather_weights(SCHEDULES["s1"](), 1, grid)[0], 1)
