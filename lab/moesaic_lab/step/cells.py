"""The cells of `moesaic bench step`, and the splits of the ranks that run on each."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from moesaic.comm.mesh import Sharding
from moesaic.program.plan import StaticPlan
from moesaic.shapes import ModelShape
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.presets import demo
from moesaic_lab.beds import BedConfig, Place, read_cells
from moesaic_lab.training import short_run

CONFIG = Path(__file__).parents[1] / "configs" / "step.toml"
EVALUATED = 8
"""Sequences of the evaluation that ends a run; no step waits for it."""
STAGES = "1F1B over layers"
TOKENS = "expert parallelism as in torchtitan"
WEIGHTS = "FSDP2 as in torch's example"
SEARCHED = "chosen"
AGAIN = "again"


@dataclass(frozen=True, kw_only=True)
class StepCell(Place):
    """A bed."""

    name: str = "cell"
    """The name in tables and claims."""
    compute: Literal["virtual", "real"] = "virtual"
    """virtual: attention and experts only take their time, and routing is even."""
    top_k: int = 2
    """Experts of a token."""
    profiles: int = 1
    """How often the bed is profiled; each profile chooses a split."""
    stands_for: str = ""
    """The machines whose proportions the bed has; empty if it stands for itself."""
    best_at_most: float = 0.0
    """The target of the chosen split's time over that of the best split by hand; 0 for none."""
    ep_at_most: float = 0.0
    """The target of the chosen split's time over that of experts over all ranks; 0 for none."""

    @property
    def part(self) -> str:
        """The name by which --only chooses the cell."""
        return self.name

    @property
    def title(self) -> str:
        """The cell for readers."""
        if self.stands_for:
            return f"as {self.stands_for}"
        number = self.inter.rstrip("mgbit")
        rate = f"{number} {'Gbit/s' if 'g' in self.inter else 'Mbit/s'}"
        return f"{self.nodes} x {self.ranks_per_node} ranks, {rate}, top {self.top_k}"

    @property
    def how(self) -> str:
        """How the cell is measured, for readers."""
        computed = "virtual compute" if self.compute == "virtual" else "computed on the cores"
        return f"emulated links, {computed}"

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        return (*super().may_be_zero, "profiles", "best_at_most", "ep_at_most")


@dataclass(frozen=True, kw_only=True)
class BedSplit:
    """One way in which the ranks share the model."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    plan: StaticPlan = field(default_factory=StaticPlan)
    in_flight: int = 1
    """Micro-batches in flight."""
    finer: int = 1
    """Micro-batches into which each of the cell's is cut."""
    role: str = ""
    """What the split stands for; empty for a split by hand of no other name."""

    @property
    def key(self) -> str:
        """A name of all that decides how the split runs, and of its role."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def words(self) -> str:
        """The split in words, for tables."""
        mesh = self.mesh
        parts = [f"pp {mesh.pp}"] * (mesh.pp > 1)
        parts += [f"ep {mesh.ep}"] * (mesh.ep > 1 or mesh.pp == 1)
        parts += [f"{mesh.parts_per_stage} parts a stage"] * (mesh.parts_per_stage > 1)
        parts += ["sharded in nodes"] * (mesh.shard == "node")
        parts += ["sharded over all"] * (mesh.shard == "all" and mesh.pp == 1)
        parts += ["nothing held"] * (mesh.hold == "nothing")
        parts += [f"micro-batches cut in {self.finer}"] * (self.finer > 1)
        parts += ["two in flight"] * (self.in_flight > 1)
        plan = self.plan
        parts += [f"{plan.chunks} chunks"] * (plan.chunks > 1)
        parts += [plan.all_to_all] * (plan.all_to_all != "linear")
        return ", ".join(filter(None, parts))

    def flags(self, config: StepConfig) -> str:
        """Return the flags of `moesaic train`."""
        words = []
        for name, own, plain in (
            ("mesh", self.mesh, MeshConfig()),
            ("plan", self.plan, StaticPlan()),
        ):
            words += [
                f"--{name}.{each.name.replace('_', '-')} {getattr(own, each.name)}"
                for each in fields(plain)
                if getattr(own, each.name) != getattr(plain, each.name)
            ]
        words += ["--micro-batches-in-flight 2"] if self.in_flight > 1 else []
        if self.finer > 1:
            words += [
                f"--batch-size {config.batch_size // self.finer}",
                f"--accumulation {config.accumulation * self.finer}",
            ]
        return " ".join(words) or "the default"


@dataclass(frozen=True, kw_only=True)
class StepConfig(BedConfig[StepCell]):
    """The whole benchmark."""

    steps: int = 3
    """Timed steps of each run, after a first one."""
    accumulation: int = 8
    batch_size: int = 8
    gflops: float = 30.0
    """Speed of a rank's virtual accelerator."""
    minutes: float = 12.0
    """Most minutes of the runs of a cell; splits for which none are left are named."""

    def model(self, cell: StepCell) -> ModelShape:
        """Return the model of a cell."""
        shape = demo().model
        return replace(shape, moe=replace(shape.moe, top_k=cell.top_k))

    def run_of(self, cell: StepCell, split: BedSplit, out: str = "") -> TrainConfig:
        """Return the training run of a split."""
        config = short_run(
            demo(),
            self.steps + 1,
            batch_size=self.batch_size // split.finer,
            accumulation=self.accumulation * split.finer,
            micro_batches_in_flight=split.in_flight,
            model=self.model(cell),
            seed=self.seed,
            out=out,
            existing="replace",
            mesh=split.mesh,
            plan=split.plan,
        )
        return replace(config, evaluate=replace(config.evaluate, sequences=EVALUATED))

    def digest(self, cell: StepCell) -> str:
        """Return a name of all that decides what a run in a cell measures."""
        where = {name: getattr(cell, name) for name in ("inter", "intra", "top_k", "compute")}
        key = [cell.shape, where, self.steps, self.accumulation, self.batch_size, self.gflops]
        return hashlib.sha256(json.dumps([*key, self.seed]).encode()).hexdigest()[:8]


def read_config(path: Path = CONFIG) -> StepConfig:
    """Read beds from a TOML or JSON file, `[[cell]]` each."""
    return read_cells(path, StepConfig(), {"cell": StepCell()})


def splits_of(config: StepConfig, cell: StepCell) -> tuple[BedSplit, ...]:
    """Return the splits by hand of a cell in the order in which they run: what others do, then
    stages, experts inside nodes and over them, shards over all ranks, and two micro-batches in
    flight."""
    world = cell.world
    stages = max(pp for pp in _divisors(world) if pp <= config.model(cell).num_layers)
    first = [
        BedSplit(mesh=_mesh(cell, stages, 1, 1, "all"), role=STAGES),
        BedSplit(mesh=MeshConfig(ep=world, shard="all", hold="nothing"), role=TOKENS),
    ]
    others = sorted(
        _by_hand(config, cell),
        key=lambda split: (split.in_flight, split.mesh.shard == "all" and split.mesh.pp == 1),
    )
    last = [BedSplit(mesh=MeshConfig(shard="all", hold="nothing"), role=WEIGHTS)]
    if cell.nodes > 1 and cell.ranks_per_node > 1:
        multicast = StaticPlan(all_to_all="multicast", chunks=2)
        last.append(BedSplit(mesh=_mesh(cell, 1, world, 1, "node"), plan=multicast))
    known = {(split.mesh, split.finer) for split in first}
    others = [split for split in others if (split.mesh, split.finer) not in known]
    return (*first, *others, *last)


def _by_hand(config: StepConfig, cell: StepCell) -> Iterator[BedSplit]:
    """Yield every split that fits, over stages, their parts, experts, shards, the size of
    micro-batches, and how many are in flight."""
    layers = config.model(cell).num_layers
    for pp in reversed(_divisors(cell.world)):
        ranks = cell.world // pp
        shards: tuple[Sharding, ...] = ("node", "all") if ranks > cell.ranks_per_node else ("all",)
        for ep, parts, shard in itertools.product(_divisors(ranks), (1, 2), shards):
            if pp * parts > layers or (pp == 1 and parts > 1):
                continue
            mesh = _mesh(cell, pp, ep, parts, shard)
            yield BedSplit(mesh=mesh)
            if pp == 1 and ep > 1:
                yield BedSplit(mesh=mesh, in_flight=2)
            if pp > 1 and parts == 1:  # a rank then has as many sequences as without stages
                yield BedSplit(mesh=mesh, finer=pp)


def _mesh(cell: StepCell, pp: int, ep: int, parts: int, shard: Sharding) -> MeshConfig:
    """Return a mesh whose ranks hold what one micro-batch after another needs."""
    mesh = MeshConfig(pp=pp, ep=ep, parts_per_stage=parts)
    return mesh if pp == cell.world else replace(mesh, shard=shard, hold="parameters")


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [each for each in range(1, number + 1) if number % each == 0]
