"""`moesaic bench splits`: its formulas, rows, claims and page, and virtual attention;
never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.models.gpt import GPT
from moesaic.shapes import BlockConfig
from moesaic_lab import splits
from moesaic_lab.measured import measured
from moesaic_lab.virtual import Accelerator, VirtualAttention
from worlds import on_ranks

ROOT = Path(__file__).parents[2]
CONFIG = splits.read_config()
(CELL,) = CONFIG.cells
BY_NAME = {split.name: split for split in CONFIG.splits}


def rows() -> list[dict[str, Any]]:
    """Return the rows of made-up runs: split number n takes n + 1 seconds and sends the formula's
    bytes."""
    runs = [
        {
            "cell": CELL.name,
            "split": split.name,
            "compute": compute,
            "seconds": [number + 1.0] * CONFIG.steps,
            "bytes": [int(splits.node_bytes_of(CONFIG, CELL, split))] * CONFIG.steps,
            "loss": 4.0 + 1e-6 * number,
            "cpu": "AMD EPYC",
            "date": "2026-11-29",
        }
        for compute in splits.COMPUTES
        for number, split in enumerate(CONFIG.splits)
    ]
    return splits.rows_of(CONFIG, CELL, runs)


def test_formulas_are_those_of_the_page() -> None:
    config = CONFIG.run_of(BY_NAME["ep_1"])
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config.model, splits.VOCAB_SIZE).parameters())
    tokens = CONFIG.accumulation * CONFIG.batch_size * config.model.seq_len
    found = {name: splits.node_bytes_of(CONFIG, CELL, split) for name, split in BY_NAME.items()}
    assert found["ep_1"] == found["ep_2"] == 4 * parameters
    assert found["pp_4"] == found["pp_2_ep_2"] == 4 * tokens * config.model.dim
    copies = 4 * config.model.num_layers * 2 * tokens / 2 * config.model.dim * 4 / 2
    assert copies < found["ep_4"] < 1.03 * copies
    assert 0.7 * copies < found["ep_4_multicast"] < 0.9 * copies


def test_ratios_are_over_the_fastest_reference_of_the_same_compute() -> None:
    assert [row["over_ep"] for row in rows()] == 2 * [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    by_name = {claim.name: claim for claim in splits.claims(rows())}
    assert by_name[f"splits.{CELL.name}.ep_1.virtual"].value == 4.0
    assert by_name[f"splits.{CELL.name}.bytes_off_formula"].value < 1e-6
    differ = by_name[f"splits.{CELL.name}.losses_differ"]
    assert differ.value == pytest.approx(5e-6 / 4)
    assert differ.holds


def test_a_loss_of_its_own_and_bytes_of_its_own_miss_their_claims() -> None:
    found = rows()
    found[3]["node_bytes"] = 2 * found[3]["formula_bytes"]
    found[-1]["loss"] = 4.1
    missed = {claim.name.split(".")[-1] for claim in splits.claims(found) if claim.holds is False}
    assert {"bytes_off_formula", "losses_differ"} <= missed


def test_the_page_shows_the_committed_results() -> None:
    path = ROOT / "benchmarks" / "results" / "splits.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "choose_a_split.md").read_text(encoding="utf-8")
    start, end = splits.MARKS
    text = page.split(start)[1].split(end)[0].strip()
    where = measured({"splits": result})
    assert text == splits.page(result["rows"], where).strip()


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


def one_run(folder: str) -> tuple[list[splits.StepEnd], float]:
    """Train a run of the benchmark on this rank."""
    config = splits.replace(CONFIG, steps=1, accumulation=2, batch_size=2)
    with pytest.MonkeyPatch.context() as patch:  # a rank of no bed
        patch.setattr(splits, "_sent_bytes", lambda: 7)
        return splits.train_on_rank(config.run_of(splits.BedSplit(ep=2), folder), 1e6)


def test_a_rank_tells_the_ends_of_its_steps(tmp_path: Path) -> None:
    for ends, loss in on_ranks(2, one_run, str(tmp_path / "run")):
        assert [end.sent_bytes for end in ends] == [7, 7]
        assert ends[0].at < ends[1].at
        assert 0 < loss < 10
