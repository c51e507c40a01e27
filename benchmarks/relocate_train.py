"""The demo's model trained with samples that move between ranks: what a step takes, and the same losses.

Four ranks in two nodes, 16 of the 64 experts on each, real routing of a model that was trained before on the standard
library, real products on shared cores. Steps (forward, backward, optimizer) are timed on an emulated cluster, all methods in
turn on the same batches and weights, eight sequences of 128 per rank. The curves are of training from the start on four Gloo
processes, eight sequences in all, in which the routing of the run without moves is replayed.

    python benchmarks/relocate_train.py --json benchmarks/results/relocate_train.json
"""

from __future__ import annotations

import datetime
import json
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch.multiprocessing.spawn import spawn

from moesaic.bench.measure import Timing, paired
from moesaic.bench.netmoe_train import Job, curves, step_times
from moesaic.bench.tables import Column, byte_size, claims_table, milliseconds, share, table
from moesaic.cost.alpha_beta import Machine
from moesaic.cost.emulated import UNSHAPED_GBPS
from moesaic.plan.placement import AbstractPlacer, Stay, TwoStage, Weighed
from moesaic.report.claims import Claim, Measurement
from moesaic.testbed import cluster
from moesaic.testing.processes import leave
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.data import Batches, load_corpus
from moesaic.train.loop import train
from moesaic.train.presets import demo
from moesaic.train.state import open_run

INTER, INTER_GBPS = "200mbit", 0.2
METHODS: dict[str, AbstractPlacer | None] = {
    "plain": None,
    "nobody moves": Stay(),
    "two_stage": TwoStage(),
    "weighed": Weighed(Machine(intra_gbps=UNSHAPED_GBPS, inter_gbps=INTER_GBPS)),
}
HOUR = datetime.timedelta(hours=1)
Part = Literal["train", "curves", "time"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    trained: int = 240
    """Steps of one process before steps are timed."""
    steps: int = 40
    """Of the curves that are compared."""
    repeats: int = 8
    """Steps that are timed by each method."""
    sequences: int = 8
    """Of each rank in timed steps."""
    parts: tuple[Part, ...] = ("train", "curves", "time")
    """Which parts; what the folder has already is not run again."""
    keep: str | None = None
    """Folder of what was found, to go on from."""
    json: str | None = None
    """Write the results there; "-" for standard output."""


def main() -> None:
    """Run what is missing, show, write."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() if options.keep is None else nullcontext(options.keep) as folder:
        keep = Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        weights = keep / f"demo-{options.trained}.pt"
        if "train" in options.parts and not weights.exists():
            with console.status("training"):
                pretrain(weights, options.trained)
        for part in ("curves", "time"):
            path = keep / f"{part}.json"
            if part in options.parts and not path.exists():
                with console.status(part):
                    found = compared(options) if part == "curves" else timed(weights, options)
                    path.write_text(json.dumps([{"part": part, **row} for row in found]), encoding="utf-8")
            rows += json.loads(path.read_text(encoding="utf-8")) if part in options.parts else []
    for title, part, columns in TABLES:
        shown = [row for row in rows if row["part"] == part]
        if shown:
            console.print(table(title, shown, columns))
    figures = claims(rows)
    console.print(claims_table(figures))
    if options.json:
        notes = " ".join((__doc__ or "").split("\n\n")[1].split())
        Measurement(rows=rows, claims=figures, notes=notes).write(options.json)


def configuration(steps: int, batch_size: int) -> TrainConfig:
    """Return the demo's configuration with shorter sequences, on four ranks in two nodes."""
    plain = demo()
    return replace(
        plain, steps=steps, batch_size=batch_size, precision="float32", device="cpu", threads=1, tensorboard=False,
        log_every=steps, eval_every=steps, save_every=steps, model=replace(plain.model, seq_len=128),
        mesh=MeshConfig(ep=4, ranks_per_node=2),
    )  # fmt: skip


def pretrain(weights: Path, steps: int) -> None:
    """Train in one process and keep the weights."""
    with tempfile.TemporaryDirectory() as out:
        config = replace(configuration(steps, 8), out=out, mesh=MeshConfig())
        train(config, console=Console(quiet=True))
        torch.save(open_run(replace(config, existing="resume"), lambda _: None).model.state_dict(), weights)


def job(options: Options, steps: int, batch_size: int, weights: Path | None) -> Job:
    """Return what ranks shall do."""
    config = configuration(steps, batch_size)
    corpus = load_corpus(config.data)
    batches = Batches(corpus.train, config.model.seq_len, batch_size, seed=99)
    return Job(
        config=config, vocab=corpus.vocab_size, methods=METHODS, batches=[batches.get(number) for number in range(steps)],
        weights=None if weights is None else str(weights.resolve()),
    )  # fmt: skip


def timed(weights: Path, options: Options) -> list[dict[str, Any]]:
    """Return what steps take on the emulated cluster."""
    asked = job(options, options.repeats + 1, 4 * options.sequences, weights)
    with cluster(nodes=2, ranks_per_node=2, inter=INTER) as bed:
        found = bed.run(step_times, asked)[0]
    rows, plain = [], found["plain"]
    for name, own in found.items():
        ratio, seconds = paired(own.seconds, plain.seconds), Timing.of(own.seconds)
        kept = {key: value for key, value in asdict(own).items() if key != "seconds"}
        rows.append(
            {
                "method": name, "repeats": options.repeats, **kept, "inter_saved": 1 - own.inter_bytes / plain.inter_bytes,
                "step_seconds": seconds.median, "step_seconds_low": seconds.low, "step_seconds_high": seconds.high,
                "time_ratio": ratio.median, "time_ratio_low": ratio.low, "time_ratio_high": ratio.high,
            }
        )  # fmt: skip
    return rows


def compared(options: Options) -> list[dict[str, Any]]:
    """Return how far losses under replayed routing are from those without moves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        spawn(_process, args=(folder, job(options, options.steps, 8, None), path), nprocs=4)
        found = json.loads(path.read_text(encoding="utf-8"))
    plain = found["plain"]
    return [
        {
            "method": name, "steps": options.steps, "first_loss": losses[0], "last_loss": losses[-1],
            "loss_difference": max(abs(a - b) for a, b in zip(losses, plain, strict=True)),
        }
        for name, losses in found.items()
    ]  # fmt: skip


def _process(rank: int, folder: str, asked: Job, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 4), rank=rank, world_size=4, timeout=HOUR)
    found = curves(asked)
    if rank == 0:
        path.write_text(json.dumps(found), encoding="utf-8")
    leave()


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the figures that documentation quotes; the method is NetMoE's."""

    def figure(name: str, part: str, key: str, unit: str, target: float | None) -> Claim:
        found = [row[key] for row in rows if row["part"] == part and row["method"] == "two_stage"]
        reason = "" if found else "not run"
        return Claim(
            name=name, value=max(found, default=None), unit=unit, target=target, op="<=", reason=reason
        )  # fmt: skip

    return [
        figure("relocate_train.time_ratio", "time", "time_ratio", "1", None),
        figure("relocate_train.inter_bytes_saved", "time", "inter_saved", "share", None),
        figure("relocate_train.loss_difference", "curves", "loss_difference", "nats", 1e-4),
    ]


def percent(value: float) -> str:
    """Return a share in hundredths."""
    return f"{100 * value:.1f} %"


METHOD = Column(key="method", title="method", is_text=True)
TABLES = (
    (
        "steps on 2 nodes of 2, 200 Mbit/s", "time",
        (METHOD, Column(key="step_seconds", title="ms", show=milliseconds),
         Column(key="time_ratio", title="over plain", show=share), Column(key="time_ratio_low", title="low", show=share),
         Column(key="time_ratio_high", title="high", show=share),
         Column(key="inter_bytes", title="between nodes", show=byte_size),
         Column(key="inter_saved", title="saved", show=percent), Column(key="decided_saved", title="decided", show=percent),
         Column(key="moved_nodes", title="change node", show=percent), Column(key="moved_ranks", title="rank", show=percent),
         Column(key="predicted_right", title="predicted", show=percent), Column(key="locality", title="locality", show=share)),
    ),
    (
        "the same losses", "curves",
        (METHOD, Column(key="last_loss", title="last loss", show="{:.6f}".format),
         Column(key="loss_difference", title="largest difference", show="{:.1e}".format)),
    ),
)  # fmt: skip


if __name__ == "__main__":
    main()
