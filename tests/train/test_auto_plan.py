"""Plan search and plan switches in training: the loss curve equals that of a run without switches,
and refusals reach all ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.planner.plan_table import PlanTable, TableSettings
from moesaic.program.plan import Plan
from moesaic.train import auto_plan
from moesaic.train.auto_plan import with_planned
from moesaic.train.checkpoint import PLAN_TABLE, list_checkpoints
from moesaic.train.config import TrainConfig
from runs import lines, tiny, write_config
from train.worlds import Outcome, assert_same_run, train_on

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 8, "sequences": 5},
    "steps": 16,
    "save": {"every": 8},
    "optimizer": {"final_share": 1.0, "warmup_steps": 0},
}
"""A constant learning rate, so that a run in two parts equals the run in one."""
MESH = {"tp": 2, "ep": 2, "ranks_per_node": 1}
TWO = "two.toml"
"""The file name of a cluster of two nodes with one rank each."""
TABLE = TableSettings(rows_per_bucket=16.0, hysteresis=0.0, optimism=0.9)


def cluster(folder: Path, *, name: str = TWO, memory_gib: float = 4, gbps: float = 0.2) -> str:
    """Write the description of the cluster into a folder. Return its path."""
    path = folder / name
    path.write_text(
        f"nodes = 2\ndevices_per_node = 1\n[device]\nmemory_gib = {memory_gib}\n"
        "memory_gigabytes_per_second = 5\ntflops = { fp64 = 0.03, fp32 = 0.05 }\n"
        f'[[links]]\nname = "eth"\ndevices = 1\ngbps = {gbps}\n'
        "[host]\nruns_compute = true\ntask_us = 30\nmessage_us = 60\n"
    )
    return str(path)


def few_plans() -> None:
    """Use four candidates besides the configured plan, and a plan table for toy sizes."""
    auto_plan.PLANS = 4
    auto_plan.TABLE = TABLE


def other_table() -> None:
    """Use a plan table with other buckets than the saved tables."""
    auto_plan.PLANS, auto_plan.TABLE = 4, replace(TABLE, rows_per_bucket=7.0)


def runs_of(folder: Path) -> dict[str, TrainConfig]:
    """Return the runs to train: one plan, many plans in one go, many plans in two parts, and some
    that are refused."""

    def run(out: str, cluster: str = cluster(folder), **changes: object) -> TrainConfig:
        auto = {"plan": "auto", "cluster": cluster}
        common = {
            **BASE,
            "mesh": MESH,
            "plan": {"schedule": "s2"},
            "planner": auto,
            "out": str(folder / out),
        }
        return tiny(folder, **common | changes)

    parts = run("parts", existing="resume")
    tight = cluster(folder, name="tight.toml", memory_gib=1 + 0.6 / 1024)
    searched = {"plan": "search", "cluster": tight}
    return {
        "plain": run("plain", planner={}),
        "switched": run("switched"),
        "timed": run("timed", cluster=""),
        "tight": run("tight", steps=2, planner=searched, mesh={"ranks_per_node": 1}, plan={}),
        "part 1": replace(parts, steps=8),
        "part 2": parts,
        "other": parts,
        "lossy": run("lossy", steps=6, plan={"schedule": "s2", "codec": "int8"}),
        "no nodes of two": run("refused", mesh=MESH | {"ranks_per_node": 2}),
        "capacity": run("refused", mesh={}, plan={}, model={"moe": {"capacity": "padded"}}),
        "dense": run("refused", mesh={}, plan={}, model={"ffn": "dense"}),
        "unknown": run("refused", cluster="25gb"),
    }


MORE = ("timed", "lossy", "other")
"""Runs that `make test-random` trains besides."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on two ranks. Return the folder, and the outcomes by name."""
    folder = tmp_path_factory.mktemp("auto")
    runs = {name: run for name, run in runs_of(folder).items() if name not in MORE}
    return folder, dict(zip(runs, train_on(2, list(runs.values()), few_plans)))


@pytest.fixture(scope="module")
def more(world: tuple[Path, dict[str, list[Outcome]]]) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train the others too, in the same folder."""
    folder, _ = world
    runs = runs_of(folder)
    timed = train_on(2, [runs["timed"]], few_plans)
    others = train_on(2, [runs["lossy"], runs["other"]], other_table)
    return folder, dict(zip(MORE, (*timed, *others)))


def kept_table(run: Path, number: int) -> dict:
    """Return the plan table that a checkpoint of a run holds."""
    found: dict = json.loads(
        (list_checkpoints(run / "checkpoints")[number] / PLAN_TABLE).read_text()
    )
    return found


def decisions(run: Path) -> list[list]:
    """Return all that was decided in a run."""
    return [
        each
        for line in lines(run, "train")
        for each in line.get("plan", {"decisions": ()})["decisions"]
    ]


def test_a_run_that_switches_is_the_run_that_does_not(world) -> None:
    folder, outcomes = world
    assert [outcome.refusal for name in ("plain", "switched") for outcome in outcomes[name]] == [
        ""
    ] * 4
    made = decisions(folder / "switched")
    assert len({plan for _, _, _, plan in made}) >= 2, "several plans ran"
    assert made[0][1] == "start"
    assert "trial" in {why for _, why, _, _ in made}
    assert_same_run(folder / "plain", folder / "switched")


def test_a_search_recomputes_blocks_where_nothing_fits_without(world) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["tight"]] == ["", ""]
    assert "; activations are recomputed: otherwise no" in outcomes["tight"][0].said
    kept = json.loads((folder / "tight" / "config.json").read_text())
    assert kept["model"]["checkpoint_activations"]
    assert kept["mesh"]["pp"] == 2
    assert [line["step"] for line in lines(folder / "tight", "train")] == [1, 2]


WIDE = {"num_layers": 4, "seq_len": 256, "moe": {"num_experts": 4, "top_k": 2, "hidden": 64}}
"""A model of which activations are most of the memory."""


@pytest.mark.parametrize(("spare_mib", "recomputes"), [(5.5, True), (200, False)])
def test_a_search_recomputes_blocks_where_that_lets_a_faster_layout_fit(
    spare_mib: float, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(auto_plan, "ranks_of_a_node", lambda _: 1)
    place = cluster(tmp_path, memory_gib=1 + spare_mib / 1024, gbps=1)
    config = tiny(tmp_path, batch_size=4, model=WIDE, mesh={"ranks_per_node": 1})
    searching = replace(config.planner, plan="search", cluster=place)
    said: list[str] = []
    found = with_planned(replace(config, planner=searching), said.append)
    assert found.model.checkpoint_activations == recomputes
    assert found.mesh.pp == found.mesh.ep == found.mesh.etp == 1
    words = "; activations are recomputed: the best step that fits the memory without takes 1.59 "
    assert (words in said[0]) == recomputes

    # the same choice in a file
    model = tmp_path / "run.json"
    write_config(config, model)
    path = tmp_path / "plan.toml"
    words = f"plan --model {model} --cluster {place} --write {path}"
    assert main(words.split()) == 0
    planned = with_planned(replace(config, planner=replace(config.planner, plan=str(path))))
    assert (planned.model, planned.mesh) == (found.model, found.mesh)


@pytest.mark.random
def test_a_run_that_knows_nothing_times_plans_and_is_the_run_that_does_not(more) -> None:
    folder, outcomes = more
    assert [outcome.refusal for outcome in outcomes["timed"]] == [""] * 2
    made = decisions(folder / "timed")
    assert len({plan for _, _, _, plan in made}) >= 4, "several plans ran"
    assert {why for _, why, _, _ in made} == {"start", "trial"}
    assert made[0][3] == "s2, linear", "the configured plan is the first"
    assert_same_run(folder / "plain", folder / "timed")
    assert (
        "planner: plans are found and timed during the first 80 steps" in outcomes["timed"][0].said
    )
    assert kept_table(folder / "timed", -1)["counts"][0] == 14, "from the third step on"


def test_metrics_tell_what_runs_and_how_much_was_tried(world) -> None:
    last = lines(world[0] / "switched", "train")[-1]["plan"]
    assert last["running"] in {plan for _, _, _, plan in decisions(world[0] / "switched")}
    assert last["switches"] == len(decisions(world[0] / "switched")) - 1
    assert 0 < last["explored_share"] <= 1
    assert last["load"] >= 4 * 16 * 2 / 4, "the busiest expert has at least an even share"
    assert last["estimated_seconds"] > 0
    assert "plan" not in lines(world[0] / "plain", "train")[-1]


def test_the_first_rank_names_the_candidates(world) -> None:
    said, other = (outcome.said for outcome in world[1]["switched"])
    assert "planner: 5 plans, predicted steps: s2, linear (" in said
    assert other == ""


def test_a_run_taken_up_again_knows_what_it_knew(world) -> None:
    folder, outcomes = world
    assert [outcome.refusal for name in ("part 1", "part 2") for outcome in outcomes[name]] == [
        ""
    ] * 4
    saved = kept_table(folder / "parts", -1)
    assert saved["counts"][0] == 16
    measured = [
        seconds
        for entries in saved["measured"].values()
        for of_plan in entries
        for seconds in of_plan
    ]
    again = [why for step, why, _, _ in decisions(folder / "parts") if step >= 8]
    # The race was cut short, so it begins anew. The step after a change of plan and the last one
    # before saving are left out.
    assert len(measured) == 16 - 8 - len(again) - 1
    assert [step for step, why, _, _ in decisions(folder / "parts") if why == "start"] == [0, 8]
    assert_same_run(folder / "plain", folder / "parts", kinds=("train",))


@pytest.mark.random
def test_a_table_with_other_buckets_starts_anew_with_a_line(more) -> None:
    first, other = more[1]["other"]
    assert (first.refusal, other.refusal) == ("", "")
    assert (
        "plan auto: the checkpoint's plan table is unusable (has version 2 and buckets of 16.0 rows"
        in first.said
    )
    assert "plans are timed anew" in first.said


@pytest.mark.random
def test_no_codec_runs_that_the_user_did_not_name(more) -> None:
    folder, outcomes = more
    assert outcomes["lossy"][0].refusal == ""
    saved = kept_table(folder / "lossy", -1)
    assert {plan["codec"] for plan in saved["plans"]} <= {"int8", "none"}
    assert {plan["backward_codec"] for plan in saved["plans"]} == {"none"}
    table = PlanTable([Plan(**plan) for plan in saved["plans"]])
    assert all(table.plans[number].is_lossless for number in table.allowed)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "no nodes of two",
            "has nodes of 1 devices, this run 2 ranks on a node: choose a cluster of such nodes",
        ),
        ("capacity", r"clashes with a capacity per rank \(model.moe.capacity=padded\)"),
        ("dense", "has no MoE layers to plan: leave it off"),
        ("unknown", "cluster '25gb' is unknown: did you mean 25gbe"),
    ],
)
def test_what_is_refused_is_refused_on_both_ranks(world, name: str, words: str) -> None:
    texts = [outcome.refusal for outcome in world[1][name]]
    assert texts[0] == texts[1]
    assert re.match(f"InputError: .*{words}", texts[0]), texts[0]
    assert "\n" not in texts[0]
    assert not (world[0] / "refused").exists(), "nothing stays behind"


PLANNED = """version = 1
[mesh]
tp = 2
ep = 4
etp = 1
innermost = "etp"
[plan]
schedule = "s2"
chunks = 2
[found]
ranks = 8
"""


def test_a_plan_file_gives_mesh_and_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLANNED)
    config = tiny(tmp_path, planner={"plan": str(path)})
    found = with_planned(config)
    assert (found.mesh.tp, found.mesh.ep, found.mesh.etp) == (2, 4, 1)
    assert found.layer_plan == Plan(schedule="s2", chunks=2)
    assert found.planner.plan == "", "the run folder holds what was found, not where"
    assert with_planned(found) == found
    assert with_planned(replace(config, mesh=replace(config.mesh, ep=4))) == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mesh": {"ep": 2}},
            "mesh.ep=2 and .*plan.toml with 4 contradict each other: leave one out",
        ),
        (
            {"plan": {"chunks": 4}},
            "plan or balance and planner.plan=.*plan.toml contradict each other: leave one out",
        ),
    ],
)
def test_a_plan_file_and_flags_must_not_contradict(
    changes: dict, words: str, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(PLANNED)
    with pytest.raises(InputError, match=words):
        with_planned(tiny(tmp_path, planner={"plan": str(tmp_path / "plan.toml")}, **changes))


def test_a_plan_file_with_another_mesh_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("version = 1\n[mesh]\ndp = 2\n[plan]\n")
    with pytest.raises(InputError, match=r"\[mesh\] must be a table of tp, ep, etp, innermost"):
        with_planned(tiny(tmp_path, planner={"plan": str(tmp_path / "plan.toml")}))
