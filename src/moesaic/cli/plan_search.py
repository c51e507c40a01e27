"""What the commands of `moesaic plan` share: the model and the cluster, and the search for the best
plan of one on the other.

A *job* is a model with the sizes of its step. A *layout* is a mesh, with pipeline stages, and what
else splits the step; *lossy* codecs and products lose precision. *MaxVio* is how much more copies
than its share the busiest expert (here: ep rank) gets, relative to that share.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from moesaic.errors import InputError
from moesaic.planner.candidates import Pins, SearchSpace
from moesaic.planner.cluster import ClusterSpec, presets, read_cluster
from moesaic.planner.emit import SYSTEMS, from_flags, unread_flags
from moesaic.planner.job import Job
from moesaic.planner.loads import typical_counts
from moesaic.planner.other_systems import OthersLayout, best_layout, predict
from moesaic.planner.presets import CONFIGS, read_job
from moesaic.planner.search import (
    GIVE_UP,
    LOSSLESS,
    LOSSY,
    REFINED,
    Result,
    Settings,
    search,
    search_recomputing,
)
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import read_counts
from moesaic.program.plan import AllToAll, Codec, Order, Schedule
from moesaic.traces.trace import Trace

FINISHED = 2
"""`finished_eps` of `Settings`: the sizes of ep that the line "slower" gives."""
MOST_STAGES = 16
"""`most_stages` of `Settings`."""
TOP = 5
"""Number of plans in a ranking, unless another is given."""
TABLES = 4
"""Number of calls of a trace under which plans are ranked."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A model, a cluster, and the sizes of a step."""

    model: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """A Hugging Face model: mixtral-8x7b, olmoe-1b-7b, qwen3-30b-a3b, gpt-oss-120b, deepseek-v3, or
    a config.json, or its folder. To plan training, not fine-tuning, also a preset of moesaic train
    (demo, gpt-small, ...) or a training configuration (TOML, or the config.json of a run)."""
    cluster: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """A cluster preset, or a .toml file that describes a cluster, such as one that moesaic profile
    wrote; docs/planning.md lists both."""
    nodes: int | None = None
    """Number of nodes; None for that of the cluster."""
    gpus: int | None = None
    """Number of devices, instead of --nodes: whole nodes, or a part of one node."""
    batch_size: int | None = None
    """Sequences per micro-batch over all ranks; None for that of the model (one per rank for a
    Hugging Face model)."""
    accumulation: int | None = None
    """Micro-batches per optimizer step; None for that of the model (about 4 million tokens for a
    Hugging Face model)."""
    seq_len: int | None = None
    """Tokens per sequence; None for that of the model (4096 for a Hugging Face model)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            flag = f"--{field.name.replace('_', '-')}"
            if type(value) is int and value < 1:  # not isinstance, which bool would pass too
                raise InputError(f"{flag} {value}: must be at least 1")
            if value == ():
                raise InputError(f"{flag} is empty: name at least one, or leave it out")
        if self.nodes is not None and self.gpus is not None:
            raise InputError(
                "--nodes and --gpus both say how large the cluster is: give one of them"
            )

    def simulator(self) -> Simulator:
        """Return the simulator of the cluster.

        Raises:
            InputError: if no model or no cluster is named, or the cluster cannot be read.
        """
        if not self.model:
            raise InputError(
                f"--model is missing: name one ({', '.join(CONFIGS)}), or a model's config.json or "
                "its folder (--help lists all)"
            )
        if not self.cluster:
            raise InputError(
                f"--cluster is missing: choose one of {', '.join(presets())}, or give a file"
            )
        cluster = read_cluster(self.cluster, nodes=self.nodes)
        if self.gpus is not None:
            cluster = cluster.of_devices(self.gpus)
        return Simulator(cluster)

    def job(self, cluster: ClusterSpec) -> Job:
        """Return the training job, with the batch size, accumulation and sequence length of the
        options."""
        # only a Hugging Face model takes the sequence length here, others below
        job = read_job(self.model, seq_len=self.seq_len or 4096, world=cluster.world)
        if self.batch_size is not None:
            job = replace(job, batch_size=self.batch_size)
        if self.seq_len is not None and job.model.seq_len != self.seq_len:
            job = replace(job, model=replace(job.model, seq_len=self.seq_len))
        if self.accumulation is not None:
            job = replace(job, accumulation=self.accumulation)
        return job


@dataclass(frozen=True, kw_only=True)
class SearchOptions(JobOptions):
    """What is searched, and under which routing."""

    trace: str | None = None
    """Rank the best plans again under recorded routing: a trace (docs/traces.md), or one table of
    copies with a row per data-parallel group and a column per expert (.npy, .csv). They must fit
    the memory under it. Bounds assume even routing."""
    max_vio: float | None = None
    """Also print the time and memory of each step under this MaxVio over ranks: in every layer the
    experts of one ep rank get 1 + MAX_VIO times their share of the copies. Plans that do not fit
    the memory under it are left out."""
    tp: int | None = None
    """Search only layouts with this tensor parallelism (number of ranks); None tries all that fit
    inside a node."""
    ep: int | None = None
    """Search only layouts with this expert parallelism (number of ranks); None tries all."""
    etp: int | None = None
    """Search only layouts with this expert tensor parallelism (number of ranks); None tries all."""
    innermost: Literal["etp", "ep"] | None = None
    """Search only layouts in which this axis has consecutive ranks; None tries both."""
    pp: int | None = None
    """Search only layouts with this number of pipeline stages, of ours and of the other system that
    is compared with them; None tries powers of two up to 16."""
    schedules: tuple[Schedule, ...] = LOSSLESS.schedules
    """Schedules to try."""
    all_to_alls: tuple[AllToAll, ...] = LOSSLESS.all_to_alls
    """All-to-all algorithms to try."""
    chunks: tuple[int, ...] = LOSSLESS.chunks
    """Numbers of chunks to try."""
    orders: tuple[Order, ...] = LOSSLESS.orders
    """Task orders to try."""
    allow_lossy: bool = False
    """Also try codecs that lose precision (docs/codecs.md), and for other systems float8
    products."""
    exhaustive: bool = False
    """Try every combination of choices on the most promising layouts, which takes minutes instead
    of seconds."""
    reserve_gib: float = 1.0
    """Device memory in GiB set aside for the framework, in addition to allocator fragmentation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_vio is not None and not 0 <= self.max_vio < math.inf:
            raise InputError(f"--max-vio {self.max_vio}: must be a finite number of at least 0")
        if self.max_vio is not None and self.trace is not None:
            raise InputError(
                "--trace and --max-vio both say how skewed the routing is: give one of them"
            )
        if not 0 <= self.reserve_gib < math.inf:
            raise InputError(
                f"--reserve-gib {self.reserve_gib}: must be a finite number of at least 0"
            )

    def simulator(self) -> Simulator:
        """Return the simulator of the cluster, whose devices the stages divide."""
        simulator = super().simulator()
        world = simulator.cluster.world
        if self.pp is not None and world % self.pp:
            raise InputError(
                f"--pp {self.pp}: does not divide {world} devices: choose a divisor, or leave it "
                "out"
            )
        return simulator

    @property
    def asked(self) -> str:
        """The flags, as typed in a shell, that say what the best layout of another system is for:
        the model, the cluster, the sizes of a step, and what may fill the memory."""
        default = SearchOptions()
        words = []
        for name in (*(field.name for field in fields(JobOptions)), "allow_lossy", "reserve_gib"):
            value = getattr(self, name)
            if value == getattr(default, name):
                continue
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(shlex.quote(str(value)))
        return " ".join(words)

    def counts(self) -> list[np.ndarray]:
        """Return tables of copies, each (groups, num_experts): the table of a file, or the `TABLES`
        typical ones of a trace; none without --trace."""
        if self.trace is None:
            return []
        path = Path(self.trace)
        if path.suffix in (".npy", ".csv"):
            return [read_counts(path)]
        return typical_counts(Trace.open(path), TABLES)

    def settings(self) -> Settings:
        """Return the settings of the search."""
        codecs: tuple[Codec, ...] = LOSSY if self.allow_lossy else ("none",)
        space: SearchSpace = replace(
            LOSSLESS,
            schedules=self.schedules,
            all_to_alls=self.all_to_alls,
            chunks=self.chunks,
            orders=self.orders,
            codecs=codecs,
            backward_codecs=codecs,
        )

        pins = Pins(tp=self.tp, ep=self.ep, etp=self.etp, innermost=self.innermost)

        # `give_up` and `refine` say when a plan is hopeless, and how many layouts are improved;
        # `may_fly` tries two micro-batches in flight
        return Settings(
            give_up=GIVE_UP,
            refine=REFINED,
            space=space,
            pins=pins,
            keep=TOP,
            exhaustive=self.exhaustive,
            finished_eps=FINISHED,
            reserve_gib=self.reserve_gib,
            max_vio=self.max_vio or 0.0,
            most_stages=MOST_STAGES,
            pp=self.pp,
            may_fly=True,
        )

    def layout_of(self, flags: str, job: Job, cluster: ClusterSpec) -> OthersLayout:
        """Return the layout that flags of another system describe.

        Raises:
            InputError: if it is impossible for the job on the cluster.
        """
        layout = from_flags(flags)
        # called for what they refuse
        unread_flags(flags, job)
        predict(job, cluster, layout)
        return layout

    def best_of(
        self, system: str, job: Job, cluster: ClusterSpec
    ) -> tuple[OthersLayout, PlannedStep] | None:
        """Return the best layout that another system can run, and its step; None if none fits."""
        offers = SYSTEMS[system].offers
        if not self.allow_lossy:
            # the first one is lossless
            offers = replace(offers, precisions=offers.precisions[:1])
        return best_layout(job, cluster, offers, stages=self.pp, reserve_gib=self.reserve_gib)

    def searched(self, job: Job, simulator: Simulator) -> tuple[Job, Result]:
        """Search, with a progress bar; returns what `search_recomputing` does.

        Raises:
            TooLargeError: if no layout fits the memory.
        """
        with _progress_bar(Console(stderr=True)) as progress:
            find = partial(
                search,
                cluster=simulator.cluster,
                settings=self.settings(),
                counts=self.counts(),
                simulator=simulator,
                progress=progress,
            )
            return search_recomputing(job, find)


@contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield the `progress` callback of a search, shown as a progress bar."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            """Show how far the search is."""
            bar.update(task, description=what, completed=done, total=total)

        yield show
