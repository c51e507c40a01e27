"""A program's script: made once, by what the program is; which movements leave everything where it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from meshes import make_layer, tokens_of

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.recorder import Recorder
from moesaic.comm.transport import AbstractTransport
from moesaic.plan import Plan, compile_plan
from moesaic.program.bundles import bundles
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op, Program
from moesaic.runtime.executor import Script, script_of

FOUR = Grid(world=4, ep=4, ranks_per_node=2)


def program_of(grid: Grid = FOUR, bias: bool = False, **options: object) -> Program:
    return compile_plan(Plan(**options), grid, bias=bias).forward  # type: ignore[arg-type]


def test_a_script_is_made_once_and_has_the_programs_bundles() -> None:
    program = program_of()
    script = script_of(program, frozenset({"y"}))
    assert script_of(program, frozenset({"y"})) is script
    assert [step.number for step in script.steps] == [bundle[0] for bundle in bundles(program)]
    assert [task for step in script.steps for task in step.tasks] == list(program.tasks)


def test_programs_of_one_name_and_length_have_scripts_of_their_own() -> None:
    program = program_of()
    renamed = replace(program, tasks=tuple(replace(task, name=f"{task.name}2") for task in program.tasks))
    assert hash(renamed) == hash(program)
    assert script_of(renamed, None) is not script_of(program, None)
    assert script_of(renamed, None).steps[0].tasks[0].name == f"{program.tasks[0].name}2"


def freed(script: Script) -> list[str]:
    return [name for step in script.steps for name in step.unread]


def test_every_slot_is_freed_once_after_its_last_reading() -> None:
    program = program_of()
    names = freed(script_of(program, frozenset({"y", "h"})))
    assert len(names) == len(set(names))
    kept = {"y", "h", "w"}  # weights are stored anyway
    assert set(names) == {s.name for s in program.slots} - kept | {"out*"}
    assert freed(script_of(program, None)) == []
    for step in script_of(program, frozenset({"y"})).steps:
        later = [name for s in script_of(program, None).steps if s.number > step.number for name in s.reads]
        assert not set(step.unread).intersection(later)


@pytest.mark.parametrize(
    ("grid", "staying"),
    [
        (FOUR, {"x_mine", "y", "b_shards"}),
        (Grid(world=4, tp=2, ep=4), {"b_shards"}),
        (Grid(world=4, ep=2, etp=2), {"x_mine", "y", "b_shards"}),
    ],
)
def test_movements_over_groups_of_one_rank_stay(grid: Grid, staying: set[str]) -> None:
    compiled = compile_plan(Plan(), grid, bias=True)
    shapes = compiled.shapes(8)
    steps = script_of(compiled.forward, None).steps
    for rank in range(grid.world):
        found = {s.tasks[0].name for s in steps if s.tasks[0].op is Op.MOVE and shapes.stays(s.moves[0], rank)}
        assert found == staying


def test_splits_are_whole_only_if_they_are_all_rows_in_order() -> None:
    compiled = compile_plan(Plan(), FOUR)
    move = next(s.moves[0] for s in script_of(compiled.forward, None).steps if s.tasks[0].name in ("g", "h"))
    copies = np.arange(32).reshape(4, 8)

    sizes = CallSizes(FOUR, copies, np.full(4, 9), shapes=compiled.shapes(8))
    for rank in range(4):
        out, back = sizes.outgoing(move, rank), sizes.incoming(move, rank)
        assert out.is_whole
        assert out.rows.tolist() == list(range(int(copies[rank].sum())))
        assert not back.is_whole
        assert sorted(back.rows.tolist()) == list(range(int(copies[:, 2 * rank : 2 * rank + 2].sum())))
        assert back.counts == tuple(copies[:, 2 * rank : 2 * rank + 2].sum(1).tolist())


def test_a_layer_call_sends_its_counts_then_two_messages_to_each_peer() -> None:
    """Rows travel with their weights, results go back; nothing else, biases among it."""
    layer = make_layer("biases")

    def sent(transport: AbstractTransport) -> list[int]:
        recorder = Recorder(transport)
        here = make_layer("biases")
        here.load_state_dict(layer.state_dict())
        here.parallelize(Mesh(FOUR, recorder), Plan())
        with torch.no_grad():
            here(tokens_of(transport.rank, 40))  # ranks agree on how long the message of counts is
            recorder.ranges.clear()
            here(tokens_of(transport.rank, 40))
        return [len(held.messages) for held in recorder.ranges]

    assert run_ranks(4, sent) == [[3, 6]] * 4
