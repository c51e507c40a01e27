"""A long training run on four processes that checks memory, file descriptors and threads for leaks.

Plans, replication policies and checkpoints change all the time. After each round of all plans,
every rank samples its own process. Growth compares two medians: that of the last sixth of the
samples, and that of the sixth of them that begins after one third of the run, when every cache is
warm. The rank with the largest growth counts. An interrupted run reports the samples taken until
then and is marked as interrupted.

moesaic soak --json benchmarks/results/soak.json
"""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from moesaic.configfile import override
from moesaic.errors import InputError, TrainingError
from moesaic.layer import MoE
from moesaic.program.plan import Plan
from moesaic.testing.runner import on_ranks
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.presets import demo
from moesaic.train.state import open_run
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim

WORLD = 4
MINUTES = 30.0
MOST_GROWTH = 0.01
PLANS = (
    Plan(),
    Plan(schedule="s2", chunks=2),
    Plan(schedule="s1", chunks=4, all_to_all="pipelined"),
    Plan(codec="int8"),
    Plan(replication="shadow"),
    Plan(replication="spill"),
    Plan(replication="eplb", memory_budget=500_000),
)
"""Plans that each round runs in turn: they differ in schedule, chunks, all-to-all, codec and
replication policy."""
STEPS_EACH = 3
"""Training steps under each plan. A checkpoint is saved after them."""
SMALL: dict[str, Any] = {
    "batch_size": 4,
    "device": "cpu",
    "threads": 1,
    "precision": "float32",
    "tensorboard": False,
    "log_every": 1,
    # more steps than a soak reaches: rounds save, and end when the time is over
    "evaluate": {"every": 10_000_000, "sequences": 4},
    "steps": 10_000_000,
    "save": {"every": 10_000_000},
    "model": {
        "dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "seq_len": 32,
        "moe": {"num_experts": 8, "hidden": 16},
    },
    "mesh": {"ep": 4},
}
"""Settings that shrink the demo model."""
STOP = "stop"
"""Name of a file in the run's folder. Once it exists, the run ends after the current round."""
LOOKED = ("rss", "descriptors", "threads")


@dataclass(frozen=True, kw_only=True)
class SoakOptions(BenchmarkOptions):
    """Options of `moesaic soak`."""

    minutes: float = MINUTES
    """Minutes to train for."""


def measure(options: SoakOptions, cases: object, told: Told) -> list[dict[str, Any]]:
    """Train for `options.minutes` and return a row per rank; Ctrl-C ends the run after its
    round."""
    if not 0 < options.minutes < 10_000:
        raise InputError(f"--minutes {options.minutes}: choose more than 0")
    with tempfile.TemporaryDirectory(prefix="moesaic-soak-") as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        draw = random.Random(0)  # a text of random words
        words = []
        for _ in range(4000):
            letters = draw.choices("abcdefgh", k=draw.randint(1, 6))
            words.append("".join(letters))
        (folder / "text.txt").write_text(" ".join(words), encoding="utf-8")
        future = pool.submit(on_ranks, WORLD, _rank, folder, 60 * options.minutes)
        started = time.monotonic()
        is_interrupted = False
        while not future.done():
            # Ctrl-C does not reach the ranks, which look for the file.
            try:
                told(f"{(time.monotonic() - started) / 60:.1f} of {options.minutes:g} minutes")
                time.sleep(0.5)
            except KeyboardInterrupt:
                is_interrupted = True
                (folder / STOP).touch()
        try:
            samples = future.result()
        except Exception as error:
            minutes = (time.monotonic() - started) / 60
            reason = " ".join(str(error).strip().splitlines()[-1:])
            raise TrainingError(
                f"a rank ended after {minutes:.1f} of {options.minutes:g} minutes: {reason}"
            ) from error
    return [
        _row(rank, found) | {"interrupted": is_interrupted} for rank, found in enumerate(samples)
    ]


def _rank(folder: Path, seconds: float) -> list[dict[str, float]]:
    """Train until the time is over and return one sample of this process per round."""
    # A terminal sends SIGINT to all processes; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    samples: list[dict[str, float]] = []
    with _trainer(folder) as trainer:
        layers = [part for part in trainer.model.modules() if isinstance(part, MoE)]
        started = time.monotonic()
        while True:
            # All ranks stop after the same round: as soon as one of them wants to.
            is_over = _is_over(folder, time.monotonic() - started, seconds)
            if trainer.ranks.largest(torch.tensor(float(is_over))):
                break
            for plan in PLANS:
                for layer in layers:
                    layer.use_plan(plan)
                for _ in range(STEPS_EACH):
                    trainer._step()
                    trainer._interval()
                trainer._save()
            samples.append(_sample(time.monotonic() - started, trainer.state.step))
    return samples


def _is_over(folder: Path, passed: float, seconds: float) -> bool:
    """Return whether the time is over or a stop was asked for."""
    return passed > seconds or (folder / STOP).exists()


@contextmanager
def _trainer(folder: Path) -> Iterator[Trainer]:
    """Open the run of the soak, and yield its trainer."""
    plain = replace(demo(), out=str(folder / "run"))
    config: TrainConfig = override(plain, SMALL, source="soak")
    data = replace(config.data, path=(str(folder / "text.txt"),))
    config = replace(config, data=data)
    run = open_run(config, lambda line: None)
    try:
        yield Trainer(run, Console(quiet=True))
    finally:
        run.claim.release()


def _sample(seconds: float, step: int) -> dict[str, float]:
    """Return the memory in MiB, descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "seconds": seconds,
        "step": step,
        "rss": pages * resource.getpagesize() / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
    }


def growth(values: list[float]) -> float:
    """Return the relative growth from the median of the sixth that begins after one third to that
    of the last sixth.

    A median that shrank gives 0.

    Raises:
        InputError: if there are fewer than six values.
    """
    if len(values) < 6:
        raise InputError(f"{len(values)} rounds are too few to tell growth: give more --minutes")
    part = max(len(values) // 6, 1)
    begin = len(values) // 3
    before = median(values[begin : begin + part])
    after = median(values[-part:])
    return max(after / before - 1, 0.0)


def _row(rank: int, samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return the row of a rank."""
    last = samples[-1]
    row: dict[str, Any] = {
        "rank": rank,
        "minutes": last["seconds"] / 60,
        "steps": last["step"],
        "rounds": len(samples),
    }
    for name in LOOKED:
        values = [sample[name] for sample in samples]
        row[f"{name}_third"] = values[len(values) // 3]
        row[f"{name}_end"] = values[-1]
        row[f"{name}_growth"] = growth(values)
    return row


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return claims on the largest growth of each sampled quantity and on the length of the run."""
    grown = []
    for name in LOOKED:
        worst = max(row[f"{name}_growth"] for row in rows)
        grown.append(Claim(name=f"soak.{name}_growth", value=worst, target=MOST_GROWTH))
    minutes = min(row["minutes"] for row in rows)
    length = Claim(name="soak.minutes", value=minutes, unit="min", target=MINUTES, op=">=")
    return [*grown, length]


BENCHMARK = Benchmark(
    name="soak",
    description="Train for a long time while plans, policies and checkpoints change, and check "
    "that memory, file descriptors and threads do not grow.",
    options=SoakOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=[Shown(title="Ranks")],
    is_proof=True,
    is_command=True,
)
