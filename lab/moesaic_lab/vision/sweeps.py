"""Tutel's ablations of a vision model: its tables 1, 12 and 13 and figure 22, on digits or on your
own pictures.

Table 1: weights of the load-balance loss. Table 12: capacities in inference and experts per token,
for models trained at capacity 1.0, with a dense twin. Table 13: the linear and the cosine router.
Figure 22: Table 12 with copies admitted by score instead of position (batch-prioritised routing).
Figures are accuracies on held-out images, averaged over seeds; 359 digits show differences of 0.3 %
or more.

    moesaic bench vision_sweeps --json benchmarks/results/vision_sweeps.json

With the paper's sizes: --preset swinv2-moe-b --images photos --steps 300000 --batch-size 1024.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, notes_of
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.vision.train import VisionOptions, train

Order = Literal["position", "score"]
ORDERS: tuple[Order, ...] = get_args(Order)
BALANCE = {0.001: 37.32, 0.01: 37.78, 0.1: 37.16, 1.0: 34.71}
"""Tutel's Table 1, SwinV2-S on ImageNet-22K: accuracy in per cent, by weight of the balance
loss."""
CAPACITIES = {
    1: {1.25: 38.6, 1.0: 38.5, 0.625: 38.2, 0.5: 38.0},
    2: {1.25: 38.7, 1.0: 38.6, 0.625: 38.4, 0.5: 38.3},
}
"""Tutel's Table 12, SwinV2-MoE-B: accuracy in per cent, by experts per token and capacity in
inference."""
ROUTERS_COMPARED = ("switch", "cosine")
"""Tutel's linear and cosine router. Its Table 13 finds them equally accurate with 32 experts."""
DENSE = 37.2
"""Accuracy in per cent of the dense model in Tutel's Table 12."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(KeptOptions):
    """Model, data and length of the runs."""

    preset: str = "swin-tiny"
    """Model, a preset of `moesaic vision`."""
    images: str = ""
    """Folder with a subfolder of pictures per class; by default scikit-learn's digits."""
    steps: int = 300
    """Optimizer steps of each run."""
    batch_size: int = 64
    """Images per step."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialisation and data order."""


def one_run(
    options: SweepOptions, seed: int, capacities: tuple[float, ...] = (), **more: Any
) -> list[dict[str, Any]]:
    """Train once; return a row for each capacity in inference.

    Args:
        options: sizes and data.
        seed: seed of initialisation and data order.
        capacities: capacity factors in inference; () for one row with that of training.
        more: further fields of `VisionOptions`.
    """
    common = {
        "preset": options.preset,
        "images": options.images,
        "batch_size": options.batch_size,
        "seed": seed,
        **more,
    }
    with tempfile.TemporaryDirectory() as out:
        training = VisionOptions(steps=options.steps, out=out, **common)
        trained = train(training, say=lambda _: None)
        if not capacities:
            return [{"seed": seed, "accuracy": trained["accuracy"]}]
        weights = str(Path(out) / "model.safetensors")
        rows = []
        for factor in capacities:
            inference = VisionOptions(
                steps=0, out=out, init=weights, eval_capacity_factor=factor, **common
            )
            results = train(inference, say=lambda _: None)
            rows.append({"seed": seed, "capacity": factor, "accuracy": results["accuracy"]})
        return rows


def runs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield for each run its name, the keys that its rows share, and its arguments of `one_run`.
    Every seed repeats the run."""
    for weight, accuracy in BALANCE.items():
        yield (
            f"balance-{weight:g}",
            {"table": "1", "weight": weight, "published": accuracy},
            {"balance_loss": weight},
        )
    for top_k, published in CAPACITIES.items():
        for order in ORDERS:
            about = {
                "table": "12" if order == "position" else "figure 22",
                "top_k": top_k,
                "admit_by": order,
            }
            arguments: dict[str, Any] = {
                "top_k": top_k,
                "admit_by": order,
                "capacities": tuple(published),
            }
            yield f"capacity-{top_k}-{order}", about, arguments
    for router in ROUTERS_COMPARED:
        yield f"router-{router}", {"table": "13", "router": router}, {"router": router}
    yield "dense", {"table": "12", "top_k": 0, "published": DENSE}, {"ffn": "dense"}


def measure(options: SweepOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train every run with every seed; return the means over the seeds."""
    shared = {}
    trainings = {}
    for seed in options.seeds:
        for name, keys, arguments in runs():
            shared[f"{name}-{seed}"] = keys
            trainings[f"{name}-{seed}"] = partial(one_run, options, seed, **arguments)
    rows = []
    for name, of_run in each_kept(options.keep, trainings, told):
        rows += [{**shared[name], **row} for row in of_run]
    groups = dict.fromkeys(map(_group_of, rows))
    return [_mean(rows, group) for group in groups]


def _group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the runs of one group have in common: all but the seed."""
    names = ("table", "weight", "router", "top_k", "admit_by", "capacity")
    return tuple(row.get(name) for name in names)


def _mean(rows: list[dict[str, Any]], key: tuple[Any, ...]) -> dict[str, Any]:
    """Return the row of one group of runs: mean, least and most over the seeds."""
    chosen = [row for row in rows if _group_of(row) == key]
    accuracies = [row["accuracy"] for row in chosen]
    shared = dict(chosen[0])
    del shared["seed"]
    del shared["accuracy"]
    if shared.get("top_k") and shared["table"] == "12":
        shared["published"] = CAPACITIES[shared["top_k"]][shared["capacity"]]
    return {
        **shared,
        "accuracy": statistics.mean(accuracies),
        "least": min(accuracies),
        "most": max(accuracies),
        "seeds": len(accuracies),
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per finding of the paper: its sign and half of its size, or a gap within what
    seeds differ by."""
    published = CAPACITIES[1]
    # half of a published gain, which is in per cent, is claimed
    heavy_costs = (BALANCE[0.01] - BALANCE[1.0]) / 200
    moe_gains = (published[1.0] - DENSE) / 200
    least = min(published)
    most = max(published)
    of_switch = [row for row in rows if row.get("router") == "switch"]
    seeds_differ = max((row["most"] - row["least"] for row in of_switch), default=0.0)

    def at(**row: object) -> float:
        """Return the accuracy in the row with these values."""
        return max(figures(rows, "accuracy", **row))

    def of(capacity: float, admit_by: Order = "position") -> float:  # of one expert per token
        return at(top_k=1, capacity=capacity, admit_by=admit_by)

    return [
        claimed("vision.moe_over_dense", lambda: of(1.0) - at(top_k=0), moe_gains, ">="),
        claimed(
            "vision.score_gains_at_least_capacity",
            lambda: of(least, "score") - of(least),
            seeds_differ,
            ">=",
        ),
        claimed(
            "vision.least_capacity_costs",
            lambda: of(most) - of(least),
            (published[most] - published[least]) / 100,
        ),
        claimed(
            "vision.heavy_weight_costs", lambda: at(weight=0.01) - at(weight=1.0), heavy_costs, ">="
        ),
        claimed(
            "vision.router_gap",
            lambda: abs(at(router="cosine") - at(router="switch")),
            seeds_differ,
        ),
    ]


SHARES = ("accuracy", "least", "most", "published")
BY_CAPACITY = ("top_k", "capacity", *SHARES)
SWEEPS = {
    "1": ("Table 1: weight of the balance loss", ("weight", *SHARES)),
    "12": ("Table 12: capacity in inference and k (0: dense)", BY_CAPACITY),
    "13": ("Table 13: linear and cosine router", ("router", *SHARES[:-1])),
    "figure 22": ("figure 22: admitted by score", BY_CAPACITY[:-1]),
}
"""Title and columns of each of Tutel's sweeps."""

BENCHMARK = Benchmark(
    name="vision_sweeps",
    description="Sweep balance loss, inference capacity, k and admission of a vision model.",
    options=SweepOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    packages=("torch", "numpy", "scikit-learn"),
    columns=[
        Shown(title=title, where={"table": (key,)}, columns=keys)
        for key, (title, keys) in SWEEPS.items()
    ],
)
