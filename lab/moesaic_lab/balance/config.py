"""What the balance benchmark runs: read from a file, so that loads, shapes, links and rates are fixed before measuring."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.balance.replication.cost import ReplicationCosts
from moesaic.configfile import suggestion
from moesaic.cost.cluster import Machine, Tflops
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.predict import CPU
from moesaic.program.grid import Grid
from moesaic.traces.trace import Trace
from moesaic_lab.balance.loads import Routes, Skew, by_shares, made_up, recorded_shares
from moesaic_lab.balance.loads import recorded as recorded_routes
from moesaic_lab.benchmark import read_parts, require_positive
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "balance.toml"
SHARES, MEMORY, DECISIONS = "shares", "memory", "decisions"
"""The parts of the benchmark that need no bed."""
ELEMENT_BYTES, MATRICES = 4, 2
"""Of rows and weights on the bed (float32), and of an expert."""
NO_ROUTES = Routes(experts=np.zeros((0, 0, 0, 0), dtype=np.int64), history=np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class BalancePlace:
    """A bed, the accelerators on it, and one layer: what all cases of a bed share."""

    name: str = "bed"
    """What `--only` calls it."""
    nodes: int = 2
    """Nodes of the bed."""
    ranks_per_node: int = 2
    """Ranks on each."""
    inter: str = "100mbit"
    """Rate of each node's link, each direction."""
    intra: str = "1gbit"
    """Rate of `lo` inside each node."""
    message_us: float = 500.0
    """What a message costs the ranks that share a core, microseconds: policies that ask for it are told."""
    gflops: float = 0.12
    """Of each rank's virtual accelerator, in units of 1e9 per second."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 12
    """Inner width of an expert, of two matrices."""
    experts_per_rank: int = 4
    top_k: int = 2
    """Copies per token."""
    samples_per_rank: int = 4
    """Sequences, which sample placement may move."""
    sample_tokens: int = 32
    """Tokens of each."""
    repeats: int = 8
    """How often each method is timed, all in turn."""
    slow_rank: float = 1.0
    """Speed of the last rank's products, over that of the others."""
    slow_link: str = ""
    """Rate of the last node's link, each direction; "" for that of the others. Policies are told `inter`; an arbiter that
    learns goes by probes of the links."""
    pairs: int = 48
    """How often ours and the methods that are near it are. Which is the fastest of many is chosen by the first `repeats`; the
    forty after them judge it."""
    learning_calls: int = 120
    """Steps before anything is timed of a method that learns: training runs thousands of them."""

    def __post_init__(self) -> None:
        shared = {each.name: getattr(self, each.name) for each in fields(BalancePlace)}
        require_positive(shared, f"{self.name}: ")
        if self.top_k > self.num_experts:
            raise InputError(f"{self.name}: top_k={self.top_k} of {self.num_experts} experts")
        _ = self.bed

    @property
    def bed(self) -> Bed:
        """The emulated cluster."""
        each = (*(self.inter,) * (self.nodes - 1), self.slow_link) if self.slow_link else self.inter
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=each, intra=self.intra)

    @property
    def grid(self) -> Grid:
        """The mesh: all ranks hold experts of their own and tokens of their own."""
        return Grid(world=self.bed.world, ep=self.bed.world, ranks_per_node=self.ranks_per_node)

    @property
    def num_experts(self) -> int:
        """Of the layer."""
        return self.nodes * self.ranks_per_node * self.experts_per_rank

    @property
    def tokens_per_rank(self) -> int:
        """Of each rank."""
        return self.samples_per_rank * self.sample_tokens

    @property
    def costs(self) -> ReplicationCosts:
        """What policies are told: the links that the bed was asked for, and what a message costs."""
        latency = {"inter_latency_us": self.message_us, "intra_latency_us": self.message_us}
        device = replace(CPU, tflops=Tflops(fp32=self.gflops / 1e3))
        cluster = emulated(replace(self.bed, inter=self.inter), device=device)
        return ReplicationCosts(
            machine=Machine(**latency), cluster=cluster, element_bytes=ELEMENT_BYTES, matrices=MATRICES
        )


@dataclass(frozen=True, kw_only=True)
class Skewed(BalancePlace):
    """A bed with routing that is made up: a case for each MaxVio."""

    max_vio: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    """Of ranks."""
    calls: int = 4
    """Different routings per case, taken in turn."""
    persistence: float = 0.98
    """Correlation of the experts' places in popularity from call to call."""
    locality: float = 0.2
    """How much of the choice is a matter of the sample."""


@dataclass(frozen=True, kw_only=True)
class Recorded(BalancePlace):
    """A bed with routing that was recorded: one case. The trace says how many experts, samples and tokens there are."""

    trace: str = ""
    """A file or folder, from the configuration file's folder."""
    layer: int = 0
    """MoE layer, from 0."""
    steps: tuple[int, ...] = (50,)
    """A call each."""
    history_step: int = 25
    """What expert placement learns from."""


@dataclass(frozen=True, kw_only=True)
class RecordedLoads(BalancePlace):
    """A bed with the loads of ranks that somebody else recorded: a case per layer."""

    trace: str = ""
    """A file of counts per rank, from the configuration file's folder."""
    layers: tuple[int, ...] = (0,)
    """MoE layers, from 0."""
    steps: tuple[int, ...] = (1, 2, 3, 4)
    """A call each."""
    history_step: int = 0
    """What expert placement learns from."""


@dataclass(frozen=True, kw_only=True)
class SharesOfForced:
    """What is simulated of larger clusters, as a share of forced balance: recorded loads, made-up loads, and weights heavy or
    light."""

    clusters: tuple[str, ...] = ("dgx-h100", "100gbe")
    """Presets of `moesaic.cost`, or files."""
    ranks: tuple[int, ...] = (32, 64, 256)
    trace: str = "laer_e16k4.npz"
    """Counts per rank, from the configuration file's folder."""
    layers: tuple[int, ...] = (5, 11, 17)
    """MoE layers, from 0."""
    steps: tuple[int, ...] = (9, 10)
    """Iterations that follow each other; the first one only lets policies that decide a call ahead begin."""
    max_vio: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """Of made-up loads."""
    ratios: tuple[float, ...] = (0.05, 0.14, 0.5, 1.0, 5.0)
    """Weight rows of one expert over the rows that a rank routes: on the fewest ranks of the first cluster."""
    ratio: float = 0.14
    """Everywhere else."""
    dim: int = 2048
    hidden: int = 1024
    """Inner width of an expert, of three matrices."""
    experts_per_rank: int = 4
    top_k: int = 2
    persistence: float = 0.98
    """Correlation of the experts' places in popularity between two calls: made-up loads then change about as much from call to
    call as recorded ones do from iteration to iteration."""
    slow_rank: float = 0.5
    """Speed of the last rank's products, over that of the others, under an even load that is simulated besides."""
    moves_every: int = 50
    """Iterations that pass between two decisions about where experts live, as `balance.experts_every` has it: what a move takes
    is spread over so many calls."""
    moved_bytes: int = 14
    """Of a parameter that moves: its bfloat16 weight, and the optimizer's float32 copy and two moments."""

    def layer(self, ranks: int) -> Workload:
        """Return the layer on so many ranks, with the tokens of `ratio`."""
        return Workload(
            tokens=self.tokens(self.ratio), num_experts=ranks * self.experts_per_rank, top_k=self.top_k, dim=self.dim,
            hidden=self.hidden,
        )  # fmt: skip

    def tokens(self, ratio: float) -> int:
        """Return the tokens of a rank at which an expert's weights have so many times its rows."""
        return max(1, round(3 * self.hidden / (ratio * self.top_k)))


@dataclass(frozen=True, kw_only=True)
class SkewedCase:
    """One load on one bed."""

    place: BalancePlace
    label: str
    """What `--only` may name."""
    max_vio: float | None
    """That was asked for; None where the load was recorded."""
    layer: int = 0
    """Of loads of ranks that were recorded."""
    routes: Routes = NO_ROUTES
    """Made where the case is run."""


@dataclass(frozen=True, kw_only=True)
class BalanceBenchConfig:
    """The whole benchmark."""

    seed: int = 0
    """Of made-up routing and of inputs."""
    skewed: tuple[Skewed, ...] = ()
    recorded: tuple[Recorded, ...] = ()
    loads: tuple[RecordedLoads, ...] = ()
    shares: SharesOfForced | None = None
    memory: bool = False
    """Count the bytes that a layer holds under memory budgets."""
    decisions: bool = False
    """Time decisions by themselves, which wants a quiet machine."""
    only: tuple[str, ...] = field(default=())
    """Cases, beds, or parts that need none; () for everything."""
    folder: Path = Path()
    """Of the file: traces are found from there."""

    @property
    def every(self) -> list[SkewedCase]:
        """All cases on beds, bed by bed, also those that are not asked for; without their routing."""
        found = [
            SkewedCase(place=place, label=f"{place.name}-{load:g}", max_vio=load)
            for place in self.skewed
            for load in place.max_vio
        ]
        found += [SkewedCase(place=place, label=place.name, max_vio=None) for place in self.recorded]
        return found + [
            SkewedCase(place=place, label=f"{place.name}-{layer}", max_vio=None, layer=layer)
            for place in self.loads
            for layer in place.layers
        ]

    @property
    def wanted(self) -> list[SkewedCase]:
        """Those that are asked for."""
        return [case for case in self.every if not self.only or {case.place.name, case.label} & set(self.only)]

    def cases(self) -> list[SkewedCase]:
        """Return the cases that are asked for, with their routing.

        Raises:
            InputError: for a load that no routing has.
        """
        return [replace(case, routes=self._routes(case)) for case in self.wanted]

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> BalanceBenchConfig:
        """Return what was asked for.

        Args:
            only: cases, "4x2-2"; those of a bed, "4x2"; "trace"; "shares"; () for everything.
            repeats: everywhere, the close methods' too; None as the file says.

        Raises:
            InputError: for a name that is none.
        """
        known = [name for name in (SHARES, MEMORY, DECISIONS) if getattr(self, name)]
        known += [name for case in self.every for name in (case.place.name, case.label)]
        for word in only:
            if word not in known:
                raise InputError(f"--only {word}: unknown case{suggestion(word, list(dict.fromkeys(known)))}")
        if repeats is None:
            return replace(self, only=only)
        places: dict[str, Any] = {
            name: tuple(replace(place, repeats=repeats, pairs=repeats) for place in getattr(self, name)) for name in LISTS
        }  # fmt: skip
        return replace(self, only=only, **places)

    def has(self, part: str) -> bool:
        """Whether a part that needs no bed is there and asked for."""
        return bool(getattr(self, part)) and (not self.only or part in self.only)

    def _routes(self, case: SkewedCase) -> Routes:
        place = case.place
        if isinstance(place, Recorded):
            return _recorded(place, self.folder)
        ranks = place.bed.world
        sizes = Skew(
            ranks=ranks, num_experts=place.num_experts, top_k=place.top_k, samples=ranks * place.samples_per_rank,
            sample_tokens=place.sample_tokens, max_vio=case.max_vio or 0.0, seed=self.seed,
        )  # fmt: skip
        if isinstance(place, RecordedLoads):
            trace, steps = Trace.open(self.folder / place.trace), (place.history_step, *place.steps)
            each = place.experts_per_rank
            return by_shares(np.stack([recorded_shares(trace, case.layer, step, ranks, each) for step in steps]), sizes)
        assert isinstance(place, Skewed)
        return made_up(replace(sizes, calls=place.calls, persistence=place.persistence, locality=place.locality))


LISTS: dict[str, BalancePlace] = {"skewed": Skewed(), "recorded": Recorded(), "loads": RecordedLoads()}
"""Of beds in the file, with what a bed of each begins with."""


def read_config(path: Path = COMMITTED) -> BalanceBenchConfig:
    """Read the benchmark from a TOML or JSON file: fields of `BalanceBenchConfig`, lists `[[skewed]]`, `[[recorded]]` and
    `[[loads]]`, and `[shares]`.

    Raises:
        InputError: naming the file and the field.
    """
    lists = {name: (name, default) for name, default in LISTS.items()}
    made = read_parts(path, BalanceBenchConfig(), lists=lists, tables={SHARES: SharesOfForced()})
    names = [place.name for place in (*made.skewed, *made.recorded, *made.loads)]
    if len(set(names)) < len(names):
        raise InputError(f"config {path}: two beds have one name: give each its own")
    return replace(made, folder=path.parent)


def _recorded(place: Recorded, folder: Path) -> Routes:
    """Read the routing of a recorded case, and hold it against the layer."""
    trace = Trace.open(folder / place.trace)
    shape, samples = trace.shape, place.bed.world * place.samples_per_rank
    wanted = (place.num_experts, place.top_k, samples, place.sample_tokens)
    found = (shape.num_experts, shape.top_k, shape.sequences, shape.seq_len)
    if wanted != found:
        raise InputError(
            f"{place.name}: the trace has {found[0]} experts, top_k={found[1]}, {found[2]} samples of {found[3]} tokens; the "
            f"layer on this bed {wanted[0]}, {wanted[1]}, {wanted[2]} of {wanted[3]}: make them equal"
        )
    return recorded_routes(trace, place.layer, place.steps, place.history_step)
