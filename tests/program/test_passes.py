"""Every pass: what moved where, what it refuses, and that all of them together give programs that validate and print."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from moesaic.errors import InputError
from moesaic.plan import Plan, compile_plan
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.fuse_ep_etp import fuse_ep_etp
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.halve_reduce import halve_reduce
from moesaic.program.passes.multicast import multicast
from moesaic.program.passes.overlap_gather import overlap_gather
from moesaic.program.passes.route_links import compress, route_links
from moesaic.program.passes.split_capacity import split_capacity
from moesaic.program.passes.split_peers import split_peers
from moesaic.program.task import Kind, Op, Program, State
from moesaic.program.text import from_text, to_text
from moesaic.program.transpose import cotangent, transpose
from moesaic.program.validate import ProgramError, collective, validate

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
LINKS = ("linear", "hier1d", "hier2d", "pipelined", "hier3d", "naive", "multicast")


def moved(program: Program) -> dict[str, str]:
    """Movement -> "collective over axes"."""
    return {task.name: f"{collective(program, task.name)} {'+'.join(task.group)}" for task in program.moves()}


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fusing_twice_is_fusing_once(schedule: str) -> None:
    once = fuse_ep_etp(SCHEDULES[schedule]())
    assert fuse_ep_etp(once) == once


@pytest.mark.parametrize("schedule", ["baseline", "s1", "s2", "s3"])
@pytest.mark.parametrize("bias", [False, True])
def test_r_never_changes_how_weights_are_stored(schedule: str, bias: bool) -> None:
    grid = Grid(world=16, tp=2, ep=2, etp=4)
    plain = SCHEDULES[schedule](bias)
    for r in (0, 1, 2, 4):
        program, factored = gather_weights(plain, r, grid)
        validate(program)
        validate(transpose(program))
        assert program.inputs == plain.inputs
        for name in ("w", "b")[: 1 + bias]:
            assert program.slot(name) == plain.slot(name)
        assert replace(factored, etp_inner=1) == grid
        assert (factored.etp_outer, factored.etp_inner) == ((r, 4 // r) if r else (4, 1))


def test_r_etp_is_the_program_itself() -> None:
    plain = SCHEDULES["s2"]()
    assert gather_weights(plain, GRID.etp, GRID) == (plain, GRID)
    assert gather_weights(SCHEDULES["ted"](), GRID.etp, GRID)[0].name == "ted"


def test_r_1_gathers_the_shards_and_rows_visit_ep_only_in_effect() -> None:
    program, grid = gather_weights(SCHEDULES["s2"](), 1, GRID)
    found = moved(program)
    assert found["w_full"] == "gather etp_inner"
    assert found["h"] == "deliver ep+etp_outer"
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_partition_what_is_between_and_leave_the_rest(schedule: str) -> None:
    plain, cut = SCHEDULES[schedule](), split_capacity(SCHEDULES[schedule](), 3)
    doubled = [name for name in names(cut) if name[-2:] in (".0", ".1", ".2")]
    stems = Counter(name[:-2] for name in doubled)
    assert set(stems.values()) == {3}
    assert stems["out"] == 3
    rest = [name for name in names(cut) if name not in doubled and not name.startswith(("take-", "join-"))]
    assert sorted([*rest, *stems]) == sorted(names(plain))


def test_peer_groups_take_dispatch_expert_and_combine_step_by_step() -> None:
    program = split_peers(SCHEDULES["s1"](), 4, GRID)
    kept = [name for name in names(program) if "~" in name]
    assert kept == [f"{name}~{step}" for step in range(4) for name in ("h", "g", "out", "z")]
    assert {program.slot(f"h~{step}").layout.step for step in range(4)} == {(step, 4) for step in range(4)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peer_groups_of_chunks_are_a_grid_of_parts(schedule: str) -> None:
    program = split_peers(split_capacity(SCHEDULES[schedule](), 2), 2, GRID)
    validate(program)
    read = [program.slot(task.reads[0]).layout for task in program.tasks if task.op is Op.EXPERT]
    assert sorted((layout.chunk, layout.step) for layout in read) == list(itertools.product(range(2), [(0, 2), (1, 2)]))


@pytest.mark.parametrize("order", ["early", "optsche"])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_results_of_a_step_leave_right_after_its_experts(order: str, groups: int) -> None:
    """FasterMoE enqueues R_j only after the last C; here R_j comes right after C_j."""
    compiled = compile_plan(Plan(schedule="s1", peer_groups=groups, order=order), GRID)  # type: ignore[arg-type]
    found = names(compiled.forward)
    for step in range(groups):
        assert found[found.index(f"out~{step}") + 1] == f"z~{step}"
    assert max(found.index(f"h~{step}") for step in range(groups)) < found.index("out~0"), "S's are issued first"


def test_overlapped_gather_goes_by_ranks_of_ep_and_sums_inside_each_phase() -> None:
    program = overlap_gather(SCHEDULES["s2"](), GRID)
    validate(program)
    phases = [name for name in names(program) if name.startswith("z")]
    assert phases == [f"{name}~{phase}" for phase in range(GRID.ep) for name in ("z", "z_full")], "ep phases, not world"
    for phase in range(GRID.ep):
        assert moved(program)[f"z~{phase}"] == "collect ep+etp"
        assert moved(program)[f"z_full~{phase}"] == "gather tp"
        assert program.slot(f"z~{phase}").layout.step == (phase, GRID.ep)


def test_overlapped_gather_of_chunks_goes_by_phases_in_every_chunk() -> None:
    program = overlap_gather(split_capacity(SCHEDULES["s3"](), 2), GRID)
    phases = [name for name in names(program) if name.startswith("z_full")]
    assert phases == [f"z_full.{chunk}~{phase}" for chunk in range(2) for phase in range(GRID.ep)]


def test_the_backward_gather_of_s2_overlaps_too() -> None:
    program = overlap_gather(transpose(SCHEDULES["s2"]()), GRID, required=False)
    assert [name for name in names(program) if name.startswith("mine'~")] == [f"mine'~{j}" for j in range(GRID.ep)]


@pytest.mark.parametrize("mesh", [{"tp": 1, "ep": 4}, {"tp": 2, "ep": 1}])
def test_nothing_overlaps_where_one_of_the_two_moves_nothing(mesh: dict) -> None:
    program = SCHEDULES["s2"]()
    assert overlap_gather(program, Grid(world=4, **mesh)) is program


@pytest.mark.parametrize(("schedule", "slot", "axis"), [("baseline", "summed", "etp"), ("ted", "summed", "etp")])
def test_an_all_reduce_becomes_reduce_scatter_and_gather(schedule: str, slot: str, axis: str) -> None:
    program = halve_reduce(SCHEDULES[schedule]())
    validate(program)
    assert moved(program)[f"{slot}/sums"] == f"reduce_scatter {axis}"
    assert moved(program)[slot] == f"gather {axis}"
    assert program.slot(slot) == SCHEDULES[schedule]().slot(slot)


def test_halving_leaves_what_does_not_sum_and_the_weights() -> None:
    for schedule in ("s1", "s2", "s3"):
        assert halve_reduce(SCHEDULES[schedule](True)) == SCHEDULES[schedule](True)
        assert halve_reduce(transpose(SCHEDULES[schedule](True))) == transpose(SCHEDULES[schedule](True))


@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_multicast_crosses_nodes_once_per_token_and_sums_before_it_goes_back(schedule: str) -> None:
    program = multicast(schedule, GRID)
    found = moved(program)
    assert {name for name, how in found.items() if how.endswith(" node")} == {
        "visits_here",
        "copies_here",
        "gates_here",
        "z",
    }
    assert program.slot("visits_here").layout.flow == program.slot("z").layout.flow == "visits"
    assert (found["h"], found["z_copies"]) == ("deliver local", "collect local")
    back = moved(transpose(program))
    assert back["z'"] == back["visits_here'"] == "exchange node", "backward crosses once per token too"
    assert "copies_here'" not in back, "indices have no cotangent"


@pytest.mark.parametrize("link", [link for link in LINKS if link not in ("linear", "multicast")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lowering_replaces_each_long_movement_by_pack_hops_unpack(schedule: str, link: str) -> None:
    plain = SCHEDULES[schedule]()
    lowered = route_links(plain, link, GRID)
    validate(lowered)
    long = [task for task in plain.moves() if "ep" in task.group]
    for task in long:
        parts = [t for t in lowered.tasks if t.of == (task.reads[0], task.writes[0])]
        assert [parts[0].op, parts[-1].op] == [Op.PACK, Op.UNPACK]
        assert [t.hop for t in parts[1:-1]] == list(range(len(parts) - 2))
        assert {t.op for t in parts[1:-1]} == {Op.HOP}
        assert {t.group for t in parts} == {task.group}
        assert parts[-1].writes == task.writes
    assert [t.name for t in lowered.moves()] == [t.name for t in plain.moves() if t not in long]


def test_codecs_code_rows_over_ep_and_nothing_else() -> None:
    for link in ("linear", "hier2d"):
        program = compress(route_links(SCHEDULES["s3"](), link, GRID), "int8", GRID)
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


def draw_plan(rng: random.Random) -> Plan:
    return Plan(
        schedule=rng.choice(list(SCHEDULES)),  # type: ignore[arg-type]
        fuse=rng.random() < 0.3,
        gather_weights=rng.choice([None, None, 0, 1, 2, 4]),
        chunks=rng.choice([1, 2, 3]),
        peer_groups=rng.choice([1, 1, 2, 4]),
        overlap_gather=rng.random() < 0.3,
        all_to_all=rng.choice(LINKS),  # type: ignore[arg-type]
        codec=rng.choice(["none", "int8", "bf16"]),  # type: ignore[arg-type]
        backward_codec=rng.choice(["none", "none", "fp16"]),  # type: ignore[arg-type]
        order=rng.choice(["fifo", "early", "optsche", "exact"]),  # type: ignore[arg-type]
    )


def draw_grid(rng: random.Random) -> Grid:
    world = rng.choice([2, 4, 8, 12, 16])
    sizes = [size for size in (1, 2, 3, 4, 8) if world % size == 0]
    ep, etp = rng.choice([(p, s) for p in sizes for s in sizes if world % (p * s) == 0])
    node = rng.choice([None, *sizes])
    return Grid(
        world=world, tp=rng.choice(sizes), ep=ep, etp=etp, innermost=rng.choice(["etp", "ep"]), ranks_per_node=node
    )


@pytest.mark.parametrize("batch", range(8))
def test_any_legal_mix_validates_prints_and_parses_back(batch: int) -> None:
    rng = random.Random(batch)
    legal, lines = 0, []
    while legal < 25:
        plan, grid = draw_plan(rng), draw_grid(rng)
        try:
            compiled = compile_plan(plan, grid, bias=rng.random() < 0.5)
        except InputError as refusal:
            lines.append(str(refusal))
            continue
        legal += 1
        for program in (compiled.logical, compiled.forward, compiled.backward):
            validate(program)
            assert from_text(to_text(program)) == program
        experts = {task.name for task in compiled.logical.tasks if task.op is Op.EXPERT}
        assert {cotangent(name) for name in experts} == {
            task.name for task in compiled.backward.tasks if task.op is Op.EXPERT_GRAD
        }
    assert lines
    for line in lines:
        assert "\n" not in line
        assert "plan." in line or "mesh." in line, line


@pytest.mark.parametrize("seed", range(60))
def test_movements_transpose_to_the_dual_states_and_twice_to_themselves(seed: int) -> None:
    """What is before the experts has only movements, copies and scales: its transpose's transpose is itself."""
    rng = random.Random(seed)
    plan, grid = replace(draw_plan(rng), overlap_gather=False, gather_weights=None), draw_grid(rng)
    try:
        program = compile_plan(plan, grid).logical
    except InputError:
        return
    half = dispatch_of(program)
    twice = transpose(transpose(half))
    slots = {slot.name.replace("''", ""): slot for slot in twice.slots}
    for slot in half.slots:
        if slot.kind is Kind.INDEX and slot.name not in slots:
            continue  # the index of a movement that needs no cotangent
        again = slots[slot.name]
        assert (again.kind, again.layout, dict(again.state)) == (slot.kind, slot.layout, dict(slot.state))
    ends = {
        (task.op, task.reads, task.writes, task.group, task.power)
        for task in half.tasks
        if half.slot(task.writes[0]).kind is not Kind.INDEX  # indices have no cotangent, and so no way back
    }
    unprimed = {
        (
            t.op,
            tuple(n.replace("''", "") for n in t.reads),
            tuple(n.replace("''", "") for n in t.writes),
            t.group,
            t.power,
        )
        for t in twice.tasks
    }
    assert unprimed == ends
    backward = {task.name: task for task in transpose(program).tasks}
    for task in program.moves():
        source, target = program.slot(task.reads[0]), program.slot(task.writes[0])
        if source.kind is Kind.INDEX:
            continue
        back = backward[cotangent(task.name)]
        assert back.reads == (cotangent(target.name),)
        assert back.group == task.group
        slots = {slot.name: slot for slot in transpose(program).slots}
        assert all(slots[back.writes[0]].on(axis) is state.dual for axis, state in source.state)


def dispatch_of(program: Program) -> Program:
    """The part of a program before its experts, as a program whose outputs are what the experts read."""
    experts = [task for task in program.tasks if task.op is Op.EXPERT]
    needed = {name for task in experts for name in task.reads if program.slot(name).kind is not Kind.WEIGHT}
    outputs, tasks = tuple(sorted(needed)), []
    for task in reversed(program.tasks):
        if needed.intersection(task.writes):
            tasks.insert(0, task)
            needed.update(task.reads)
    written = {name for task in tasks for name in task.writes}
    needed |= written
    return replace(
        program,
        slots=tuple(slot for slot in program.slots if slot.name in needed),
        tasks=tuple(tasks),
        inputs=tuple(name for name in program.inputs if name in needed),
        outputs=outputs,
    )


DUAL_WORDS = {
    "exchange": {"exchange"},
    "gather": {"slice", "reduce_scatter"},
    "slice": {"gather"},
    "deliver": {"collect"},
    "collect": {"deliver"},
    "reduce_scatter": {"gather"},
    "share": {"all_reduce"},
    "all_reduce": {"share", "all_reduce"},
    "keep": {"keep"},
}


@pytest.mark.parametrize("schedule", [*SCHEDULES, "multicast s1", "multicast s2"])
def test_every_collective_transposes_to_its_partner(schedule: str) -> None:
    program = multicast(schedule[-2:], GRID) if "multicast" in schedule else SCHEDULES[schedule]()
    backward = transpose(program)
    for task in program.moves():
        if program.slot(task.reads[0]).kind is not Kind.INDEX:
            assert collective(backward, f"{task.name}'") in DUAL_WORDS[collective(program, task.name)]


UNEVEN = {"world": 12, "tp": 1, "ep": 6, "etp": 1, "ranks_per_node": 4}
REFUSED = [
    ({"schedule": "s2", "all_to_all": "multicast", "peer_groups": 2}, {}, ["split_peers", "multicast"]),
    ({"schedule": "s2", "all_to_all": "multicast", "gather_weights": 0}, {}, ["gather_weights=0", "multicast"]),
    ({"schedule": "s3", "all_to_all": "multicast"}, {}, ["multicast", "s3"]),
    ({"schedule": "baseline", "all_to_all": "multicast"}, {}, ["multicast", "baseline"]),
    ({"schedule": "ted", "all_to_all": "multicast"}, {}, ["multicast", "ted"]),
    ({"schedule": "s2", "all_to_all": "multicast"}, {"innermost": "ep"}, ["multicast", "mesh.etp=2", "nodes of 4"]),
    ({"schedule": "s2", "all_to_all": "multicast"}, UNEVEN, ["multicast", "nodes of 4 ranks"]),
    ({"schedule": "ted", "gather_weights": 1}, {}, ["gather_weights", "ted"]),
    ({"schedule": "ted", "gather_weights": 0}, {}, ["gather_weights", "ted"]),
    ({"schedule": "s2", "gather_weights": 3}, {}, ["plan.gather_weights=3", "mesh.etp=2", "[1, 2]"]),
    ({"schedule": "s2", "gather_weights": 4}, {}, ["plan.gather_weights=4", "mesh.etp=2"]),
    ({"schedule": "s1", "overlap_gather": True}, {}, ["overlap_gather", "s1"]),
    ({"schedule": "baseline", "overlap_gather": True}, {}, ["overlap_gather", "baseline"]),
    ({"schedule": "ted", "overlap_gather": True}, {}, ["overlap_gather", "ted"]),
    ({"schedule": "s2", "overlap_gather": True, "peer_groups": 2}, {}, ["overlap_gather", "split_peers"]),
    ({"schedule": "s2", "overlap_gather": True, "gather_weights": 0}, {}, ["overlap_gather", "gather_weights=0"]),
    ({"schedule": "s2", "overlap_gather": True, "all_to_all": "multicast"}, {}, ["overlap_gather", "multicast"]),
    ({"schedule": "s2", "peer_groups": 3}, {}, ["plan.peer_groups=3", "mesh.ep=4"]),
    ({"schedule": "s2", "peer_groups": 8}, {}, ["plan.peer_groups=8", "mesh.ep=4"]),
    ({"schedule": "ted"}, {"tp": 1}, ["plan.schedule=ted", "mesh.tp", "mesh.etp"]),
    ({"schedule": "ted"}, {"tp": 4}, ["plan.schedule=ted", "4 and 2"]),
    ({"schedule": "ted"}, {"innermost": "ep"}, ["plan.schedule=ted", "ep innermost"]),
    *[
        ({"schedule": "s2", "all_to_all": link}, UNEVEN, [link, "nodes of 4 ranks"])
        for link in ("hier2d", "hier3d", "naive")
    ],
]


@pytest.mark.parametrize(("plan", "mesh", "words"), REFUSED, ids=lambda value: "-".join(map(str, value)))
def test_what_clashes_is_refused_in_one_line_that_names_both(plan: dict, mesh: dict, words: list[str]) -> None:
    grid = replace(GRID, **mesh)
    with pytest.raises(InputError) as refusal:
        compile_plan(Plan(**plan), grid)
    line = str(refusal.value)
    assert "\n" not in line
    assert all(word in line for word in words), line
    assert "choose" in line, f"says not what to do instead: {line}"


def test_naive_aggregation_is_refused_where_groups_lie_on_different_numbers_of_nodes() -> None:
    """Pairs of neighbours on nodes of three: (0, 1) share one, (2, 3) do not; their hops would differ."""
    grid = Grid(world=12, ep=2, ranks_per_node=3)
    with pytest.raises(InputError, match=r"all_to_all=naive needs every group over ep\+etp on equally many nodes"):
        compile_plan(Plan(all_to_all="naive"), grid)
    compile_plan(Plan(all_to_all="hier2d"), grid)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: split_capacity(SCHEDULES["s2"](), 0), "plan.chunks=0"),
        (lambda: split_capacity(split_capacity(SCHEDULES["s2"](), 2), 2), "chunked already"),
        (
            lambda: route_links(SCHEDULES["s2"](), "ring", GRID),
            "plan.all_to_all='ring' is unknown: choose one of linear",
        ),
        (lambda: split_peers(SCHEDULES["s2"](), 0, GRID), "plan.peer_groups=0"),
        (lambda: split_peers(multicast("s1", GRID), 2, GRID), "split_peers clashes with multicast"),
        (lambda: gather_weights(SCHEDULES["s2"](), -1, GRID), "plan.gather_weights=-1"),
        (lambda: multicast("s4", GRID), "multicast clashes with s4"),
    ],
)
def test_passes_refuse_by_themselves(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]


def test_a_state_that_no_collective_reaches_is_refused() -> None:
    program = SCHEDULES["s2"]()
    slots = tuple(replace(s, state=(("etp", State.PARTIAL),)) if s.name == "h" else s for s in program.slots)
    with pytest.raises(ProgramError, match="task h: no collective takes etp from S to P"):
        validate(replace(program, slots=slots))
