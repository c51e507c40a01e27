"""What a lossy codec costs in validation loss: the demo model on two ranks, its rows encoded on the way, three seeds.

Every run trains the demo's model with experts split over two Gloo processes, so that half of all token copies cross. Same
data, weights and steps per seed; the codec is the only difference. Gradients travel as they are, except in the last row.

    moesaic bench codec_convergence --json benchmarks/results/codec_convergence.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from moesaic.plan.plan import Codec, StaticPlan
from moesaic.testing.processes import leave
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.loop import train
from moesaic.train.presets import demo
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, once, same
from moesaic_lab.claims import Claim

CODECS: tuple[tuple[Codec, Codec], ...] = (
    ("none", "none"),
    ("bf16", "none"),
    ("fp16", "none"),
    ("int8", "none"),
    ("fp8", "none"),
    ("zfp", "none"),
    ("int8", "int8"),
)
"""(forward, backward)."""
WORLD = 2


@dataclass(frozen=True, kw_only=True)
class CodecConvergenceOptions(BenchmarkOptions):
    """What to run."""

    steps: int = 50
    """Optimizer steps of each run; the learning rate's schedule ends with them."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of initialisation and data order."""
    json: str | None = None
    """Write the results there; "-" for standard output."""


def configuration(out: Path, steps: int, seed: int, forward: Codec, backward: Codec) -> TrainConfig:
    """Return the demo's configuration on two ranks."""
    return replace(
        demo(),
        out=str(out),
        steps=steps,
        seed=seed,
        precision="float32",
        log_every=steps,
        eval_every=steps,
        save_every=10 * steps,
        tensorboard=False,
        threads=1,
        device="cpu",
        mesh=MeshConfig(ep=WORLD),
        plan=StaticPlan(codec=forward, backward_codec=backward),
    )


def _process(rank: int, config: TrainConfig, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, WORLD), rank=rank, world_size=WORLD)
    train(config, console=Console(quiet=True))
    leave()


def row(
    forward: str, backward: str, options: CodecConvergenceOptions, losses: dict[tuple[int, str, str], float]
) -> dict[str, Any]:
    """Return a line of the table: the losses, and what the codec adds to the same seed's loss without one."""
    found = [losses[(seed, forward, backward)] for seed in options.seeds]
    added = [loss - losses[(seed, "none", "none")] for seed, loss in zip(options.seeds, found)]
    return {
        "codec": forward,
        "backward_codec": backward,
        "steps": options.steps,
        "mean_val_loss": statistics.mean(found),
        "mean_difference": statistics.mean(added),
        "smallest_difference": min(added),
        "largest_difference": max(added),
    }


def measure(options: CodecConvergenceOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train under every codec and seed."""
    losses: dict[tuple[int, str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, (forward, backward) in itertools.product(options.seeds, CODECS):
            told(f"seed {seed}, {forward}, {backward}")
            out = Path(folder) / f"{seed}-{forward}-{backward}"
            config = configuration(out, options.steps, seed, forward, backward)
            spawn(_process, args=(config, f"{out}.store"), nprocs=WORLD)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            losses[(seed, forward, backward)] = next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)
    return [row(forward, backward, options, losses) for forward, backward in CODECS]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return what each codec adds to the loss."""
    return [
        Claim(name=f"codec_convergence.{r['codec']}_{r['backward_codec']}", value=r["mean_difference"], unit="nats/byte",
              target=None, op="<=")
        for r in rows
    ]  # fmt: skip


TITLE = "validation loss in nats/byte, and the difference to the same seed without a codec"

BENCHMARK = Benchmark(
    name="codec_convergence", description="Train the demo under each codec.", options=CodecConvergenceOptions,
    notes=(__doc__ or "").splitlines()[0], cases=once, measure=measure, rows=same, claims=claims,
    columns=(Shown(title=TITLE),),
)  # fmt: skip
