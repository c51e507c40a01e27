"""Does sparsity pay? The demo's GPT-MoE against a dense GPT with the same active parameters, tokens and steps.

Three seeds; the learning rate swept over three values for each of the two, and each judged at its best one (the lowest
mean validation loss over the seeds). The two models train in turn, so the ratio of their times holds on a noisy machine.

    moesaic bench moe_vs_dense --json benchmarks/results/moe_vs_dense.json
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moesaic.train.loop import train
from moesaic.train.presets import demo, demo_dense
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, once, same
from moesaic_lab.claims import Claim

MODELS = {"moe": demo, "dense": demo_dense}


@dataclass(frozen=True, kw_only=True)
class MoeVsDenseOptions(BenchmarkOptions):
    """What to measure."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialisation and data order."""
    lrs: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    """Peak learning rates of the sweep."""
    steps: int | None = None
    """Steps of each run; None takes the presets'."""


def one_run(name: str, seed: int, lr: float, steps: int | None, folder: Path) -> dict[str, Any]:
    """Train one model; returns its row."""
    preset = MODELS[name]()
    config = replace(
        preset,
        out=str(folder / f"{name}-{seed}-{lr}"),
        seed=seed,
        steps=steps or preset.steps,
        evaluate=(10**9, preset.evaluate[1]),
        save=f"{10**9}",
        trackers=(),
        optimizer=replace(preset.optimizer, lr=lr),
    )
    result = train(config, console=Console(quiet=True))
    if result.was_stopped:
        sys.exit("stopped")
    return {
        "model": name,
        "seed": seed,
        "lr": lr,
        "val_nats_per_byte": result.val_nats_per_byte,
        "seconds": result.seconds,
    }


def best_lr(rows: list[dict[str, Any]], name: str) -> float:
    """Return the learning rate with the lowest mean loss of a model."""
    lrs = sorted({row["lr"] for row in rows})
    return min(lrs, key=lambda lr: statistics.mean(_values(rows, name, lr, "val_nats_per_byte")))


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the gain, its spread over the seeds and the ratio of times."""
    losses = {name: _values(rows, name, best_lr(rows, name), "val_nats_per_byte") for name in MODELS}
    gains = [dense - moe for dense, moe in zip(losses["dense"], losses["moe"])]
    lrs = {row["lr"] for row in rows}
    pairs = [
        moe / dense
        for lr in sorted(lrs)
        for moe, dense in zip(_values(rows, "moe", lr, "seconds"), _values(rows, "dense", lr, "seconds"))
    ]
    return [
        Claim(
            name="moe_vs_dense.gain_nats_per_byte", value=statistics.mean(gains), unit="nats/byte", target=0.05, op=">="
        ),
        Claim(name="moe_vs_dense.gain_smallest", value=min(gains), unit="nats/byte", target=None, op=">="),
        Claim(name="moe_vs_dense.gain_largest", value=max(gains), unit="nats/byte", target=None, op=">="),
        Claim(name="moe_vs_dense.time_ratio", value=statistics.median(pairs), unit="1", target=None, op="<="),
    ]


def _values(rows: list[dict[str, Any]], name: str, lr: float, key: str) -> list[float]:
    return [row[key] for row in rows if row["model"] == name and row["lr"] == lr]


def measure(options: MoeVsDenseOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every model at every learning rate with every seed."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, lr, name in itertools.product(options.seeds, options.lrs, MODELS):
            told(f"{name}, seed {seed}, learning rate {lr:g}")
            rows.append(one_run(name, seed, lr, options.steps, Path(folder)))
    return rows


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return mean and spread per model and learning rate."""
    means = []
    for name, lr in itertools.product(MODELS, sorted({row["lr"] for row in rows})):
        losses, seconds = _values(rows, name, lr, "val_nats_per_byte"), _values(rows, name, lr, "seconds")
        means.append(
            {"model": name, "lr": lr, "mean": statistics.mean(losses), "min": min(losses), "max": max(losses),
             "median seconds": statistics.median(seconds)}
        )  # fmt: skip
    return Shown(title="validation loss, nats/byte").of(means)


BENCHMARK = Benchmark(
    name="moe_vs_dense", description="Train the demo beside a dense model of as many operations per token.",
    options=MoeVsDenseOptions, notes=(__doc__ or "").splitlines()[0], cases=once, measure=measure, rows=same, claims=claims,
    columns=tables,
)  # fmt: skip
