"""Whole steps, their memory, LAER's layers, and what this laboratory measured and reproduced, beside predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.configfile import override
from moesaic.cost.memory import GIB
from moesaic.plan.hub import read_shape
from moesaic.plan.model import DataShape, Job
from moesaic.plan.others import OthersLayout, predict
from moesaic.plan.search import Found
from moesaic_lab.ledger.parts import cluster_of
from moesaic_lab.ledger.records import Entry, read_published

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def predicted_step(row: dict[str, Any], models: dict[str, Any]) -> tuple[Found, float]:
    """Return a published step as predicted, and its tokens per second and device."""
    shape = read_shape(models[row["model"]] | row.get("routing", {}), row["model"], seq_len=row["seq_len"])
    cluster = (
        cluster_of(row["machine"]).of_devices(row["gpus"])
        if row["gpus"] <= 32
        else cluster_of(row["machine"], nodes=row["gpus"] // 8)
    )
    if "inside" in row:
        cluster = cluster.with_links("inside", row["inside"])
    layout = override(OthersLayout(), row["layout"], source=row["what"])
    job = Job(batch_size=row["gpus"], precision="bfloat16", model=shape, data=DataShape(vocab_size=shape.vocab))
    found = predict(job, cluster, layout)
    return found, layout.sequences(row["gpus"]) * row["seq_len"] / found.seconds / row["gpus"]


def steps() -> Iterator[Entry]:
    """Yield published steps, by their seconds, and their memory where it is published."""
    published = read_published()
    for row in published["step"]:
        found, speed = predicted_step(row, published["model"])
        sequences = row["layout"].get("global_batch", row["gpus"])
        tokens = sequences * row["seq_len"] / row["gpus"]
        assumed = f" (assumed: {row['assumed']})" if "assumed" in row else ""
        yield Entry(
            kind="steps", what=f"{row['what']}{assumed}", machine=row["machine"], measured=tokens / row["tokens_per_second"],
            predicted=tokens / speed, unit="s", source=row["source"], why=row.get("why", ""),
        )  # fmt: skip
        if "memory_gib" in row:
            yield Entry(
                kind="memory", what=row["what"], machine=row["machine"], measured=row["memory_gib"],
                predicted=found.memory.total / GIB, unit="GiB", source=row["source"],
            )  # fmt: skip


def memory() -> Iterator[Entry]:
    """Yield published memory of runs whose times are not counted."""
    published = read_published()
    for row in published["memory"]:
        found, _ = predicted_step(row, published["model"])
        assumed = f" (assumed: {row['assumed']})" if "assumed" in row else ""
        yield Entry(
            kind="memory", what=f"{row['what']}{assumed}", machine=row["machine"], measured=row["memory_gib"],
            predicted=found.memory.total / GIB, unit="GiB", source=row["source"],
        )  # fmt: skip


def papers() -> Iterator[Entry]:
    """Yield the figures of the five reproductions, as they were reproduced and committed; points are left out."""
    for row in json.loads((RESULTS / "reproduce.json").read_text(encoding="utf-8"))["rows"]:
        if row["ratio"] is not None:
            yield Entry(
                kind="papers", what=row["cell"], machine=row["paper"], measured=1.0, predicted=row["ratio"], unit="ratio",
                source="papers", fitted=row["role"] == "fit",
            )  # fmt: skip


def beds() -> Iterator[Entry]:
    """Yield the layers on emulated clusters, as they were measured, predicted by their profile, and committed."""
    for row in json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))["rows"]:
        if "predicted_seconds" in row:
            yield Entry(
                kind="beds", what=f"{row['case']}, {row['plan']}", machine=f"bed {row['bed']}", unit="s", source="beds",
                measured=row["measured_seconds"], predicted=row["predicted_seconds"],
            )  # fmt: skip
