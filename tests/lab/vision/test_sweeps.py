"""Tutel's sweeps of a vision model: what is trained, what a row is, what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic_lab.vision import sweeps
from moesaic_lab.vision.sweeps import (
    BALANCE,
    CAPACITIES,
    DENSE,
    ROUTERS_COMPARED,
    SweepOptions,
    claims,
    measure,
    one_run,
)


def test_capacities_in_inference_are_of_one_trained_model() -> None:
    rows = one_run(
        SweepOptions(steps=2), seed=0, capacities=(1.25, 0.1), top_k=1, admit_by="position"
    )
    assert [row["capacity"] for row in rows] == [1.25, 0.1]
    assert rows == one_run(
        SweepOptions(steps=2), seed=0, capacities=(1.25, 0.1), top_k=1, admit_by="position"
    )
    assert all(0 < row["accuracy"] < 1 for row in rows)


def test_rows_are_means_over_seeds_beside_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def instead(
        options: SweepOptions, seed: int, capacities: tuple[float, ...] = (), **more: Any
    ) -> list[dict[str, Any]]:
        asked.append({"seed": seed, **more})
        better = 0.2 if more.get("admit_by") == "score" else 0.0
        rows = [
            {"capacity": each, "accuracy": each / 2 + seed / 10 + better} for each in capacities
        ]
        return [{"seed": seed, **row} for row in rows or [{"accuracy": 0.5 + seed / 10}]]

    monkeypatch.setattr(sweeps, "one_run", instead)
    rows = measure(SweepOptions(seeds=(0, 1), keep=str(tmp_path)), None, lambda _: None)
    assert len(asked) == 2 * (len(BALANCE) + 2 * len(CAPACITIES) + len(ROUTERS_COMPARED) + 1)
    assert measure(SweepOptions(seeds=(0, 1), keep=str(tmp_path)), None, lambda _: None) == rows
    assert len(asked) == 22  # what is kept is not trained again
    assert [row["router"] for row in rows if row["table"] == "13"] == ["switch", "cosine"]
    first = next(
        row
        for row in rows
        if row["table"] == "12" and row.get("top_k") == 2 and row["capacity"] == 0.5
    )
    assert (first["accuracy"], first["least"], first["most"], first["published"]) == pytest.approx(
        (0.3, 0.25, 0.35, 38.3)
    )
    assert next(row for row in rows if row.get("top_k") == 0)["published"] == DENSE
    found = {
        claim.name.removeprefix("vision."): (claim.value, claim.target, claim.holds)
        for claim in claims(rows)
    }
    assert found == {
        "moe_over_dense": (pytest.approx(0.0), pytest.approx(0.0065), False),
        "score_gains_at_least_capacity": (pytest.approx(0.2), pytest.approx(0.1), True),
        "least_capacity_costs": (pytest.approx(0.375), pytest.approx(0.006), False),
        "heavy_weight_costs": (pytest.approx(0.0), pytest.approx(0.01535), False),
        "router_gap": (pytest.approx(0.0), pytest.approx(0.1), True),
    }
