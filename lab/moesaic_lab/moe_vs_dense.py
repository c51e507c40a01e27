"""Does sparsity pay? The demo's GPT-MoE against a dense GPT with the same active parameters, tokens
and steps.

Both models train with three seeds and three learning rates. Each is judged at its best learning
rate, the one with the lowest mean validation loss over the seeds. The two models train in turn, so
the ratio of their times is valid on a noisy machine.

    moesaic bench moe_vs_dense --json benchmarks/results/moe_vs_dense.json
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.table import Table

from moesaic.train.config import SaveConfig
from moesaic.train.presets import demo, demo_dense
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, summary_of
from moesaic_lab.claims import Claim, figures
from moesaic_lab.tables import spread
from moesaic_lab.training import train_quietly

MODELS = {"moe": demo, "dense": demo_dense}
LOSS = "val_nats_per_byte"


@dataclass(frozen=True, kw_only=True)
class MoeVsDenseOptions(KeptOptions):
    """Runs to compare."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialisation and data order."""
    lrs: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    """Peak learning rates of the sweep."""
    steps: int | None = None
    """Steps of each run; by default those of the presets."""


def one_run(name: str, seed: int, lr: float, steps: int | None) -> dict[str, Any]:
    """Train one model and return its row."""
    preset = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            preset,
            out=folder,
            existing="replace",
            seed=seed,
            steps=steps or preset.steps,
            tensorboard=False,
            # only at the end
            evaluate=replace(preset.evaluate, every=10**9),
            save=SaveConfig(every=10**9),
            optimizer=replace(preset.optimizer, lr=lr),
        )
        result = train_quietly(config)
    if result.was_stopped:
        sys.exit("stopped")
    return {
        "model": name,
        "seed": seed,
        "lr": lr,
        LOSS: result.val_nats_per_byte,
        "seconds": result.seconds,
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: the gain in validation loss, its range over the seeds, and the ratio of
    times."""
    losses = {}
    for name in MODELS:
        rates = [each for each in spread(rows, LOSS, "model", "lr") if each["model"] == name]
        best = min(rates, key=lambda each: each["mean"])
        losses[name] = figures(rows, LOSS, model=name, lr=best["lr"])
    gains = [dense - moe for dense, moe in zip(losses["dense"], losses["moe"], strict=True)]
    of_gains = {"gain_smallest": min(gains), "gain_largest": max(gains)}

    seconds = {(row["model"], row["lr"], row["seed"]): row["seconds"] for row in rows}
    ratios = [
        seconds["moe", lr, seed] / dense_seconds
        for (name, lr, seed), dense_seconds in seconds.items()
        if name == "dense"
    ]
    return [
        Claim(
            name="moe_vs_dense.gain_nats_per_byte",
            value=statistics.mean(gains),
            unit="nats/byte",
            target=0.05,
            op=">=",
        ),
        *(
            Claim(name=f"moe_vs_dense.{name}", value=each, unit="nats/byte", op=">=")
            for name, each in of_gains.items()
        ),
        Claim(name="moe_vs_dense.time_ratio", value=statistics.median(ratios), target=1.5),
    ]


def measure(options: MoeVsDenseOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every model at every learning rate with every seed."""
    runs = {
        f"{name}-{options.steps or 'preset'}-{lr:g}-{seed}": partial(
            one_run, name, seed, lr, options.steps
        )
        for seed, lr, name in itertools.product(options.seeds, options.lrs, MODELS)
    }
    return [row for _, row in each_kept(options.keep, runs, told)]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return a table of the mean and range of the loss, and the median time, per model and learning
    rate."""
    means = spread(rows, LOSS, "model", "lr")
    for each in means:
        seconds = figures(rows, "seconds", model=each["model"], lr=each["lr"])
        each["median seconds"] = statistics.median(seconds)
    return Shown(title="validation loss, nats/byte").of(means)


BENCHMARK = Benchmark(
    name="moe_vs_dense",
    description="Train the demo and a dense model with as many operations per token.",
    options=MoeVsDenseOptions,
    notes=summary_of(__doc__),
    measure=measure,
    claims=claims,
    columns=tables,
)
