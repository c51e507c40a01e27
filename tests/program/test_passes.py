"""Every pass: which movements it changes, what it refuses, and that all passes together give
programs that validate and print."""

from __future__ import annotations

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.fuse_ep_etp import fuse_ep_etp
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.halve_reduce import halve_reduce
from moesaic.program.passes.multicast import multicast
from moesaic.program.passes.overlap_gather import overlap_gather
from moesaic.program.passes.route_all_to_all import compress, route_all_to_all
from moesaic.program.passes.split import split_peers
from moesaic.program.plan import Plan
from moesaic.program.task import Op, Program
from moesaic.program.transpose import transpose
from moesaic.program.validate import collective, validate

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)


def moved(program: Program) -> dict[str, str]:
    """Return "collective over axes" for each movement."""
    return {
        task.name: f"{collective(program, task.name)} {'+'.join(task.group)}"
        for task in program.moves()
    }


def names(program: Program) -> list[str]:
    return [task.name for task in program.tasks]


def test_fusing_the_baseline_moves_rows_straight_to_all_shards_and_sums_on_the_way_back() -> None:
    fused = fuse_ep_etp(SCHEDULES["baseline"]())
    validate(fused)
    assert moved(fused) == {"h": "deliver ep+etp", "g": "deliver ep+etp", "own": "collect ep+etp"}
    assert names(fused).index("rows_own") < names(fused).index("h")
    assert fused.slot("rows_own").layout == fused.slot("gates").layout


def test_fusing_s3_gives_the_movements_of_s2() -> None:
    assert moved(fuse_ep_etp(SCHEDULES["s3"]())) == moved(SCHEDULES["s2"]())


@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_fusing_what_has_no_chain_changes_nothing(schedule: str) -> None:
    assert fuse_ep_etp(SCHEDULES[schedule]()) == SCHEDULES[schedule]()


def test_r_1_gathers_the_shards_and_rows_node_token_ep_only_in_effect() -> None:
    program, grid = gather_weights(SCHEDULES["s2"](), 1, GRID)
    movements = moved(program)
    assert movements["w_full"] == "gather etp_inner"
    assert movements["h"] == "deliver ep+etp_outer"
    assert grid.group(3, ("ep", "etp_outer")) == (1, 3, 5, 7)
    assert moved(transpose(program))["w_full'"] == "reduce_scatter etp_inner"


@pytest.mark.parametrize("schedule", ["baseline", "s1", "s2", "s3"])
def test_r_0_brings_all_weights_to_the_tokens_and_no_token_to_an_expert(schedule: str) -> None:
    program, _ = gather_weights(SCHEDULES[schedule](), 0, GRID)
    groups = {task.name: task.group for task in program.moves()}
    assert groups.pop("w_full") == ("ep", "etp")
    assert set(groups.values()) <= {("tp",)}
    backward = transpose(program)
    assert moved(backward)["w_full'"] == "reduce_scatter ep+etp"
    assert "w_full" not in backward.inputs, "gathered weights are not kept but gathered again"


def test_peer_groups_take_dispatch_expert_and_combine_step_by_step() -> None:
    program = split_peers(SCHEDULES["s1"](), 4, GRID)
    in_steps = [name for name in names(program) if "~" in name]
    assert in_steps == [f"{name}~{step}" for step in range(4) for name in ("h", "g", "out", "z")]
    assert {program.slot(f"h~{step}").layout.step for step in range(4)} == {
        (step, 4) for step in range(4)
    }


@pytest.mark.parametrize("order", ["early", "optsche"])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_results_of_a_step_leave_right_after_its_experts(order: str, groups: int) -> None:
    """FasterMoE enqueues R_j only after the last C; here R_j comes right after C_j."""
    compiled = compile_plan(Plan(schedule="s1", peer_groups=groups, order=order), GRID)  # type: ignore[arg-type]
    task_names = names(compiled.forward)
    for step in range(groups):
        assert task_names[task_names.index(f"out~{step}") + 1] == f"z~{step}"
    assert max(task_names.index(f"h~{step}") for step in range(groups)) < task_names.index(
        "out~0"
    ), "S's are issued first"


def test_overlapped_gather_goes_by_ranks_of_ep_and_sums_inside_each_phase() -> None:
    program = overlap_gather(SCHEDULES["s2"](), GRID)
    validate(program)
    phases = [name for name in names(program) if name.startswith("z")]
    assert phases == [f"{name}~{phase}" for phase in range(GRID.ep) for name in ("z", "z_full")], (
        "ep phases, not world"
    )
    for phase in range(GRID.ep):
        assert moved(program)[f"z~{phase}"] == "collect ep+etp"
        assert moved(program)[f"z_full~{phase}"] == "gather tp"
        assert program.slot(f"z~{phase}").layout.step == (phase, GRID.ep)


def test_the_backward_gather_of_s2_overlaps_too() -> None:
    program = overlap_gather(transpose(SCHEDULES["s2"]()), GRID, required=False)
    assert [name for name in names(program) if name.startswith("mine'~")] == [
        f"mine'~{j}" for j in range(GRID.ep)
    ]


@pytest.mark.parametrize("mesh", [{"tp": 1, "ep": 4}, {"tp": 2, "ep": 1}])
def test_nothing_overlaps_where_one_of_the_two_moves_nothing(mesh: dict) -> None:
    program = SCHEDULES["s2"]()
    assert overlap_gather(program, Grid(world=4, **mesh)) is program


@pytest.mark.parametrize(
    ("schedule", "slot", "axis"), [("baseline", "summed", "etp"), ("ted", "summed", "etp")]
)
def test_an_all_reduce_becomes_reduce_scatter_and_gather(
    schedule: str, slot: str, axis: str
) -> None:
    program = halve_reduce(SCHEDULES[schedule]())
    validate(program)
    assert moved(program)[f"{slot}/sums"] == f"reduce_scatter {axis}"
    assert moved(program)[slot] == f"gather {axis}"
    assert program.slot(slot) == SCHEDULES[schedule]().slot(slot)


def test_halving_leaves_what_does_not_sum_and_the_weights() -> None:
    for schedule in ("s1", "s2", "s3"):
        assert halve_reduce(SCHEDULES[schedule](True)) == SCHEDULES[schedule](True)
        assert halve_reduce(transpose(SCHEDULES[schedule](True))) == transpose(
            SCHEDULES[schedule](True)
        )


@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_multicast_crosses_nodes_once_per_token_and_sums_before_it_goes_back(schedule: str) -> None:
    program = multicast(SCHEDULES[schedule](), GRID)
    forward = moved(program)
    crossing = {name for name, how in forward.items() if how.endswith(" node")}
    assert crossing == {
        "node_tokens_here",
        "rank_token_index_here",
        "copy_index_here",
        "gates_here",
        "z",
    }
    assert (
        program.slot("node_tokens_here").layout.flow
        == program.slot("z").layout.flow
        == "node_tokens"
    )
    assert (forward["rank_tokens_in"], forward["z_rank_tokens"]) == (
        "deliver local",
        "collect local",
    )
    assert (
        program.slot("rank_tokens_in").layout.flow
        == program.slot("z_rank_tokens").layout.flow
        == "rank_tokens"
    )
    assert not {"h", "out"} & set(forward), "copies are made, and summed, where they are computed"
    backward = moved(transpose(program))
    assert backward["z'"] == backward["node_tokens_here'"] == "exchange node", (
        "backward crosses once per token too"
    )
    assert (backward["z_rank_tokens'"], backward["rank_tokens_in'"]) == (
        "deliver local",
        "collect local",
    ), "and goes to a rank once"
    assert not {"copy_index_here'", "copy_index_in'", "rank_token_index_here'"} & set(backward), (
        "indices have no cotangent"
    )


DIRECT = {"rank_tokens_in": "deliver ep+etp", "z": "collect ep+etp"}
BY_MATE = {
    "rank_tokens_here": "exchange node",
    "rank_tokens_in": "deliver local",
    "z_rank_tokens": "collect local",
    "z": "exchange node",
}


@pytest.mark.parametrize(
    ("grid", "movements"),
    [
        (Grid(world=4, ep=4), DIRECT),
        (Grid(world=8, ep=2, etp=2, ranks_per_node=4), DIRECT),
        (Grid(world=4, ep=4, ranks_per_node=1), DIRECT),
        (Grid(world=8, ep=4, etp=2, ranks_per_node=2), BY_MATE),
    ],
    ids=[
        "one node",
        "a node for each copy of the experts",
        "a rank a node",
        "an expert's shards on every node",
    ],
)
def test_multicast_has_one_level_where_node_tokens_and_rank_tokens_are_the_same(grid, movements):
    program = multicast(SCHEDULES["s1"](), grid)
    validate(program)
    assert not [slot.name for slot in program.slots if slot.layout.flow == "node_tokens"]
    assert "node_token_index" not in program.inputs
    rank_tokens = [
        t.name for t in program.moves() if program.slot(t.writes[0]).layout.flow == "rank_tokens"
    ]
    assert {name: how for name, how in moved(program).items() if name in rank_tokens} == movements


def test_codecs_code_rows_over_ep_and_nothing_else() -> None:
    for link in ("linear", "hier2d"):
        program = compress(route_all_to_all(SCHEDULES["s3"](), link, GRID), "int8", GRID)
        validate(program)
        coded = {task.of for task in program.tasks if task.codec}
        assert coded == {("mine", "arrived"), ("reduced", "z")}
        assert {task.op for task in program.tasks if task.codec} == {Op.PACK, Op.UNPACK}
    assert compress(SCHEDULES["s3"](), "none", GRID) == SCHEDULES["s3"]()


def test_forward_and_backward_codec_are_separate() -> None:
    compiled = compile_plan(Plan(schedule="s2", codec="fp8"), GRID)
    assert {task.codec for task in compiled.forward.tasks} == {"", "fp8"}
    assert {task.codec for task in compiled.backward.tasks} == {""}
    compiled = compile_plan(Plan(schedule="s2", backward_codec="bf16"), GRID)
    assert {task.codec for task in compiled.forward.tasks} == {""}
    assert {task.codec for task in compiled.backward.tasks} == {"", "bf16"}
