"""`moesaic show`: programs, bytes and times on the command line, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.cli.output import WIDEST
from moesaic.errors import InputError
from moesaic.planner.cluster import read_cluster
from moesaic.planner.plan_files import read_found, read_planned
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.policies import REPLICATION
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Plan
from moesaic.program.text import to_text
from moesaic.program.validate import validate
from program_text import from_text

SMALL = [
    "--layer.tokens=64",
    "--layer.dim=10",
    "--layer.hidden=8",
    "--layer.num-experts=8",
    "--layer.top-k=1",
]


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["show", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("schedule", ["s1", "s2"])
@pytest.mark.parametrize("replication", [NO_REPLICATION, *REPLICATION])
def test_every_replication_policy_is_shown(
    replication: str, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under even routing nothing is replicated: what moves is what moves without replication."""
    flags = ["--plan.schedule", schedule, "--plan.replication", replication]
    assert main(["show", *flags, *SMALL]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("so that nothing is replicated" in printed) == (replication != "none")
    plain = shown(capsys, "--plan.schedule", schedule, *SMALL)
    found = shown(capsys, *flags, *SMALL)
    for name in ("forward", "backward"):
        assert found[name]["across_bytes"] == plain[name]["across_bytes"] > 0
        assert found[name]["inside_bytes"] == plain[name]["inside_bytes"]


def test_the_first_line_names_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--plan.replication", "eplb"]) == 0
    assert capsys.readouterr().out.startswith("s2, 1 chunks, replication, policy eplb on 25gbe")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--plan.schedule s3 --plan.chunks 2", "s3, 2 chunks"),
        ("--plan.all-to-all hier2d --plan.codec int8", "s2, hier2d, int8"),
        ("--plan.all-to-all multicast --plan.order early", "s2, multicast"),
        ("--plan.gather-weights 0 --plan.schedule s1", "s1, r=0"),
        ("--plan.overlap-gather", "s2, overlapped gather"),
    ],
)
def test_it_prints_both_programs_so_that_they_parse_back(flags, name, capsys):
    assert main(["show", *flags.split(), "--listing"]) == 0
    printed = capsys.readouterr().out
    assert "h.0: chunk 0 of h" in printed
    blocks = [
        block
        for block in printed.split("\n\n")
        if block.startswith("program ") or "\nprogram " in block
    ]
    programs = [from_text(block[block.index("program ") :]) for block in blocks]
    assert programs[0].name == name
    assert ", backward" in programs[1].name
    assert "'" not in programs[1].name
    for program in programs:
        validate(program)
        assert to_text(program) in printed


@pytest.mark.parametrize(
    "flags",
    [
        "--plan.schedule s2 --plan.all-to-all multicast",
        "--plan.schedule ted --plan.chunks 8 --plan.all-to-all hier2d",
        "--plan.schedule baseline --plan.replication shadow",
    ],
)
def test_without_the_listing_it_prints_a_screen(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row of each program has the figures of --json."""
    words = flags.split()
    assert main(["show", *words]) == 0
    printed = capsys.readouterr().out
    assert "slot" not in printed.replace("the slot that it writes", "")
    assert "…" not in printed
    assert len(printed.splitlines()) <= 42
    assert max(map(len, printed.splitlines())) <= WIDEST
    found = shown(capsys, *words)
    cells = [line.split() for line in printed.splitlines()]
    for name in ("forward", "backward"):
        times, moved = (row[3:] for row in cells if row[:3] == [name, "in", "all"])
        assert times[0] == str(found[name]["tasks"])
        assert times[-2:] == [
            f"{found[name]['seconds'] * 1e3:,.2f}",
            f"{found[name]['overlap']:.0%}",
        ]
        assert moved[:2] == [
            f"{found[name][key] / 1e6:,.2f}" for key in ("inside_bytes", "across_bytes")
        ]


@pytest.mark.parametrize("command", ["show", "train", "plan"])
def test_the_help_lists_the_replication_policies(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in REPLICATION if name not in printed] == []


def test_json_counts_the_bytes_across_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = [
        "--mesh.world",
        "8",
        "--mesh.tp",
        "1",
        "--mesh.ep",
        "2",
        "--mesh.etp",
        "4",
        "--mesh.ranks-per-node",
        "4",
    ]
    totals = {}
    for schedule, movement in (("s2", "h"), ("s3", "arrived")):
        found = shown(capsys, "--plan.schedule", schedule, *mesh, *SMALL)
        assert set(found) == {"forward", "backward", "held"}
        rows = {row["task"]: row for row in found["forward"]["rows"]}
        totals[schedule] = rows[movement]["across_bytes"]
        for program in (found["forward"], found["backward"]):
            for key in ("inside_bytes", "across_bytes"):
                assert program[key] == sum(row[key] for row in program["rows"])
            assert program["seconds"] > 0
            assert 0 <= program["overlap"] <= 1
            assert program["experts"] == 1
    assert totals["s3"] == 8 * 64 // 2 * 10 * 2
    assert totals["s2"] == 4 * totals["s3"]


def test_json_counts_weights_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank gathers the other three ranks' quarter of 8 experts of 8 units, 3 matrices of 10
    columns, 2 bytes each."""
    mesh = [
        "--mesh.world",
        "4",
        "--mesh.tp",
        "1",
        "--mesh.ep",
        "2",
        "--mesh.etp",
        "2",
        "--mesh.ranks-per-node",
        "2",
    ]
    rows = {
        row["task"]: row
        for row in shown(capsys, "--plan.gather-weights", "0", *mesh, *SMALL)["forward"]["rows"]
    }
    quarter = 8 * 8 // 4 * 3 * 10 * 2
    weights = rows["w_full"]
    assert (weights["inside_bytes"], weights["across_bytes"]) == (4 * quarter, 4 * 2 * quarter)
    assert (weights["inside_messages"], weights["across_messages"]) == (4, 8)
    assert weights["collective"] == "gather"


S1 = ["--plan.schedule", "s1", "--mesh.tp", "1", "--mesh.etp", "1", "--mesh.ep", "8"]


def test_programs_whose_samples_may_move_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """While all stay, rows move as they do without; beside them go the tokens' places, 4 bytes a
    copy."""
    plain = shown(capsys, *S1, *SMALL)
    found = shown(capsys, *S1, *SMALL, "--samples", "4")
    for name in ("forward", "backward"):
        moved, stayed = (
            {row["task"]: row for row in each[name]["rows"]} for each in (found, plain)
        )
        assert found[name]["program"] == f"{plain[name]['program']}, relocating"
        assert all(
            moved[task]["across_bytes"] == row["across_bytes"] for task, row in stayed.items()
        )
    assert {row["task"] for row in found["forward"]["rows"]} - {
        row["task"] for row in plain["forward"]["rows"]
    } == {"index_home"}
    assert main(["show", *S1, *SMALL, "--samples", "4", "--listing"]) == 0
    assert "placed" in capsys.readouterr().out


def test_what_a_slice_runs_again_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The dispatch and the experts of the forward program, and no combine."""
    found = shown(capsys, *S1, *SMALL, "--plan.memory-budget", "20000")
    assert list(found) == ["forward", "backward", "again", "held"]
    tasks = {
        name: [row["task"] for row in found[name]["rows"]]
        for name in ("forward", "backward", "again")
    }
    assert tasks["again"] == [task for task in tasks["forward"] if task in ("x_mine", "g", "h")]
    assert 0 < found["again"]["seconds"] < found["forward"]["seconds"]


def test_chunks_and_peer_groups_multiply_the_expert_tasks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = shown(capsys, "--plan.chunks", "3", "--plan.peer-groups", "2", *SMALL)
    assert found["forward"]["experts"] == found["backward"]["experts"] == 6


def test_it_names_the_codec_of_what_is_coded(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "--plan.codec", "fp8", "--plan.all-to-all", "pipelined", *SMALL)
    codecs = {row["task"]: row["codec"] for row in found["forward"]["rows"]}
    assert (codecs["h@0"], codecs["z@1"], codecs["g@0"], codecs["z_full"]) == (
        "fp8",
        "fp8",
        "none",
        "none",
    )
    assert {row["codec"] for row in found["backward"]["rows"]} == {"none"}


@pytest.mark.parametrize("all_to_all", [*ALL_TO_ALLS, "multicast"])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_its_times_are_the_simulators(schedule, all_to_all, capsys, tmp_path):
    """What is printed, drawn and written to the trace is the simulator's own timeline, for every
    plan that fits the mesh."""
    mesh = {"world": 16, "tp": 2, "ep": 4, "etp": 2, "ranks_per_node": 4}
    layer = {"tokens": 512, "num_experts": 8, "top_k": 2, "dim": 64, "hidden": 128}
    plan = Plan(schedule=schedule, all_to_all=all_to_all, chunks=2)
    grid = Grid(**mesh)
    trace = tmp_path / "trace.json"
    flags = [
        f"--{part}.{name.replace('_', '-')}={value}"
        for part, table in (("mesh", mesh), ("layer", layer))
        for name, value in table.items()
    ]
    flags += (
        f"--plan.schedule={schedule} --plan.all-to-all={all_to_all} --plan.chunks=2 "
        "--cluster=8x4090-pcie"
    ).split()
    try:
        compiled = compile_plan(plan, grid)
    except InputError as refusal:
        reason = str(refusal)
    else:
        reason = ""
    if reason:
        assert main(["show", *flags]) == 2
        assert reason in capsys.readouterr().err
        return
    found = shown(capsys, *flags, "--perfetto", str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    simulator = Simulator(read_cluster("8x4090-pcie", nodes=4))
    for number, (name, program) in enumerate(
        (("forward", compiled.forward), ("backward", compiled.backward))
    ):
        run = simulator.run(program, Workload(**layer), compiled.grid)
        assert found[name]["seconds"] == run.seconds > 0
        spans = {
            event["name"]: event["ts"] * 1e-6
            for event in events
            if event["ph"] == "X" and event["pid"] == number
        }
        assert spans == pytest.approx({span.task: span.start for span in run.timeline.spans})


def test_perfetto_opens_the_timelines(tmp_path: Path, capsys) -> None:
    """By the format of Chrome's traces: every event has a phase, a process and a thread, a complete
    one its start and length in microseconds, and every process and thread a name."""
    path = tmp_path / "trace.json"
    found = shown(capsys, "--plan.chunks", "2", *SMALL, "--perfetto", str(path))
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents"}
    named: dict[str, set[tuple[int, ...]]] = {"process_name": set(), "thread_name": set()}
    ran = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        place = (event["pid"], event["tid"])
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            ran.add(place)
        elif event["name"] in named:
            assert event["args"]["name"]
            named[event["name"]].add(place[: 1 if event["name"] == "process_name" else 2])
    assert ran == named["thread_name"]
    assert named["process_name"] == {(pid,) for pid, _ in ran} == {(0,), (1,)}
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == sum(
        found[name]["tasks"] for name in ("forward", "backward")
    )


def test_it_writes_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "programs.html"
    shown(capsys, "--plan.chunks", "2", *SMALL, "--gantt", str(page))
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "forward" in html
    assert "backward" in html


def test_two_micro_batches_in_flight_are_drawn_where_asked_or_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "programs.html"
    shown(capsys, *SMALL, "--gantt", str(page))
    assert "in flight" not in page.read_text(encoding="utf-8")
    shown(capsys, *SMALL, "--gantt", str(page), "--in-flight", "2", "--between-ms", "3")
    html = page.read_text(encoding="utf-8")
    for name in ("forward", "backward"):
        assert f"{name}, two micro-batches in flight" in html
    assert "Before each layer a forward pass computes 3 ms" in html
    assert "micro-batch 2: messages" in html
    plan = tmp_path / "plan.json"
    shown(capsys, *SMALL, "--write", str(plan))
    table = json.loads(plan.read_text()) | {"micro_batches_in_flight": 2}
    plan.write_text(json.dumps(table))
    shown(capsys, *SMALL, "--plan-file", str(plan), "--gantt", str(page))
    assert "forward, two micro-batches in flight" in page.read_text(encoding="utf-8")


def test_a_plan_that_was_written_is_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    flags = ["--plan.schedule", "s1", "--plan.chunks", "2", "--plan.all-to-all", "multicast"]
    first = shown(capsys, *flags, *SMALL, "--write", str(path))
    assert read_planned(path)[1] == Plan(schedule="s1", chunks=2, all_to_all="multicast")
    assert shown(capsys, "--plan-file", str(path), *SMALL) == first
    mesh = {"tp": 1, "ep": 8, "etp": 1, "innermost": "ep"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mesh": mesh}))
    asked = [word for name, value in mesh.items() for word in (f"--mesh.{name}", str(value))]
    assert (
        shown(capsys, "--plan-file", str(path), *SMALL)
        == shown(capsys, *flags, *SMALL, *asked)
        != first
    )
    assert shown(capsys, "--plan-file", str(path), *SMALL, "--mesh.ep", "2") != shown(
        capsys, *flags, *SMALL, *asked
    )


GPT = """batch_size = 8
[model]
dim = 64
num_layers = 4
num_heads = 2
seq_len = 64
[model.moe]
num_experts = 4
top_k = 1
hidden = 128
"""


@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_of_the_planner_is_shown_with_its_own_layer_and_machines(
    pp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are those that the planner simulated; flags override what the file says."""
    monkeypatch.chdir(tmp_path)
    Path("gpt.toml").write_text(GPT)
    few = "--chunks 1 --schedules s1 --all-to-alls linear --orders fifo --ep 2 --tp 1 --etp 1"
    search = f"plan --model gpt.toml --cluster 8x4090-pcie --gpus 4 --pp {pp} --write plan.toml"
    assert main([*search.split(), *few.split()]) == 0
    capsys.readouterr()
    found = read_found(Path("plan.toml"))
    assert found is not None
    cluster = read_cluster("8x4090-pcie").of_devices(4)
    grid = Grid(world=4 // pp, ep=2, ranks_per_node=4 // pp)
    run = Simulator(cluster).run(
        compile_plan(read_planned(Path("plan.toml"))[1], grid).forward, found.layer, grid
    )
    file = ("--plan-file", "plan.toml")
    assert shown(capsys, *file)["forward"]["seconds"] == run.seconds
    assert main(["show", *file, "--gantt", "plan.html"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.endswith(f"on 8x4090-pcie, 1 node of {4 // pp} ranks: tp 1, ep 2, etp 1")
    assert second.startswith("a layer of 4 experts, top 1, dim 64, hidden 128, for ")
    stages = " in 2 stages, one of which is shown" if pp > 1 else ""
    assert second.endswith(f": gpt.toml's on 4 ranks{stages}")
    where = f"A layer of gpt.toml on 8x4090-pcie, 1 node of {4 // pp} ranks"
    stage = "a stage of 2, " if pp > 1 else ""
    title = f"<h1>{where}: {stage}tp 1, ep 2, etp 1</h1>"
    assert title in Path("plan.html").read_text("utf-8")
    assert main(["show", *file, "--layer.dim", "128"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "but for --layer.dim (64 and 128)" in said
    assert main(["show", *file, "--cluster", "25gbe"]) == 0
    assert "on 25gbe, 1 node of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--plan.all-to-all deepep", "so there is no program to show: choose multicast"),
        ("--in-flight 2 --samples 2", "shows samples at rest: leave out --samples"),
        ("--in-flight 2 --between-ms -1", "--between-ms -1.0: must be at least 0"),
        (
            "--plan.schedule ted --mesh.tp 1",
            "plan.schedule=ted needs mesh.tp and mesh.etp over the same ranks",
        ),
        (
            "--mesh.world 6 --mesh.ep 3 --mesh.ranks-per-node 4",
            "mesh.ranks_per_node=4 does not divide the 6 ranks",
        ),
        ("--plan.chunks 0", "plan.chunks=0"),
        (
            "--plan.replication hott",
            "plan.replication='hott' is unknown: choose one of none, shadow",
        ),
        ("--layer.tokens 0", "--layer.tokens 0: must be at least 1"),
        ("--layer.num-experts 3", "num_experts=3 does not split over mesh.ep=4"),
        ("--layer.top-k 9", "--layer.top-k 9: choose at most --layer.num-experts 8"),
        (
            "--layer.top-k 9 --plan.all-to-all multicast",
            "--layer.top-k 9: choose at most --layer.num-experts 8",
        ),
        ("--cluster 25gb", "cluster '25gb' is unknown: did you mean 25gbe?"),
        ("--layer.dtype fp64", "cluster.device.tflops.fp64 is not given: add it, or choose one of"),
        (
            "--mesh.world 16 --mesh.ranks-per-node 8",
            "mesh.ranks_per_node=8 does not fit cluster 25gbe",
        ),
        ("--samples 4", "sample placement needs plan.schedule=s1"),
        ("--plan.schedule s1 --samples 4", "--samples 4: needs --mesh.tp 1"),
        (
            "--plan.schedule s1 --mesh.tp 1 --layer.tokens 4095 --samples 4",
            "samples among which a rank's 4095 tokens",
        ),
        (
            "--plan.schedule s1 --mesh.tp 1 --plan.memory-budget 9 --samples 4",
            "clashes with memory_budget=9",
        ),
        ("--tokens 8", "unknown argument --tokens, did you mean --layer.tokens?"),
        ("--plan-file no/such.json", "no/such.json: no such file"),
        ("--write no/such.json", "plan no/such.json: cannot be written"),
        ("--perfetto no/such.json", "--perfetto no/such.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *flags.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
