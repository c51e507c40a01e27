"""`moesaic bench step`: its splits, rows and claims, and virtual attention; never a time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.cli.main import main
from moesaic.planner.simulator import Simulator
from moesaic.shapes import BlockConfig
from moesaic_lab.emulated import emulated
from moesaic_lab.step import benchmark, claims, page, ranks
from moesaic_lab.step.cells import (
    AGAIN,
    SEARCHED,
    STAGES,
    TOKENS,
    WEIGHTS,
    BedSplit,
    StepCell,
    read_config,
    splits_of,
)
from moesaic_lab.step.predict import chosen_split, predicted_seconds
from moesaic_lab.virtual import Accelerator, VirtualAttention
from worlds import on_ranks

CONFIG = read_config()
CELL = CONFIG.cells[0]
NAME = f"step.{CELL.name}"


def run_of(split: BedSplit, seconds: list[float], loss: float | None = 4.0) -> dict[str, Any]:
    """Return a made-up run of a split."""
    return {
        "key": split.key,
        "first_seconds": 9.0,
        "seconds": seconds,
        "bytes": [7] * len(seconds),
        "loss": loss,
        "cpu": "AMD EPYC",
        "date": "2026-11-29",
    }


def rows(loss: float = 4.0) -> list[dict[str, Any]]:
    """Return the rows of made-up runs: split number n by hand takes n + 1 seconds; two profiles
    choose a split of 1.1 seconds, one the best by hand."""
    by_hand = splits_of(CONFIG, CELL)
    slow = replace(by_hand[2], role=SEARCHED)
    fast = replace(by_hand[0], role=SEARCHED)
    runs = [run_of(split, [number + 1.0] * 3) for number, split in enumerate(by_hand)]
    runs += [run_of(slow, [1.0, 1.1, 1.2]), run_of(fast, [1.0] * 3, loss)]
    runs.append(run_of(replace(by_hand[0], role=AGAIN), [1.25] * 3))
    return benchmark.rows_of(CONFIG, CELL, runs, [slow, slow, fast], [])


@pytest.mark.parametrize("cell", CONFIG.cells, ids=lambda cell: cell.name)
def test_every_cell_has_its_splits_and_what_others_do(cell: StepCell) -> None:
    splits = splits_of(CONFIG, cell)
    assert len(splits) >= 12
    assert len({split.key for split in splits}) == len(splits)
    assert {split.role for split in splits} == {"", STAGES, TOKENS, WEIGHTS}
    for split in splits:
        run = CONFIG.run_of(cell, split)  # a configuration that the trainer refuses raises
        assert run.batch_size * run.accumulation == CONFIG.batch_size * CONFIG.accumulation
        assert run.batch_size % (cell.world // split.mesh.pp) == 0
        assert cell.world // split.mesh.pp % split.mesh.ep == 0


def test_every_split_by_hand_is_predicted_but_micro_batches_in_flight() -> None:
    simulator = Simulator(emulated(CELL.bed))
    splits = splits_of(CONFIG, CELL)
    found = {split: predicted_seconds(CONFIG, CELL, split, simulator) for split in splits}
    assert {split for split, seconds in found.items() if seconds is None} == {
        split for split in splits if split.in_flight == 2
    }
    assert all(seconds is None or seconds > 0 for seconds in found.values())


def test_a_searched_configuration_is_read_back_as_the_split_that_it_trains() -> None:
    found = {
        "mesh": {"pp": 2, "ep": 2, "shard": "all", "hold": "gradients"},
        "plan": {"chunks": 2, "all_to_all": "multicast"},
        "micro_batches_in_flight": 1,
        "batch_size": CONFIG.batch_size // 2,
    }
    split = chosen_split(CONFIG, found)
    assert (split.mesh.pp, split.plan.chunks, split.finer) == (2, 2, 2)
    assert split.flags(CONFIG) == (
        "--mesh.ep 2 --mesh.pp 2 --mesh.shard all --mesh.hold gradients "
        "--plan.chunks 2 --plan.all-to-all multicast --batch-size 4 --accumulation 16"
    )


def test_claims_compare_the_chosen_split_with_the_best_by_hand() -> None:
    by_name = {claim.name: claim for claim in claims.claims(rows())}
    best = by_name[f"{NAME}.chosen_over_best"]
    assert (best.value, best.interval, best.holds) == (1.0, (1.0, 1.0), True)
    first_ep = next(row["seconds"][0] for row in rows() if row["ep"] == CELL.world)
    assert by_name[f"{NAME}.chosen_over_ep"].value == pytest.approx(1 / first_ep)
    plain = by_name[f"{NAME}.chosen_over_plain_ep"]
    assert (plain.value, plain.target) == (pytest.approx(1 / first_ep), 0.30)
    nothing_held = [row for row in rows() if "--mesh.hold nothing" in row["flags"]]
    first_plain = next(row["seconds"][0] for row in nothing_held if row["ep"] == CELL.world)
    for ep in (1, 2):
        own = [row for row in rows() if (row["pp"], row["ep"]) == (1, ep)]
        over_plain = by_name[f"{NAME}.ep_{ep}_over_plain_ep"]
        fastest = min(row["median_seconds"] for row in own)
        assert over_plain.value == pytest.approx(fastest / first_plain)
        assert over_plain.holds is False
    assert by_name[f"{NAME}.again"].value == 1.25
    assert by_name[f"{NAME}.losses_differ"].value == 0
    assert by_name["step.pick_regret.median"].value == pytest.approx(0.1)
    assert by_name["step.pick_regret.worst"].value == pytest.approx(0.1)
    hybrid = min(r["median_seconds"] for r in rows() if r["pp"] > 1 and r["ep"] > 1)
    assert by_name[f"{NAME}.hybrid"].value == hybrid


def test_a_loss_of_its_own_misses_its_claim_and_a_cell_without_runs_has_no_value() -> None:
    by_name = {claim.name: claim for claim in claims.claims(rows(loss=4.1))}
    assert by_name[f"{NAME}.losses_differ"].holds is False
    other = CONFIG.cells[1].name
    assert by_name[f"step.{other}.losses_differ"].value is None
    assert by_name[f"step.{other}.chosen_over_best"].reason == "not run"


def test_a_split_that_stopped_counts_with_its_first_step() -> None:
    split = splits_of(CONFIG, CELL)[1]
    (row,) = benchmark.rows_of(CONFIG, CELL, [run_of(split, [], None)], [], [])
    assert (row["state"], row["median_seconds"]) == ("stopped after a step", 9.0)


def test_runs_are_kept_and_a_slow_cell_names_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def one_run(ranks: object, *, split: BedSplit, **_: object) -> dict[str, Any]:
        trained.append(split.key)
        return run_of(split, [1.0] * 3) | {"run_seconds": 90.0}

    monkeypatch.setattr(benchmark, "one_run", one_run)
    cell = replace(CELL, profiles=0)
    anything: Any = object()

    def again(ranks: Any) -> list[dict[str, Any]]:
        return benchmark._CellRun(CONFIG, cell, tmp_path, lambda what: None, ranks).rows()

    found = again(anything)
    left_out = [row for row in found if row["state"] == "no minutes left"]
    assert len(trained) == CONFIG.minutes * 60 / 90 + 2  # FSDP2's example and the first one again
    assert len(left_out) == len(splits_of(CONFIG, cell)) - len(trained) + 1
    assert again(None) == found
    assert len(trained) == CONFIG.minutes * 60 / 90 + 2


@pytest.mark.parametrize(("where", "write"), [(page.README, page.front), (page.PAGE, page.page)])
def test_pages_show_the_committed_results(where: Path, write: Any) -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    start, end = page.MARKS
    shown = where.read_text(encoding="utf-8").split(start)[1].split(end)[0]
    assert shown.strip() == write(result).strip()


def test_advice_names_the_splits_that_were_fastest() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    won = page.fastest_kinds(result)
    assert {*won.values()} == {"stages"}
    assert len(won) == 8
    readme = page.README.read_text(encoding="utf-8")
    assert "In all eight clusters that we emulated, the activations at the border of" in readme
    hybrids = [claim["value"] for claim in result["claims"] if claim["name"].endswith(".hybrid")]
    assert min(hybrids) > 1
    advice = page.PAGE.read_text(encoding="utf-8").split("## When to take which")[1]
    assert "stages alone were fastest" in advice.split("\n## ")[0]


ADVICE = re.findall(
    r"^\| (?:the same with )?`(--.+?)` \| (.+) \| (\w+) \|$",
    page.PAGE.read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", range(3))
def test_splits_that_the_page_says_are_predicted_are(
    row: int, capsys: pytest.CaptureFixture
) -> None:
    flags, told, crosses = ADVICE[row]
    if "--model" not in flags:  # "the same with", but for the accumulation
        flags = f"{ADVICE[row - 1][0].rsplit(' --', 1)[0]} {flags}"
    few = "--schedules s1 --all-to-alls multicast --chunks 1 2 --json"
    assert main(["plan", *flags.split(), *few.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["ranking"][0]
    sizes = {"pp": best["split"]["pp"], "tp": best["mesh"]["tp"], "ep": best["mesh"]["ep"]}
    assert told == ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    machines = 2
    found = {"pp": sizes["pp"], "ep": sizes["ep"]}
    assert page.crossing(found, StepCell(ranks_per_node=answer["ranks"] // machines)) == crosses


def test_every_cell_and_column_of_the_split_page_is_explained() -> None:
    text = page.PAGE.read_text(encoding="utf-8").split(page.MARKS[0])[1].split(page.MARKS[1])[0]
    explained, *tables = text.split(" ranks, seconds of a step:")
    for cell, _ in page.cells_of(json.loads(page.RESULT.read_text(encoding="utf-8"))):
        assert f"| `{cell.name}` |" in explained
        assert any(f"| {cell.name} |" in table for table in tables)
    words = text.split("**What crosses between machines")[1]
    for name in ("By hand", "ep over all ranks", "stages with spread experts", "Again", "Losses"):
        assert f"*{name}" in words


def test_the_picture_is_of_the_committed_results() -> None:
    result = json.loads(page.RESULT.read_text(encoding="utf-8"))
    assert page.PICTURE.read_text(encoding="utf-8") == page.picture(result)


def test_virtual_attention_takes_time_and_passes_its_input() -> None:
    accelerator = Accelerator(flops_per_second=1e3, sleep=lambda _: None)
    attention = VirtualAttention(accelerator, 8, 2, BlockConfig())
    x = torch.randn(2, 4, 8, requires_grad=True)
    y = attention(x)
    flops = 2 * 8 * (sum(p.numel() for p in attention.parameters()) + 8 * 4)
    assert accelerator.charged == pytest.approx(flops / 1e3)
    y.backward(torch.ones_like(y))
    assert accelerator.charged == pytest.approx(3 * flops / 1e3)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in attention.parameters())


def one_run(folder: str, most_seconds: float) -> ranks.Trained:
    """Train a run of the benchmark on this rank."""
    config = replace(CONFIG, steps=1, accumulation=2, batch_size=2)
    split = BedSplit(mesh=replace(BedSplit().mesh, ep=2))
    with pytest.MonkeyPatch.context() as patch:  # a rank of no bed
        patch.setattr(ranks, "_sent_bytes", lambda: 7)
        return ranks.train_on_rank(config.run_of(CELL, split, folder), 1e6, most_seconds)


@pytest.mark.random
def test_a_rank_tells_the_ends_of_its_steps(tmp_path: Path) -> None:
    first, second = on_ranks(2, one_run, str(tmp_path / "run"), 600.0)
    for trained in (first, second):
        assert [end.sent_bytes for end in trained.ends] == [7, 7]
        assert trained.ends[0].at < trained.ends[1].at
    assert first.first_seconds == second.first_seconds
    assert first.loss is not None
    assert 0 < first.loss < 10


@pytest.mark.random
def test_all_ranks_stop_after_a_first_step_that_is_too_slow(tmp_path: Path) -> None:
    for trained in on_ranks(2, one_run, str(tmp_path / "run"), 0.0):
        assert len(trained.ends) == 1
        assert trained.loss is None
        assert trained.first_seconds > 0
