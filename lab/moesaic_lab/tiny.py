"""Do the tiny models end below their dense twins? gpt-tiny, bert-tiny, seq2seq-tiny and swin-tiny,
five seeds each.

A twin has the same active parameters (for Swin, one expert's), data, steps and learning rate. All
models are judged by their loss on held-out data. A model beats its twin if the 95 % interval of its
mean gain over the seeds is above 0. For the digits, the accuracy is reported too.

    moesaic bench tiny --json benchmarks/results/tiny.json
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from scipy.stats import t as student

from moesaic.configfile import override
from moesaic.train.config import SaveConfig
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, summary_of
from moesaic_lab.claims import Claim, NotMeasuredError, claimed, figures
from moesaic_lab.paper_train.command import paper_preset
from moesaic_lab.tables import spread
from moesaic_lab.training import train_quietly
from moesaic_lab.vision.train import VisionOptions
from moesaic_lab.vision.train import train as train_images

MODELS = ("gpt-tiny", "bert-tiny", "seq2seq-tiny", "swin-tiny")
LEAST_ACCURACY = 0.97
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-tiny": {"steps": 1000, "batch_size": 16, "evaluate": {"sequences": 2048}},
    "bert-tiny": {"steps": 3000},
}
"""Settings of the presets whose few steps suffice to try them out, but not to tell their losses
apart."""


@dataclass(frozen=True, kw_only=True)
class TinyOptions(KeptOptions):
    """Runs to compare."""

    models: tuple[str, ...] = MODELS
    """Presets to train."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of initialisation and data order."""
    steps: int | None = None
    """Steps of each run; by default those of the presets; 1,000 for `gpt-tiny`, 3,000 for
    `bert-tiny`."""


def one_run(model: str, ffn: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Train one model and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "swin-tiny":
            given = {} if steps is None else {"steps": steps}
            options = VisionOptions(ffn=ffn, seed=seed, out=folder, **given)  # type: ignore[arg-type]
            results = train_images(options, say=lambda _: None)
            metrics = {"loss": results["val_loss"], "accuracy": results["accuracy"]}
        else:
            changes = {"model": {"ffn": ffn}, "precision": "float32"} | CHANGES.get(model, {})
            config = override(paper_preset(model), changes, source=model)
            config = replace(
                config,
                out=folder,
                existing="replace",
                seed=seed,
                tensorboard=False,
                steps=steps or config.steps,
                # only at the end
                evaluate=replace(config.evaluate, every=10**9),
                save=SaveConfig(every=10**9),
            )
            metrics = {"loss": train_quietly(config).val_nats_per_byte}
    return {"model": model, "ffn": ffn, "seed": seed, **metrics}


def gains(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return by model how much lower its loss is than its twin's, for each seed."""
    losses = {(row["model"], row["ffn"], row["seed"]): row["loss"] for row in rows}
    gains_of_models: dict[str, list[float]] = {}
    for (model, ffn, seed), loss in losses.items():
        if ffn == "moe":
            twin_loss = losses[model, "dense", seed]
            gains_of_models.setdefault(model, []).append(twin_loss - loss)
    return gains_of_models


def least_mean(values: list[float]) -> float:
    """Return the lower end of Student's 95 % interval of the mean of some draws.

    Raises:
        NotMeasuredError: for a single draw.
    """
    if len(values) < 2:
        raise NotMeasuredError("one seed: an interval needs two")
    error = statistics.stdev(values) / math.sqrt(len(values))
    # 2.5 % of the distribution are above this, and 2.5 % below its negative.
    quantile = float(student.ppf(0.975, len(values) - 1))
    return statistics.mean(values) - quantile * error


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: how many sparse models beat their twins, the lower end of each gain, the
    accuracy on the digits."""
    by_model = gains(rows)
    lows = [
        claimed(f"tiny.gain_low.{model}", partial(least_mean, each), 0.0, ">=", "nats")
        for model, each in by_model.items()
    ]
    beaten = float(sum(claim.holds is True for claim in lows))
    listed = [
        Claim(
            name="mission.tiny_beats_dense",
            value=beaten,
            unit="models",
            target=len(MODELS),
            op=">=",
        ),
        *lows,
    ]
    if "swin-tiny" in by_model:
        accuracy = statistics.mean(figures(rows, "accuracy", model="swin-tiny", ffn="moe"))
        listed.append(
            Claim(name="tiny.digits_accuracy", value=accuracy, target=LEAST_ACCURACY, op=">=")
        )
    return listed


def measure(options: TinyOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every model and its dense twin with every seed."""
    runs = {
        f"{model}-{options.steps or 'preset'}-{ffn}-{seed}": partial(
            one_run, model, ffn, seed, options.steps
        )
        for model, seed, ffn in itertools.product(options.models, options.seeds, ("moe", "dense"))
    }
    return [row for _, row in each_kept(options.keep, runs, told)]


BENCHMARK = Benchmark(
    name="tiny",
    description="Train tiny models and their dense twins.",
    options=TinyOptions,
    notes=summary_of(__doc__),
    measure=measure,
    claims=claims,
    columns=lambda rows: Shown(title="validation loss, nats").of(
        spread(rows, "loss", "model", "ffn")
    ),
)
