"""`moesaic bench convert`: memory of a conversion, trips through formats, and claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from moesaic.weights.layout import BUFFER
from moesaic_lab.convert import BENCHMARK, peak_row, save_model, trip


@pytest.mark.random
def test_memory_stays_below_the_largest_tensor(tmp_path: Path) -> None:
    """The largest tensor has nine times a buffer's bytes: a program that held a tensor whole, and a copy, would be over."""
    row = peak_row(tmp_path, hidden=1024, intermediate=2304)
    assert row["largest_bytes"] > 8 * BUFFER
    assert row["peak_over_largest"] <= 1.2


def test_trips_and_claims(tmp_path: Path) -> None:
    for family in ("glm4_moe", "qwen3_next"):
        save_model(family, tmp_path / family, torch.bfloat16)
    rows = [trip(tmp_path, "glm4_moe", ["megatron", "torchtitan"]), trip(tmp_path, "qwen3_next", ["torchtitan"])]
    assert [row["different_bytes"] for row in rows] == [0, None]
    assert "has no place for" in rows[1]["reason"]
    claims = {claim.name: claim for claim in BENCHMARK.claims(rows)}
    assert claims["convert.roundtrip_worst"].value == 0
    assert claims["convert.peak_over_largest"].value is None
    assert claims["convert.families_without_a_place"].value == 1
    bad = {
        claim.name: claim for claim in BENCHMARK.claims([{**rows[0], "different_bytes": 3}, {"peak_over_largest": 1.3}])
    }
    assert [bad["convert.roundtrip_worst"].holds, bad["convert.peak_over_largest"].holds] == [False, False]
