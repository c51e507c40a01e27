"""Replication: the programs, their sizes, their movements, and the order of their tasks."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.multicast import multicast
from moesaic.program.passes.replicate import relays, replicate
from moesaic.program.plan import Plan
from moesaic.program.replications import Replications
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op
from moesaic.program.transpose import transpose

GRID = Grid(world=4, ep=4, ranks_per_node=2)
COPIES = np.array([[8, 1, 0, 0], [6, 2, 1, 0], [7, 0, 3, 1], [5, 0, 0, 4]])
TOKENS = COPIES.sum(1)


def replicated(*entries: tuple[int, int, int, int]) -> Replications:
    """Return the `replicated` argument of `CallSizes` from (origin, expert, helper, copies)
    tuples."""
    return Replications(*np.array(entries, dtype=np.int64).reshape(-1, 4).T)


def messages(
    task_name: str, sizes: CallSizes, *, backward: bool = False, grid: Grid | None = None
) -> dict[tuple[int, int], int]:
    program = replicate(SCHEDULES["s1"](), sizes.num_chunks, grid)
    program = transpose(program) if backward else program
    task = next(task for task in program.tasks if task.name == task_name)
    slots = {slot.name: slot for slot in program.slots}
    return {(source, target): rows for source, target, rows in messages_of(task, slots, sizes)}


def test_a_shadowed_expert_takes_no_copies_home_and_sends_its_weights_once_to_each_helper():
    sizes = CallSizes(
        GRID,
        COPIES,
        TOKENS,
        replicated=replicated((1, 0, 1, 6), (2, 0, 2, 7), (3, 0, 3, 5)),
        units=16,
    )
    assert messages("h.0", sizes) == {(0, 1): 1, (1, 2): 1, (2, 3): 1}
    assert messages("h.replicated", sizes) == {}
    assert messages("w_here", sizes) == {(0, 1): 16, (0, 2): 16, (0, 3): 16}
    assert messages("w_here'", sizes, backward=True) == {(1, 0): 16, (2, 0): 16, (3, 0): 16}


def test_copies_spill_from_any_origin_and_weights_go_only_where_copies_went():
    sizes = CallSizes(
        GRID, COPIES, TOKENS, replicated=replicated((0, 0, 3, 2), (2, 0, 3, 7)), units=16
    )
    assert messages("h.replicated", sizes) == {(0, 3): 2, (2, 3): 7}
    assert messages("z.replicated", sizes) == {(3, 0): 2, (3, 2): 7}
    assert messages("w_here", sizes) == {(0, 3): 16}
    assert messages("h.0", sizes)[(1, 0)] == 6


def test_what_stays_is_cut_into_chunks_and_what_is_replicated_is_not():
    sizes = CallSizes(GRID, COPIES, TOKENS, 2, replicated=replicated((1, 0, 2, 2)), units=16)
    assert messages("h.0", sizes)[(1, 0)] == messages("h.1", sizes)[(1, 0)] == 2
    assert messages("h.replicated", sizes) == {(1, 2): 2}


def test_replicated_weights_are_kept_for_the_backward_pass_rather_than_sent_again():
    backward = transpose(replicate(SCHEDULES["s1"](), 1))
    assert "w_here" in backward.inputs
    assert [task.name for task in backward.tasks if task.op is Op.MOVE and "w" in task.reads] == []


def test_gradients_of_replicated_weights_start_home_before_the_experts_that_stayed_run():
    backward = ORDERS["optsche"](transpose(replicate(SCHEDULES["s1"](), 2)))
    names = [task.name for task in backward.tasks]
    assert names.index("out.replicated'") < names.index("w_here'") < names.index("out.0'")


NODES = Grid(world=8, ep=8, ranks_per_node=4)


def on_nodes(
    *entries: tuple[int, int, int, int], grid: Grid = NODES, num_experts: int = 8
) -> CallSizes:
    """Return the sizes of a call with 9 copies per rank and expert, of which (origin, expert,
    helper, copies) are replicated."""
    copies = np.full((grid.world, num_experts), 9)
    return CallSizes(grid, copies, copies.sum(1), replicated=replicated(*entries), units=16)


def relayed(
    task_name: str, sizes: CallSizes, *, backward: bool = False
) -> dict[tuple[int, int], int]:
    return messages(task_name, sizes, backward=backward, grid=sizes.grid)


def test_weights_enter_a_node_once_and_are_passed_on_inside() -> None:
    """Expert 1 of rank 1 is replicated to ranks 4, 6 and 7 of the other node, through rank 5, and
    to rank 3 of its own node."""
    sizes = on_nodes(*[(helper, 1, helper, 5) for helper in (3, 4, 6, 7)])
    assert relayed("w_near", sizes) == {(1, 5): 16}
    assert relayed("w_here", sizes) == {(1, 3): 16, (5, 4): 16, (5, 6): 16, (5, 7): 16}
    assert relayed("w_here'", sizes, backward=True) == {
        (3, 1): 16,
        (4, 5): 16,
        (6, 5): 16,
        (7, 5): 16,
    }
    assert relayed("w_near'", sizes, backward=True) == {(5, 1): 16}, (
        "one sum of gradients crosses nodes, not three"
    )
    near = replicate(SCHEDULES["s1"](), 1, NODES).slot("w_near").layout
    assert [sizes.held(near, rank).tolist() for rank in range(8)] == [
        [],
        [1],
        [],
        [],
        [],
        [1],
        [],
        [],
    ]


def test_weights_go_straight_where_nodes_hold_one_place_or_unequal_parts() -> None:
    alone = {"world": 4, "ep": 2, "etp": 2, "ranks_per_node": 2}
    for sizes in (
        alone,
        {"world": 4, "ep": 4},
        {"world": 4, "ep": 4, "ranks_per_node": 1},
        {"world": 6, "ep": 3, "ranks_per_node": 2},
    ):
        assert not relays(Grid(**sizes))  # type: ignore[arg-type]
        program = replicate(SCHEDULES["s1"](), 1, Grid(**sizes))  # type: ignore[arg-type]
        assert "w_near" not in [slot.name for slot in program.slots]
    assert relays(NODES)


@pytest.mark.parametrize("order", ["optsche", "early", "fifo"])
@pytest.mark.parametrize("grid", [NODES, Grid(world=4, ep=4)], ids=["relayed", "straight"])
def test_replicated_weights_delay_no_tokens_and_are_there_before_their_experts(
    grid: Grid, order: str
) -> None:
    """Weights are sent after the tokens that stay and while their experts run. The second hop of
    weights is issued last."""
    plan = Plan(replication="spill", chunks=2, order=order)  # type: ignore[arg-type]
    names = [task.name for task in compile_plan(plan, grid).forward.tasks]
    first, last = ("w_near", "w_here") if grid is NODES else ("w_here", "w_here")
    dispatches = ["h.0"] if order == "fifo" else ["h.0", "h.1", "h.replicated"]
    assert max(map(names.index, dispatches)) < names.index(first) < names.index("out.0")
    assert names.index(last) < names.index("out.replicated")
    if grid is NODES:
        assert max(names.index("out.1"), names.index("z.1")) < names.index("w_here")


def test_more_than_there_is_cannot_be_replicated():
    with pytest.raises(AssertionError, match="more copies are replicated than there are"):
        CallSizes(GRID, COPIES, TOKENS, replicated=replicated((0, 0, 1, 9)))


def test_multicast_and_other_ways_to_move_weights_clash():
    with pytest.raises(
        InputError, match=r"replication clashes with plan\.all_to_all=multicast.*choose another"
    ):
        replicate(multicast(SCHEDULES["s1"](), GRID), 1)
    grid = Grid(world=4, ep=2, etp=2)
    with pytest.raises(InputError, match=r"replication clashes with plan\.gather_weights.*unset"):
        replicate(gather_weights(SCHEDULES["s1"](), 1, grid)[0], 1)
