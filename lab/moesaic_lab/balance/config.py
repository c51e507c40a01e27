"""The configuration of the balance benchmark, read from a file so that loads, shapes, links and
rates are fixed beforehand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moesaic.errors import InputError, suggestion
from moesaic.planner.predicted_plans import CPU
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic.traces.trace import Trace
from moesaic_lab.balance.loads import Routes, Skew, by_shares, made_up, recorded, recorded_shares
from moesaic_lab.beds import BedConfig, Place
from moesaic_lab.benchmark import read_parts
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "balance.toml"
SHARES = "shares"
MEMORY = "memory"
DECISIONS = "decisions"
"""Names of the parts of the benchmark that need no bed."""
PARTS_PER_MESSAGE = 4.0
"""Host time of each additional part of a pass, in units of the cost of a message: a gather and a
placement of rows per direction."""
ELEMENT_BYTES = 4
MATRICES = 2
"""Bytes of an element of rows and weights on the bed (float32), and number of matrices of an
expert."""
NO_ROUTES = Routes(
    experts=np.zeros((0, 0, 0, 0), dtype=np.int64), history=np.zeros(0, dtype=np.int64)
)


@dataclass(frozen=True, kw_only=True)
class BalancePlace(Place):
    """A bed, its virtual accelerators, and one layer: what all cases on this bed have in common."""

    name: str = "bed"
    """Name that `--only` accepts."""
    inter: str = "100mbit"
    intra: str | None = "1gbit"
    message_us: float = 500.0
    """Microseconds that a message costs, since ranks share a core. Policies with a cost model get
    this figure."""
    expert_us: float = 2500.0
    """Microseconds that each expert replicated to a rank costs the host, forward and backward. The
    arbiter gets this figure."""
    gflops: float = 0.12
    """Rate of each rank's virtual accelerator, in 1e9 floating-point operations per second."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 12
    """Inner width of an expert, which has two matrices."""
    experts_per_rank: int = 4
    top_k: int = 2
    """Copies per token."""
    samples_per_rank: int = 4
    """Samples (sequences) per rank, which sample placement may move."""
    sample_tokens: int = 32
    """Tokens of a sample."""
    slow_rank: float = 1.0
    """Speed of the last rank's matrix products relative to those of the other ranks."""
    slow_link: str = ""
    """Rate of the last node's link, in each direction; "" for the rate of the other links. Policies
    are given `inter`, except the arbiter, which is given the rate of each link, as a profile of the
    cluster has it."""
    pairs: int = 48
    """Further rounds in which only ours and the methods close to it are timed. The first `repeats`
    select the fastest of many methods, and these rounds judge it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise InputError(f"{self.name}: top_k={self.top_k} of {self.num_experts} experts")

    @property
    def part(self) -> str:
        """The name by which --only chooses the bed."""
        return self.name

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0, including those of subclasses."""
        return ("per_message", "layer", "history_step", "persistence", "locality")

    @property
    def bed(self) -> Bed:
        """The emulated cluster."""
        if not self.slow_link:
            return replace(super().bed, inter=self.inter)
        others = (self.inter,) * (self.nodes - 1)
        return replace(super().bed, inter=(*others, self.slow_link))

    def cases(self) -> list[SkewedCase]:
        """Return the cases on this bed, without their routing."""
        return [SkewedCase(place=self, label=self.name, max_vio=None)]

    def routes(self, case: SkewedCase, seed: int, folder: Path) -> Routes:
        """Return the routing of one of the cases; the paths of traces are relative to `folder`."""
        raise NotImplementedError

    def skew(self, max_vio: float | None, seed: int) -> Skew:
        """Return the sizes of the layer, for synthetic routing."""
        return Skew(
            ranks=self.world,
            num_experts=self.num_experts,
            top_k=self.top_k,
            samples=self.world * self.samples_per_rank,
            sample_tokens=self.sample_tokens,
            max_vio=max_vio or 0.0,
            seed=seed,
        )

    @property
    def grid(self) -> Grid:
        """The mesh: every rank has its own experts and its own tokens."""
        return Grid(world=self.world, ep=self.world, ranks_per_node=self.ranks_per_node)

    @property
    def num_experts(self) -> int:
        """Experts of the layer, over all ranks."""
        return self.world * self.experts_per_rank

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each rank."""
        return self.samples_per_rank * self.sample_tokens

    @property
    def costs(self) -> Rates:
        """The cost model that policies use: the configured rates of the links, and the cost of a
        message."""
        # policies do not know of a slow link
        inside, outside = emulated(replace(self.bed, inter=self.inter), device=CPU).links
        per_node = self.ranks_per_node  # the ranks of a node share its links
        return Rates(
            intra_gbps=inside.gbps[0] / per_node,
            intra_ranks=per_node,
            inter_gbps=outside.gbps[0] / per_node,
            inter_ranks=per_node,
            intra_latency_us=self.message_us,
            inter_latency_us=self.message_us,
            tflops=self.gflops / 1e3,
            element_bytes=ELEMENT_BYTES,
            matrices=MATRICES,
            expert_us=self.expert_us,
            part_us=PARTS_PER_MESSAGE * self.message_us,
        )

    @property
    def profiled_costs(self) -> Rates:
        """The cost model of the arbiter: as `costs`, with the speed of each rank and of each node's
        link."""
        speeds: tuple[float, ...] = ()  # of all ranks; () if they are equally fast
        if self.slow_rank != 1:
            others = (1.0,) * (self.bed.world - 1)
            speeds = (*others, self.slow_rank)
        node_links: tuple[float, ...] = ()  # rates relative to the first node's link
        if self.slow_link:
            rates = [self.bed.inter_bytes_per_second(node) for node in range(self.nodes)]
            node_links = tuple(rate / rates[0] for rate in rates)
        return replace(self.costs, speeds=speeds, node_links=node_links)


@dataclass(frozen=True, kw_only=True)
class Skewed(BalancePlace):
    """A bed with synthetic routing: a case for each MaxVio."""

    max_vio: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    """MaxVio of ranks, one case each."""
    calls: int = 4
    """Different routings per case, used in turn."""
    persistence: float = 0.98
    """Correlation between the popularity ranks of the experts in two consecutive calls."""
    locality: float = 0.2
    """How strongly the choice of experts depends on the sample, from 0 to 1."""

    def cases(self) -> list[SkewedCase]:
        """Return a case for each MaxVio."""
        return [
            SkewedCase(place=self, label=f"{self.name}-{load:g}", max_vio=load)
            for load in self.max_vio
        ]

    def routes(self, case: SkewedCase, seed: int, folder: Path) -> Routes:
        """Return synthetic routing."""
        skew = self.skew(case.max_vio, seed)
        return made_up(
            replace(skew, calls=self.calls, persistence=self.persistence, locality=self.locality)
        )


@dataclass(frozen=True, kw_only=True)
class Recorded(BalancePlace):
    """A bed with recorded routing: one case. The trace must match the layer's numbers of experts
    and tokens, and have its samples."""

    trace: str = ""
    """A file or folder, relative to the configuration file's folder."""
    layer: int = 0
    """MoE layer, from 0."""
    steps: tuple[int, ...] = (50,)
    """Steps of the trace, one call each."""
    history_step: int = 25
    """Step of the trace from which expert placement learns."""

    def routes(self, case: SkewedCase, seed: int, folder: Path) -> Routes:
        """Read the routing, and check that its sizes match the layer's."""
        trace = Trace.open(folder / self.trace)
        shape = trace.shape
        samples = self.world * self.samples_per_rank
        expected = (self.num_experts, self.top_k, self.sample_tokens)
        found = (shape.num_experts, shape.top_k, shape.seq_len)
        if expected != found or samples > shape.sequences:
            raise InputError(
                f"{self.name}: the trace has {shape.num_experts} experts, top_k={shape.top_k}, "
                f"{shape.sequences} samples of {shape.seq_len} tokens; the layer on this bed "
                f"{self.num_experts}, {self.top_k}, {samples} of {self.sample_tokens}: make them "
                "equal"
            )
        return recorded(trace, self.layer, self.steps, self.history_step, samples)


@dataclass(frozen=True, kw_only=True)
class RecordedLoads(BalancePlace):
    """A bed with loads per rank from a published recording: a case per layer."""

    trace: str = ""
    """A file with counts per rank, relative to the configuration file's folder."""
    layers: tuple[int, ...] = (0,)
    """MoE layers, counted from 0."""
    steps: tuple[int, ...] = (1, 2, 3, 4)
    """Steps of the trace, one call each."""
    history_step: int = 0
    """Step of the trace from which expert placement learns."""

    def cases(self) -> list[SkewedCase]:
        """Return a case for each layer."""
        return [
            SkewedCase(place=self, label=f"{self.name}-{layer}", max_vio=None, layer=layer)
            for layer in self.layers
        ]

    def routes(self, case: SkewedCase, seed: int, folder: Path) -> Routes:
        """Return routing with the recorded loads of the ranks."""
        trace = Trace.open(folder / self.trace)
        steps = (self.history_step, *self.steps)
        shares = [
            recorded_shares(trace, case.layer, step, self.world, self.experts_per_rank)
            for step in steps
        ]
        return by_shares(np.stack(shares), self.skew(None, seed))


@dataclass(frozen=True, kw_only=True)
class SharesOfForced:
    """Simulations of larger clusters that give shares of forced balance, under recorded and
    synthetic loads, and with heavy and light expert weights."""

    clusters: tuple[str, ...] = ("dgx-h100", "100gbe")
    """Presets of `moesaic.planner`, or files."""
    ranks: tuple[int, ...] = (32, 64, 256)
    trace: str = "laer_e16k4.npz"
    """File with counts per rank, relative to the configuration file's folder."""
    layers: tuple[int, ...] = (5, 11, 17)
    """MoE layers, counted from 0."""
    steps: tuple[int, ...] = (9, 10)
    """Consecutive iterations of the trace. The first only gives a start to policies that decide one
    call ahead."""
    max_vio: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """MaxVio of the synthetic loads."""
    ratios: tuple[float, ...] = (0.05, 0.14, 0.5, 1.0, 5.0)
    """Weight rows of one expert over the rows that a rank routes, simulated on the smallest number
    of ranks of the first cluster."""
    ratio: float = 0.14
    """Weight rows of one expert over the rows that a rank routes, in all other simulations."""
    dim: int = 2048
    hidden: int = 1024
    """Inner width of an expert, which has three matrices."""
    experts_per_rank: int = 4
    top_k: int = 2
    persistence: float = 0.98
    """Correlation between the popularity ranks of the experts in two consecutive calls. At this
    value, synthetic loads change from call to call about as much as recorded loads do from
    iteration to iteration."""
    slow_rank: float = 0.5
    """Speed of the last rank's matrix products relative to those of the others, in an additional
    simulation with even loads."""
    moves_every: int = 50
    """Iterations between two decisions of expert placement, like `balance.experts_every`. The time
    of a move is spread over these calls."""
    moved_bytes: int = 14
    """Bytes to move per parameter: its bfloat16 weight, and the optimizer's float32 copy and two
    moments."""

    def layer(self, ranks: int) -> Workload:
        """Return the layer on `ranks` ranks, with the tokens per rank that give the weight ratio
        `ratio`."""
        return Workload(
            tokens=self.tokens(self.ratio),
            num_experts=ranks * self.experts_per_rank,
            top_k=self.top_k,
            dim=self.dim,
            hidden=self.hidden,
        )

    def tokens(self, ratio: float) -> int:
        """Return the tokens per rank at which an expert's weights have `ratio` times as many rows
        as the rank routes."""
        weight_rows = 3 * self.hidden  # three matrices of `hidden` rows
        return max(1, round(weight_rows / (ratio * self.top_k)))


@dataclass(frozen=True, kw_only=True)
class SkewedCase:
    """A bed with one load."""

    place: BalancePlace
    label: str
    """Name that `--only` accepts."""
    max_vio: float | None
    """The configured MaxVio of ranks; None for a recorded load."""
    layer: int = 0
    """MoE layer of the recorded loads of ranks."""
    routes: Routes = NO_ROUTES
    """The routing, filled in by `BalanceBenchConfig.cases`."""


@dataclass(frozen=True, kw_only=True)
class BalanceBenchConfig(BedConfig[BalancePlace]):
    """Configuration of the whole benchmark. `seed` is that of synthetic routing and of the
    inputs."""

    shares: SharesOfForced | None = None
    memory: bool = False
    """Whether to count the bytes that a layer holds under memory budgets."""
    decisions: bool = False
    """Whether to time decisions separately. This needs a quiet machine."""
    only: tuple[str, ...] = ()
    """Cases, beds, or parts without a bed; () for everything."""
    folder: Path = Path()
    """Folder of the configuration file; the paths of traces are relative to it."""

    @property
    def every(self) -> list[SkewedCase]:
        """All cases on beds, bed by bed, without their routing. Cases that `only` excludes are
        listed as well."""
        return [case for place in self.cells for case in place.cases()]

    @property
    def selected(self) -> list[SkewedCase]:
        """The cases on beds that `only` selects."""
        if not self.only:
            return self.every
        return [
            case for case in self.every if case.place.name in self.only or case.label in self.only
        ]

    def cases(self, labels: Collection[str] | None = None) -> list[SkewedCase]:
        """Return the selected cases, or those of them with these labels, with their routing.

        Raises:
            InputError: if no routing has the requested load.
        """
        return [
            replace(case, routes=case.place.routes(case, self.seed, self.folder))
            for case in self.selected
            if labels is None or case.label in labels
        ]

    def narrowed(
        self, *, only: tuple[str, ...] = (), repeats: int | None = None
    ) -> BalanceBenchConfig:
        """Return the configuration for the selected cases only.

        Args:
            only: cases such as "4x2-2", beds such as "4x2", or parts such as "shares"; () for
                everything.
            repeats: rounds of all methods, and further rounds of the close ones; None keeps the
                numbers of the file.

        Raises:
            InputError: for an unknown name.
        """
        known = [name for name in (SHARES, MEMORY, DECISIONS) if getattr(self, name)]
        for case in self.every:
            known += [case.place.name, case.label]
        distinct = list(dict.fromkeys(known))
        for word in only:
            if word not in known:
                raise InputError(f"--only {word}: unknown case{suggestion(word, distinct)}")
        return replace(super().narrowed(repeats=repeats), only=only)

    @staticmethod
    def repeated(cell: BalancePlace, repeats: int) -> BalancePlace:
        """Return a bed on which the close methods are not timed more often than the others."""
        return replace(cell, repeats=repeats, pairs=repeats)

    def has(self, part: str) -> bool:
        """Whether a part that needs no bed is configured and selected."""
        return bool(getattr(self, part)) and (not self.only or part in self.only)


def read_config(path: Path = COMMITTED) -> BalanceBenchConfig:
    """Read the benchmark's configuration from a TOML or JSON file.

    The file has the fields of `BalanceBenchConfig`, the lists `[[skewed]]`, `[[recorded]]` and
    `[[loads]]`, and the table `[shares]`.

    Raises:
        InputError: naming the file and the field.
    """
    kinds = {"skewed": Skewed(), "recorded": Recorded(), "loads": RecordedLoads()}
    lists = {name: ("cells", place) for name, place in kinds.items()}
    config = read_parts(path, BalanceBenchConfig(), lists=lists, tables={SHARES: SharesOfForced()})
    return replace(config, folder=path.parent)
