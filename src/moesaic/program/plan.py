"""`Plan`: every choice that changes how an MoE layer runs on a mesh. Only lossy codecs change what
the layer computes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Literal, TypeAlias

from moesaic.codecs import NO_CODEC, codec_spec, is_coded
from moesaic.errors import InputError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.order import ORDERS
from moesaic.program.task import Program


class Crossing(Enum):
    """The kinds of implementation that a value of `Plan.all_to_all` can name."""

    LINK = "an algorithm in `ALL_TO_ALLS`, which movements over ep are lowered to"
    MULTICAST = "a pass that changes what is sent: a token once per node, and once per rank there"
    DEEPEP = "DeepEP's kernels in place of the programs' movements"


_OTHERS = {"multicast": Crossing.MULTICAST, "deepep": Crossing.DEEPEP}

MOST_CHUNKS = 256
"""Largest `chunks`: smaller chunks are not worth a message, and ordering the tasks takes quadratic
time in their number."""

NO_REPLICATION = "none"
"""The name that stands for no replication policy."""
Codec: TypeAlias = str
"""Name of a codec, optionally with a colon and its option; see `moesaic.codecs.codec_spec`."""
if TYPE_CHECKING:
    AllToAll: TypeAlias = str
    Order: TypeAlias = str
    Schedule: TypeAlias = str
else:
    AllToAll = Literal[(*ALL_TO_ALLS, *_OTHERS)]
    Order = Literal[tuple(ORDERS)]
    Schedule = Literal[tuple(SCHEDULES)]
"""Keys of registries; the command line lists them as choices."""


@dataclass(frozen=True, kw_only=True)
class StaticPlan:
    """The choices of a plan that do not depend on the routing of a call."""

    schedule: Schedule = "s1"
    """Where tensor parallelism pauses around the layer: baseline (Parm's eq. 1), ted (DeepSpeed),
    s1 (before the router), s2 (after the router), or s3 (like s2, but the expert shards all-gather
    the rows over the links between them)."""
    fuse: bool = False
    """Fuse the two or three movements over ep and etp of baseline and s3 into one."""
    gather_weights: int | None = None
    """Tutel's r: number of shards of an expert that a token visits; the other ranks of etp gather
    weights instead. 0: all weights are gathered where the tokens are. None: r = etp, so no weights
    move."""
    chunks: int = 1
    """Number of chunks of the copies of each expert; one chunk is sent while another is
    computed."""
    peer_groups: int = 1
    """Number of groups of ep ranks that exchange one after the other (FasterMoE's smart
    schedule)."""
    overlap_gather: bool = False
    """Overlap the all-gather over tp with the all-to-all, phase by phase (Parm's SAA; for s2 and
    s3)."""
    all_to_all: AllToAll = "linear"
    """All-to-all over ep. linear: direct; hier1d: through one rank per node; hier2d: inside nodes,
    then between nodes (2DH); pipelined: inside and between nodes at the same time; hier3d: over
    groups of nodes; naive: 2DH without aligning; sequential: to one rank after the other;
    multicast: a token is sent once to each node, and there once to each rank; deepep: DeepEP
    kernels, if installed (GPUs, s1, tp and etp 1, no other option of the plan)."""
    codec: Codec = NO_CODEC
    """Codec of rows that cross ep in the forward pass, such as int8 or zfp:12; an unknown name is
    answered with all. docs/codecs.md gives the error of each."""
    backward_codec: Codec = NO_CODEC
    """Codec of gradients that cross ep in the backward pass."""
    order: Order = "optsche"
    """Order of tasks. optsche: ScheMoE's, all dispatches first, then expert by expert; early: each
    movement as early as possible; fifo: chunk after chunk."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        names: dict[str, Collection[str]] = {
            "schedule": SCHEDULES,
            "all_to_all": (*ALL_TO_ALLS, *_OTHERS),
            "order": ORDERS,
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"plan.{name}={getattr(self, name)!r} is unknown: choose one of "
                    f"{', '.join(known)}"
                )
        for name in ("codec", "backward_codec"):
            if not getattr(self, name):
                raise InputError(f"plan.{name}='' is unknown: write {NO_CODEC} for no codec")
            try:
                codec_spec(getattr(self, name))
            except InputError as error:
                raise InputError(f"plan.{name}: {error}") from error
        for name in ("chunks", "peer_groups"):
            if getattr(self, name) < 1:
                raise InputError(f"plan.{name}={getattr(self, name)}: must be at least 1")
        if self.chunks > MOST_CHUNKS:
            raise InputError(f"plan.chunks={self.chunks}: must be at most {MOST_CHUNKS}")
        if self.gather_weights is not None and self.gather_weights < 0:
            raise InputError(
                f"plan.gather_weights={self.gather_weights}: choose 0, or a divisor of mesh.etp"
            )

    @property
    def program(self) -> Program:
        """The forward program that the schedule builds, before any pass; it is built once."""
        build: Callable[[], Program] = SCHEDULES[self.schedule]
        return _built(build)

    @property
    def crossing(self) -> Crossing:
        """The kind of implementation that `all_to_all` names."""
        return _OTHERS.get(self.all_to_all, Crossing.LINK)

    @property
    def link(self) -> str:
        """The algorithm in `ALL_TO_ALLS` for movements over ep; linear (no change) if `all_to_all`
        names none of them."""
        return self.all_to_all if self.crossing is Crossing.LINK else "linear"

    @property
    def is_lossless(self) -> bool:
        """Whether the plan computes exactly what the plain layer computes, up to the order of
        sums."""
        return codec_spec(self.codec).is_lossless and codec_spec(self.backward_codec).is_lossless


@dataclass(frozen=True, kw_only=True)
class Plan(StaticPlan):
    """Every choice that changes how an MoE layer runs on a mesh, including its reaction to skewed
    routing."""

    replication: str = NO_REPLICATION
    """Policy that decides in each call which copies are computed on other ranks than the homes of
    their experts (docs/balance.md). none; shadow: weights of hot experts are sent to the ranks that
    hold their copies; published: shadow with FasterMoE's own rule; spill: copies that overload a
    rank are computed by idle ranks; eplb: DeepSeek's rule; arbiter: the fastest of all these,
    another gather_weights and the smart schedule, by a cost model. The name is looked up when a
    layer runs the plan (`policies.py`)."""
    memory_budget: int | None = None
    """Largest number of bytes that one call of a layer holds on a rank, forward and backward, under
    any routing. It counts rows, messages, memory of the experts and their gradients; not
    parameters, input or router. Copies beyond the budget go to helper ranks if the plan replicates.
    Otherwise the call runs in slices: as many as fit are kept for backward, the others are
    recomputed. None: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget("plan", self.memory_budget)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the choices, and which of them are not the default."""
        from moesaic.program.notebook import html_table

        default = Plan()
        rows = []
        for field in fields(self):
            value = getattr(self, field.name)
            is_chosen = value != getattr(default, field.name)
            rows.append((field.name, value, "chosen" if is_chosen else ""))
        return html_table(f"plan: {plan_in_words(self)}", ("choice", "value", ""), rows)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return what a notebook shows, and what a terminal does."""
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    @property
    def replicates(self) -> bool:
        """Whether copies may be computed on other ranks than the homes of their experts."""
        return self.replication != NO_REPLICATION


@lru_cache(maxsize=64)
def _built(schedule: Callable[[], Program]) -> Program:
    """Return the program of a schedule without the parameters that shards of experts share."""
    return schedule()


def plan_in_words(plan: Plan) -> str:
    """Return a plan in words: schedule, all-to-all, and every other choice that is not the
    default."""
    words: list[str] = [plan.schedule, plan.all_to_all]
    conditional_words = (
        (plan.chunks > 1, f"{plan.chunks} chunks"),
        (plan.fuse, "fused"),
        (plan.gather_weights is not None, f"r = {plan.gather_weights}"),
        (plan.peer_groups > 1, f"{plan.peer_groups} peer groups"),
        (plan.overlap_gather, "overlapped gather"),
        (is_coded(plan.codec), f"{plan.codec} forward"),
        (is_coded(plan.backward_codec), f"{plan.backward_codec} backward"),
        (plan.replicates, f"replication {plan.replication}"),
        (plan.memory_budget is not None, f"at most {plan.memory_budget} bytes"),
        (plan.order != Plan().order, plan.order),
    )
    words += [word for condition, word in conditional_words if condition]
    return ", ".join(words)


def check_budget(where: str, memory_budget: int | None) -> None:
    """Raise InputError if a memory budget, a field of the configuration section `where`, is below 1
    byte per rank."""
    if memory_budget is not None and memory_budget < 1:
        raise InputError(
            f"{where}.memory_budget={memory_budget}: choose bytes per rank, at least 1, or "
            "leave it unset for no limit"
        )


def _check_kinds(plan: StaticPlan) -> None:
    """Raise InputError if a field has a value of a wrong type; NumPy integers are converted to
    int."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        # Types are texts, since annotations are not evaluated in this file.
        if field.type == "bool":
            fits = isinstance(value, bool)
            expected = "True or False"
        elif field.type in ("int", "int | None"):
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            fits = is_whole or (value is None and field.type != "int")
            expected = "a whole number"
            if is_whole:  # the only way to set a field of a frozen dataclass
                object.__setattr__(plan, field.name, int(value))
        else:
            fits = isinstance(value, str)
            expected = "a name, as text"
        if not fits:
            raise InputError(f"plan.{field.name}={value!r}: must be {expected}")
