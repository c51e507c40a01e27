"""The cells of `moesaic bench step`, and the splits of the ranks that run on each.

pp is the number of stages of layers, ep that of ranks over which a layer's experts are spread,
parts that of parts of a stage (interleaved schedules). "shard" says over which ranks weights are
sharded, "hold" what a rank holds from one micro-batch to the next.
"""

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
    """The target of the chosen split's time over that of plain experts over all ranks; 0 for
    none."""
    weights_at_most: float = 0.0
    """The target of the times of ep 1 and of ep 2 over that of plain experts over all ranks; 0 for
    none."""

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
        computed = "waiting in place of computing" if self.compute == "virtual" else "computing"
        return f"emulated links, {computed}"

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        targets = ("best_at_most", "ep_at_most", "weights_at_most")
        return (*super().may_be_zero, "profiles", *targets)


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
        plan = self.plan
        all_words = (
            (mesh.pp > 1, f"pp {mesh.pp}"),
            (mesh.ep > 1 or mesh.pp == 1, f"ep {mesh.ep}"),
            (mesh.parts_per_stage > 1, f"{mesh.parts_per_stage} parts a stage"),
            (mesh.shard == "node", "sharded in nodes"),
            (mesh.shard == "all" and mesh.pp == 1, "sharded over all"),
            (mesh.hold == "nothing", "nothing held"),
            (self.finer > 1, f"micro-batches cut in {self.finer}"),
            (self.in_flight > 1, "two in flight"),
            (plan.chunks > 1, f"{plan.chunks} chunks"),
            (plan.all_to_all != "linear", plan.all_to_all),
        )
        return ", ".join(words for is_said, words in all_words if is_said)

    def flags(self, config: StepConfig) -> str:
        """Return the flags of `moesaic train`."""
        words = _flags_of("mesh", self.mesh, MeshConfig())
        words += _flags_of("plan", self.plan, StaticPlan())
        if self.in_flight > 1:
            words.append("--micro-batches-in-flight 2")
        if self.finer > 1:
            words += [
                f"--batch-size {config.batch_size // self.finer}",
                f"--accumulation {config.accumulation * self.finer}",
            ]
        return " ".join(words) or "the default"


def _flags_of(
    section: str, settings: MeshConfig | StaticPlan, default: MeshConfig | StaticPlan
) -> list[str]:
    """Return the flags of the settings that differ from the default."""
    flags = []
    for each in fields(default):
        value = getattr(settings, each.name)
        if value != getattr(default, each.name):
            flags.append(f"--{section}.{each.name.replace('_', '-')} {value}")
    return flags


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
        of_cell = {name: getattr(cell, name) for name in ("inter", "intra", "top_k", "compute")}
        of_runs = [self.steps, self.accumulation, self.batch_size, self.gflops, self.seed]
        text = json.dumps([cell.shape, of_cell, *of_runs])
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_config(path: Path = CONFIG) -> StepConfig:
    """Read beds from a TOML or JSON file, `[[cell]]` each."""
    return read_cells(path, StepConfig(), {"cell": StepCell()})


def splits_of(config: StepConfig, cell: StepCell) -> tuple[BedSplit, ...]:
    """Return the splits by hand of a cell in the order in which they run: what others do, then
    stages, experts inside nodes and over them, shards over all ranks, and two micro-batches in
    flight."""
    world = cell.world
    most_stages = max(pp for pp in _divisors(world) if pp <= config.model(cell).num_layers)
    plain = BedSplit(mesh=MeshConfig(ep=world, shard="all", hold="nothing"), role=TOKENS)
    multicast = StaticPlan(all_to_all="multicast", chunks=2)
    has_two_levels = cell.nodes > 1 and cell.ranks_per_node > 1
    first = [
        BedSplit(mesh=_mesh(cell, pp=most_stages, ep=1, parts=1, shard="all"), role=STAGES),
        plain,
    ]
    if has_two_levels:
        first.append(replace(plain, plan=multicast, role=""))
    known = {(split.mesh, split.finer) for split in first}
    others = [split for split in _by_hand(config, cell) if (split.mesh, split.finer) not in known]
    others.sort(key=_order)
    last = [BedSplit(mesh=MeshConfig(shard="all", hold="nothing"), role=WEIGHTS)]
    if has_two_levels:
        over_all = _mesh(cell, pp=1, ep=world, parts=1, shard="node")
        last.append(BedSplit(mesh=over_all, plan=multicast))
    return (*first, *others, *last)


def _order(split: BedSplit) -> tuple[int, bool]:
    """Return the key by which splits by hand are sorted: one micro-batch in flight before two, and
    those that shard over all ranks, often slow, after others."""
    is_sharded_over_all = split.mesh.shard == "all" and split.mesh.pp == 1
    return split.in_flight, is_sharded_over_all


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
            mesh = _mesh(cell, pp=pp, ep=ep, parts=parts, shard=shard)
            yield BedSplit(mesh=mesh)
            if pp == 1 and ep > 1:
                yield BedSplit(mesh=mesh, in_flight=2)
            if pp > 1 and parts == 1:  # a rank then has as many sequences as without stages
                yield BedSplit(mesh=mesh, finer=pp)


def _mesh(cell: StepCell, *, pp: int, ep: int, parts: int, shard: Sharding) -> MeshConfig:
    """Return a mesh whose ranks hold what one micro-batch after another needs."""
    mesh = MeshConfig(pp=pp, ep=ep, parts_per_stage=parts)
    if pp == cell.world:  # a stage is one rank: nothing is sharded
        return mesh
    return replace(mesh, shard=shard, hold="parameters")


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [each for each in range(1, number + 1) if number % each == 0]
