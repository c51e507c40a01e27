"""Splits of the same ranks over one model: seconds of a training step, and what crosses the slow
link, on an emulated cluster. Takes about 4 minutes; each part is kept, and a later call goes on.

`moesaic train --preset demo` on the ranks of a bed, one split after another in one run: steps after
a first one, from the end of an optimizer step to the end of the next, on the slowest rank. compute
virtual: attention and experts sleep for as long as a core of their own would take, so that waiting
ranks lend nobody their core; routing is even. compute real: the demo itself, whose ranks share the
cores; the losses are of these. Ratios are over the fastest of the splits that spread the experts
over all ranks. Bytes are those that the first node's device sent in a step, headers and
acknowledgements included, and the formula's are those of docs/choose_a_split.md.

    moesaic bench splits --json benchmarks/results/splits.json --page docs/choose_a_split.md
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic.layer import MoE
from moesaic.measure.host import BalancedRouter, visits
from moesaic.models.gpt import GPT, TransformerBlock
from moesaic.program.plan import StaticPlan
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.loop import train
from moesaic.train.metrics import read_metrics
from moesaic.train.presets import demo
from moesaic.train.task import DECODER, make_decoder
from moesaic_lab.beds import BedConfig, Place, read_cells
from moesaic_lab.benchmark import (
    Benchmark,
    KeptOptions,
    PagedOptions,
    Shown,
    Told,
    each_kept,
    notes_of,
    require_cluster,
    words_of,
)
from moesaic_lab.claims import Claim, claimed, describe_machine, figures, today
from moesaic_lab.measure import Timing
from moesaic_lab.measured import measured
from moesaic_lab.tables import markdown_table
from moesaic_lab.training import short_run, steps_of
from moesaic_lab.virtual import Accelerator, VirtualAttention, virtual_experts
from moesaic_testbed.cluster import Cluster, Launcher
from moesaic_testbed.wiring import NODE_DEVICE

CONFIG = Path(__file__).parent / "configs" / "splits.toml"
COMPUTES = ("virtual", "real")
MARKS = ("<!-- tables: moesaic_lab/splits.py -->", "<!-- end of tables -->")
VOCAB_SIZE = 256
ELEMENT = 4
"""Bytes of a number."""
EVALUATED = 8
"""Sequences of the evaluation that ends a run; no step waits for it."""
LOSSES_AGREE = 1e-4
"""Largest relative difference of the last losses of two splits, in float32."""


@dataclass(frozen=True, kw_only=True)
class SplitCell(Place):
    """A bed."""

    name: str = "cell"
    """The name in tables and claims."""

    @property
    def part(self) -> str:
        """The name by which --only chooses the cell."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class BedSplit:
    """One way in which the ranks share the model."""

    name: str = "split"
    """The name in tables and claims."""
    pp: int = 1
    ep: int = 1
    parts_per_stage: int = 1
    all_to_all: str = "linear"
    chunks: int = 1
    reference: bool = False
    """Whether ratios are over this split, if it is the fastest of those that say so."""
    at_most: float = 0.0
    """The target of its ratio; 0 for none."""

    @property
    def flags(self) -> str:
        """The flags of `moesaic train`."""
        flags = {
            "--mesh.pp": (self.pp, 1),
            "--mesh.parts-per-stage": (self.parts_per_stage, 1),
            "--mesh.ep": (self.ep, 1),
            "--plan.all-to-all": (self.all_to_all, "linear"),
            "--plan.chunks": (self.chunks, 1),
        }
        changed = [
            f"{name} {value}" for name, (value, default) in flags.items() if value != default
        ]
        return f"`{' '.join(changed)}`" if changed else "the default"


@dataclass(frozen=True, kw_only=True)
class SplitsConfig(BedConfig[SplitCell]):
    """The whole benchmark."""

    steps: int = 3
    """Timed steps of each run, after a first one."""
    rounds: int = 1
    """Runs of each split, all splits in turn."""
    accumulation: int = 8
    batch_size: int = 8
    gflops: float = 30.0
    """Speed of a rank's virtual accelerator."""
    splits: tuple[BedSplit, ...] = ()

    def run_of(self, split: BedSplit, out: str = "") -> TrainConfig:
        """Return the training run of a split."""
        config = short_run(
            demo(),
            self.steps + 1,
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            seed=self.seed,
            out=out,
            existing="replace",
            mesh=MeshConfig(ep=split.ep, pp=split.pp, parts_per_stage=split.parts_per_stage),
            plan=StaticPlan(all_to_all=split.all_to_all, chunks=split.chunks),
        )
        return replace(config, evaluate=replace(config.evaluate, sequences=EVALUATED))


def read_config(path: Path = CONFIG) -> SplitsConfig:
    """Read beds and splits from a TOML or JSON file: `[[cell]]` and `[[split]]`."""
    return read_cells(
        path, SplitsConfig(), {"cell": SplitCell()}, split=("splits", BedSplit(name="split"))
    )


@dataclass(frozen=True, kw_only=True)
class SplitOptions(KeptOptions, PagedOptions):
    """Options of the benchmark."""

    config: str | None = None
    """Read beds and splits from this TOML file; by default from the one in the repository."""
    only: str | None = None
    """Run only these beds, separated by commas."""
    keep: str | None = "runs/splits"
    """Store the result of each run in this folder, and skip runs that already have a result
    there."""


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """The end of an optimizer step on a rank."""

    at: float
    """Seconds on the clock that all processes share."""
    sent_bytes: int
    """Bytes that the node's device has sent so far."""


def train_on_rank(config: TrainConfig, gflops: float | None) -> tuple[list[StepEnd], float]:
    """Train on this rank; return the ends of its steps, and the last loss on the first rank.

    Args:
        gflops: speed of a virtual accelerator; None to compute.
    """
    ends: list[StepEnd] = []

    def note(*_: object) -> None:
        ends.append(StepEnd(at=time.monotonic(), sent_bytes=_sent_bytes()))

    task = DECODER
    if gflops is not None:
        task = replace(
            task, make_model=partial(virtual_model, Accelerator(flops_per_second=1e9 * gflops))
        )
    watched = register_optimizer_step_post_hook(note)
    try:
        train(config, console=Console(quiet=True), task=task)
    finally:
        watched.remove()
    return ends, steps_of(read_metrics(Path(config.out)))[-1]["loss"]


def virtual_model(accelerator: Accelerator, config: TrainConfig, vocab_size: int) -> GPT:
    """Return a model of the same sizes whose attention and experts only take their time, and whose
    routing is even."""
    model = make_decoder(config, vocab_size)
    sizes = config.model
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        block.attention = VirtualAttention(accelerator, sizes.dim, sizes.num_heads, sizes.block)
        block.ffn = MoE(
            sizes.dim,
            sizes.moe.hidden * 3 // 2,  # two matrices in place of three
            sizes.moe.num_experts,
            sizes.moe.top_k,
            router=BalancedRouter,
            experts=virtual_experts(accelerator),
            losses=(),
        )
    return model


def _sent_bytes() -> int:
    """Return the bytes that this process's node has sent to others."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == NODE_DEVICE:
            return int(counts.split()[8])
    raise RuntimeError(f"no device {NODE_DEVICE}: this is no rank of a bed")


def one_run(
    ranks: Cluster, config: SplitsConfig, cell: SplitCell, split: BedSplit, compute: str
) -> dict[str, Any]:
    """Train under a split, and return seconds and bytes of each step, and the last loss."""
    with tempfile.TemporaryDirectory() as out:
        of_ranks = ranks.run(
            train_on_rank,
            config.run_of(split, f"{out}/run"),
            config.gflops if compute == "virtual" else None,
        )
    ends = [max(end.at for end in of_step) for of_step in zip(*(ends for ends, _ in of_ranks))]
    sent = [end.sent_bytes for end in of_ranks[0][0]]
    return {
        "cell": cell.name,
        "split": split.name,
        "compute": compute,
        "seconds": [later - end for end, later in itertools.pairwise(ends)],
        "bytes": [later - end for end, later in itertools.pairwise(sent)],
        "loss": of_ranks[0][1],
        "cpu": describe_machine()["cpu"],
        "date": today(),
    }


def measure(options: SplitOptions, config: SplitsConfig, told: Told) -> list[dict[str, Any]]:
    """Train under every split on every bed, in turn, and return a row for each split, bed and kind
    of compute."""
    runs: list[dict[str, Any]] = []
    with Launcher() as launcher:
        for cell in config.cells:
            with launcher.open(cell.bed) as ranks:
                jobs = {
                    f"{cell.name}, {compute} compute, {split.name}, round {turn + 1}, "
                    f"{_digest(config, cell, split)}": partial(
                        one_run, ranks, config, cell, split, compute
                    )
                    for compute in COMPUTES
                    for turn in range(config.rounds)
                    for split in config.splits
                }
                runs += [run for _, run in each_kept(options.keep, jobs, told)]
    return [row for cell in config.cells for row in rows_of(config, cell, runs)]


def _digest(config: SplitsConfig, cell: SplitCell, split: BedSplit) -> str:
    """Return a name of all that decides what a run measures."""
    key = [asdict(cell), asdict(split), asdict(replace(config, cells=(), splits=(), rounds=0))]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def rows_of(
    config: SplitsConfig, cell: SplitCell, runs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each split of a bed and kind of compute, from its runs."""
    rows = []
    for compute, split in itertools.product(COMPUTES, config.splits):
        own = [
            run
            for run in runs
            if (run["cell"], run["compute"], run["split"]) == (cell.name, compute, split.name)
        ]
        if not own:
            continue
        timing = Timing.of([seconds for run in own for seconds in run["seconds"]])
        node_bytes = [num for run in own for num in run["bytes"]]
        formula = node_bytes_of(config, cell, split)
        rows.append(
            {
                "cell": cell.name,
                "compute": compute,
                "split": split.name,
                "flags": split.flags,
                "is_reference": split.reference,
                **timing.row(),
                "node_bytes": sorted(node_bytes)[len(node_bytes) // 2],
                "formula_bytes": formula,
                "link_seconds": formula / cell.bed.inter_bytes_per_second(),
                "loss": own[-1]["loss"] if compute == "real" else None,
                "at_most": split.at_most or None,
                "cpu": own[-1]["cpu"],
                "date": own[-1]["date"],
            }
        )
    for row in rows:
        references = [
            other["median_seconds"]
            for other in rows
            if other["is_reference"] and other["compute"] == row["compute"]
        ]
        row["over_ep"] = row["median_seconds"] / min(references) if references else None
    return rows


def node_bytes_of(config: SplitsConfig, cell: SplitCell, split: BedSplit) -> float:
    """Return the bytes that the first node sends in a step by the formulas of
    docs/choose_a_split.md."""
    run = config.run_of(split)
    sizes = run.model
    with torch.device("meta"):
        model = make_decoder(run, VOCAB_SIZE)
    experts = sum(
        parameter.numel()
        for layer in model.modules()
        if isinstance(layer, MoE)
        for parameter in layer.experts.parameters()
    )
    dense = sum(parameter.numel() for parameter in model.parameters()) - experts
    nodes = cell.nodes
    share = (nodes - 1) / nodes
    tokens = config.accumulation * config.batch_size * sizes.seq_len
    if split.pp > 1:  # to the next node; gradients go the other way
        return tokens * sizes.dim * ELEMENT
    if split.ep <= cell.ranks_per_node:
        return 2 * (dense + experts) * ELEMENT * share
    visited = float(sizes.moe.top_k)
    if split.all_to_all == "multicast":  # a chunk's tokens go to each node once
        per_rank = config.batch_size * sizes.seq_len // cell.world
        on_places = visits(
            per_rank, sizes.moe.top_k, sizes.moe.num_experts, config.seed, split.chunks
        )
        visited = dict(on_places)[nodes]
    rows = 4 * sizes.num_layers * visited * share * tokens / nodes
    return rows * sizes.dim * ELEMENT + 2 * dense * ELEMENT * share


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the ratios with a target, how far bytes are from the formulas, and whether losses
    agree; for every bed."""
    found = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        found += [
            Claim(
                name=f"splits.{cell}.{row['split']}.{row['compute']}",
                value=row["over_ep"],
                target=row["at_most"],
            )
            for row in own
            if row["at_most"]
        ]

        def formula(own: list[dict[str, Any]] = own) -> float:
            even = [row for row in own if row["compute"] == "virtual"]
            figures(even, "node_bytes")
            return max(abs(row["node_bytes"] / row["formula_bytes"] - 1) for row in even)

        def loss(own: list[dict[str, Any]] = own) -> float:
            losses = figures(own, "loss")
            return max(losses) / min(losses) - 1

        found += [
            claimed(f"splits.{cell}.bytes_off_formula", formula, 0.1),
            claimed(f"splits.{cell}.losses_differ", loss, LOSSES_AGREE),
        ]
    return found


def page(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Return the tables for docs/choose_a_split.md: for each bed, a line per split; `where` says
    where they were measured."""
    parts = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        header = ["flags of `moesaic train`", "bytes a node sends", "by the formula"]
        header += [word for compute in COMPUTES for word in (f"{compute} compute, s", "ratio")]
        lines = [header]
        for name in dict.fromkeys(row["split"] for row in own):
            by_compute = {row["compute"]: row for row in own if row["split"] == name}
            first = next(iter(by_compute.values()))
            line = [first["flags"]]
            line += [f"{first[key] / 1e6:.1f} MB" for key in ("node_bytes", "formula_bytes")]
            for compute in COMPUTES:
                row = by_compute.get(compute)
                line += (
                    [f"{row['median_seconds']:.2f}", f"{row['over_ep']:.2f}"] if row else ["", ""]
                )
            lines.append(line)
        parts += [f"`{cell}`:", markdown_table(lines)]
    return "\n\n".join([*parts, f"Measured {where}."])


COLUMNS = (
    *("cell", "compute", "split", "median_seconds", "low_seconds", "high_seconds", "over_ep"),
    *("node_bytes", "formula_bytes", "link_seconds", "loss"),
)


def cases(options: SplitOptions) -> SplitsConfig:
    """Return the configuration of the chosen beds."""
    config = read_config(Path(options.config)) if options.config else read_config()
    config = config.narrowed(only=words_of(options.only))
    require_cluster()
    return config


BENCHMARK = Benchmark(
    name="splits",
    description="Time training steps under every split of the ranks of a bed. Takes 4 minutes.",
    options=SplitOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=(Shown(title="Training steps by split", columns=COLUMNS, group_by=("compute",)),),
    page=lambda rows: page(
        rows, measured({"splits": {"rows": rows, "machine": describe_machine(), "date": today()}})
    ),
    page_marks=MARKS,
)
