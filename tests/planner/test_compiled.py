"""Compiled plans: what their digests tell apart, what padded capacities they need, which durations
their order reads."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.program.compile import compile_plan, moving
from moesaic.program.grid import Grid
from moesaic.program.passes.relocate import INDEX
from moesaic.program.plan import Plan
from moesaic.program.task import Op
from moesaic.program.text import to_text
from moesaic.program.validate import validate

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
VARIANTS = [
    {},
    {"schedule": "s2"},
    {"schedule": "s3"},
    {"schedule": "s3", "fuse": True},
    {"schedule": "baseline"},
    {"schedule": "ted"},
    {"gather_weights": 0},
    {"gather_weights": 1},
    {"gather_weights": 2},
    {"chunks": 2},
    {"chunks": 2, "order": "fifo"},
    {"chunks": 2, "order": "early"},
    {"peer_groups": 2},
    {"schedule": "s2", "overlap_gather": True},
    {"all_to_all": "hier2d"},
    {"all_to_all": "multicast"},
    {"codec": "int8"},
    {"backward_codec": "int8"},
    {"codec": "int8", "backward_codec": "int8"},
    {"fuse": True},
    {"order": "fifo"},
]


def test_digests_differ_if_and_only_if_programs_do() -> None:
    compiled = [compile_plan(Plan(**fields), GRID) for fields in VARIANTS]  # type: ignore[arg-type]
    texts = [(to_text(c.forward), to_text(c.backward), c.grid) for c in compiled]
    for one, other in itertools.combinations(range(len(VARIANTS)), 2):
        same = texts[one] == texts[other]
        assert (compiled[one].digest == compiled[other].digest) is same, (
            VARIANTS[one],
            VARIANTS[other],
        )
    assert len({c.digest for c in compiled}) >= len(VARIANTS) - 4, (
        "r = etp, a fusing of nothing and orders of one chunk"
    )


def test_digests_are_the_same_in_every_process_and_for_every_r_that_changes_nothing() -> None:
    plain = compile_plan(Plan(), GRID)
    assert plain.digest == compile_plan(Plan(gather_weights=GRID.etp), GRID).digest
    assert plain.digest == compile_plan(Plan(fuse=True), GRID).digest
    assert len(plain.digest) == 16


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 1},
        {"ep": 2},
        {"innermost": "ep"},
        {"ranks_per_node": 8},
        {"ranks_per_node": None},
        {"world": 16},
    ],
)
def test_digests_tell_meshes_apart(mesh: dict) -> None:
    assert compile_plan(Plan(), GRID).digest != compile_plan(Plan(), replace(GRID, **mesh)).digest


def test_biases_change_the_program() -> None:
    assert compile_plan(Plan(), GRID).digest != compile_plan(Plan(), GRID, bias=True).digest


def test_a_backward_codec_leaves_the_forward_program_alone() -> None:
    plain = compile_plan(Plan(), GRID)
    coded = compile_plan(Plan(backward_codec="int8"), GRID)
    assert to_text(plain.forward) == to_text(coded.forward)
    assert to_text(plain.backward) != to_text(coded.backward)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("codec", ["none", "int8", "zfp"])
def test_padded_capacities_are_multiples_as_the_spec_says(
    tp: int, etp: int, chunks: int, codec: str
) -> None:
    """Section 9, rule 4: lcm(tp, etp x chunks, 4 x chunks for zfp); so every chunk of every share
    is equally long."""
    grid = Grid(world=8, tp=tp, ep=8 // etp, etp=etp)
    for plan in (
        Plan(schedule="s2", chunks=chunks, codec=codec),
        Plan(chunks=chunks, backward_codec=codec),
    ):  # type: ignore[arg-type]
        compiled = compile_plan(plan, grid)
        blocks = 4 if codec == "zfp" else 1
        assert compiled.capacity_multiple == math.lcm(tp, etp * chunks, blocks * chunks)


def test_shapes_are_made_once_per_number_of_experts() -> None:
    compiled = compile_plan(Plan(), GRID)
    assert compiled.shapes(8) is compiled.shapes(8)
    assert compiled.shapes(16) is not compiled.shapes(8)
    assert "num_experts=6 does not split over mesh.ep=4" in refused(compiled.shapes, 6)


@pytest.mark.parametrize("codec", ["codec", "backward_codec"])
def test_codecs_are_refused_where_redundant_copies_would_drift_apart(codec: str) -> None:
    for plan in (
        Plan(schedule="baseline", **{codec: "int8"}),
        Plan(schedule="ted", fuse=True, **{codec: "int8"}),
    ):  # type: ignore[arg-type]
        assert "a codec clashes with plan.schedule=" in refused(compile_plan, plan, GRID)
    compile_plan(Plan(schedule="ted", **{codec: "int8"}), GRID)  # type: ignore[arg-type]


MOVES = [
    Plan(),
    Plan(chunks=3, order="early"),
    Plan(peer_groups=2, all_to_all="hier2d"),
    Plan(order="fifo", chunks=2),
]


@pytest.mark.parametrize("plan", MOVES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_samples_that_move_change_layouts_of_the_plans_own_programs(plan: Plan, bias: bool) -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    stays = compile_plan(plan, grid, bias=bias)
    moves = moving(stays)
    assert moves.digest != stays.digest
    for one, other in ((stays.forward, moves.forward), (stays.backward, moves.backward)):
        assert [task.name for task in one.tasks] == [
            task.name for task in other.tasks if task.name != INDEX
        ]
        validate(other)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"memory_budget": 5}, "clashes with memory_budget=5"),
        ({"replication": "shadow"}, "clashes with replication"),
        ({"all_to_all": "deepep"}, "clashes with plan.all_to_all=deepep"),
    ],
)
def test_plans_under_which_samples_cannot_move_say_so(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        moving(compile_plan(Plan(**fields), Grid(world=4, ep=4, ranks_per_node=2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("replication", ["none", "shadow", "arbiter"])
def test_what_a_slice_runs_again_is_compiled_with_the_plan(replication: str) -> None:
    plan = Plan(memory_budget=7, replication=replication, chunks=2)
    compiled = compile_plan(plan, Grid(world=4, ep=4, ranks_per_node=2))
    for each in (compiled, compiled.under(replace(plan, replication="none"))):
        validate(each.again)
        names = [task.name for task in each.again.tasks]
        assert names == [task.name for task in each.forward.tasks if task.name in names], (
            "in the same order"
        )
        experts = [task.name for task in each.forward.tasks if task.op is Op.EXPERT]
        assert set(experts) <= set(names)
        assert not any(task.op is Op.COMBINE for task in each.again.tasks)
    assert compile_plan(replace(plan, memory_budget=None), compiled.grid).again is None
