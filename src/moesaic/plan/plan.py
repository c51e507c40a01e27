"""`Plan`: every choice that changes how a layer runs on a mesh; none but lossy codecs changes what it computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Literal, TypeAlias

from moesaic.balance import REPLICATION_POLICIES
from moesaic.balance.replication import NO_REPLICATION
from moesaic.codecs import NO_CODEC, codec_spec, is_coded
from moesaic.errors import InputError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.order import ORDERS
from moesaic.program.task import Program


class Crossing(Enum):
    """What a name of `Plan.all_to_all` is."""

    LINK = "an algorithm in `ALL_TO_ALLS`, which movements over ep are lowered to"
    MULTICAST = "a pass that changes what is sent: a token once per node, and once per rank there"
    DEEPEP = "DeepEP's kernels in place of the programs' movements"


_OTHERS = {"multicast": Crossing.MULTICAST, "deepep": Crossing.DEEPEP}

MOST_CHUNKS = 256
"""Of a layer; no fewer rows are worth a message, and the order of tasks is found in time that grows with its square."""

Codec: TypeAlias = str
"""A codec by its name, with its option behind a colon; see `moesaic.codecs.codec_spec`."""
if TYPE_CHECKING:
    AllToAll: TypeAlias = str
    Replication: TypeAlias = str
    Order: TypeAlias = str
    Schedule: TypeAlias = str
else:
    AllToAll = Literal[(*ALL_TO_ALLS, *_OTHERS)]
    Replication = Literal[(NO_REPLICATION, *REPLICATION_POLICIES)]
    Order = Literal[tuple(ORDERS)]
    Schedule = Literal[tuple(SCHEDULES)]
"""Names of registries; a command line lists them as choices."""


@dataclass(frozen=True, kw_only=True)
class StaticPlan:
    """How an MoE layer runs on a mesh, as far as the routing of a call does not matter."""

    schedule: Schedule = "s1"
    """Where tensor parallelism pauses around the layer: baseline (Parm's eq. 1), ted (DeepSpeed's), s1 before the gate, s2
    after it, s3 as s2 with the expert shards gathering on the links between them."""
    fuse: bool = False
    """One movement over ep and etp in place of two or three (baseline, s3)."""
    gather_weights: int | None = None
    """Tutel's r: how many shards of an expert a token visits; the rest of etp gathers weights instead. 0: all weights come
    to the tokens. None: etp, no weight moves."""
    chunks: int = 1
    """Parts that each run of copies is cut into, so that one travels while another is computed."""
    peer_groups: int = 1
    """Groups of neighbours in ep that exchange one after the other (FasterMoE's smart schedule)."""
    overlap_gather: bool = False
    """Gather over tp phase by phase behind the all-to-all (Parm's SAA; s2 and s3)."""
    all_to_all: AllToAll = "linear"
    """How rows cross ep. linear; hier1d through one rank per node; hier2d inside nodes, then between; pipelined both at
    once; hier3d over groups of nodes; naive, 2DH without aligning; multicast, a token once per node and once per rank there;
    deepep, DeepEP's kernels where that package is installed (GPUs, s1, no tp and etp, none of the options below)."""
    codec: Codec = NO_CODEC
    """Of rows that cross ep in the forward pass: none, bf16, fp16, int8, fp8, or zfp, which takes its bits per value behind a
    colon (zfp:12); docs/codecs.md says what each loses."""
    backward_codec: Codec = NO_CODEC
    """Of gradients that cross ep."""
    order: Order = "optsche"
    """optsche: ScheMoE's, all dispatches first, then expert by expert; early: every movement as soon as it can; fifo: chunk
    after chunk; exact: searched, never worse than these by the durations it is given."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        names: dict[str, Collection[str]] = {
            "schedule": SCHEDULES,
            "all_to_all": (*ALL_TO_ALLS, *_OTHERS),
            "order": ORDERS,
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise InputError(f"plan.{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")
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
            raise InputError(f"plan.gather_weights={self.gather_weights}: choose 0, or a divisor of mesh.etp")

    @property
    def program(self) -> Program:
        """What its schedule builds, before any pass."""
        return SCHEDULES[self.schedule](False)

    @property
    def crossing(self) -> Crossing:
        """What `all_to_all` names."""
        return _OTHERS.get(self.all_to_all, Crossing.LINK)

    @property
    def link(self) -> str:
        """The algorithm in `ALL_TO_ALLS` that movements over ep are lowered to; linear, which leaves them as they are,
        for others."""
        return self.all_to_all if self.crossing is Crossing.LINK else "linear"

    @property
    def is_lossless(self) -> bool:
        """Whether the plan computes exactly what the plain layer computes, up to the order of sums."""
        return codec_spec(self.codec).is_lossless and codec_spec(self.backward_codec).is_lossless


@dataclass(frozen=True, kw_only=True)
class Plan(StaticPlan):
    """How an MoE layer runs on a mesh, and what it does where routing is skewed."""

    replication: Replication = NO_REPLICATION
    """Which copies are computed by other ranks than their experts' homes, decided at each call from its counts
    (docs/balance.md). none; shadow: hot experts' weights go to the ranks whose copies they get; published: so, by
    FasterMoE's own rule; spill: what overloads a rank goes to idle ones; least_loaded: spill with no regard to time; eplb,
    lplb, laer: those systems' rules, to compare with; arbiter: none, shadow, spill, both, another gather_weights or the smart
    schedule, whichever is fastest by the cost model, which measured times correct."""
    memory_budget: int | None = None
    """Most bytes that one call of a layer holds on a rank, forward and backward, however routing is skewed: rows, messages,
    what experts keep and need, gradients of the experts; not parameters, input or router. What is beyond it goes to helpers
    under plans that replicate, else the call runs in slices, of which as many as fit are kept for backward and the others are
    recomputed. None: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_replication("plan", self.replication, self.memory_budget)

    @property
    def replicates(self) -> bool:
        """Whether copies may be computed by other ranks than their experts' homes."""
        return self.replication != NO_REPLICATION


def plan_in_words(plan: Plan) -> str:
    """Return what of a plan is not the plain one."""
    words: list[str] = [plan.schedule, plan.all_to_all]
    words += [f"{plan.chunks} chunks"] * (plan.chunks > 1) + ["fused"] * plan.fuse
    words += [] if plan.gather_weights is None else [f"r = {plan.gather_weights}"]
    words += [f"{plan.peer_groups} peer groups"] * (plan.peer_groups > 1) + ["overlapped gather"] * plan.overlap_gather
    words += [f"{plan.codec} forward"] * is_coded(plan.codec)
    words += [f"{plan.backward_codec} backward"] * is_coded(plan.backward_codec)
    words += [f"replication {plan.replication}"] * plan.replicates
    words += [] if plan.memory_budget is None else [f"at most {plan.memory_budget} bytes"]
    return ", ".join([*words, *([plan.order] if plan.order != Plan().order else [])])


def check_replication(where: str, replication: str, memory_budget: int | None) -> None:
    """Refuse an unknown policy and a budget below one copy.

    Args:
        where: the section that holds the two fields, for the message.
        replication: name of a policy.
        memory_budget: bytes per rank, or None.

    Raises:
        InputError: for either.
    """
    known = (NO_REPLICATION, *REPLICATION_POLICIES)
    if replication not in known:
        raise InputError(f"{where}.replication={replication!r} is unknown: choose one of {', '.join(known)}")
    if memory_budget is not None and memory_budget < 1:
        raise InputError(
            f"{where}.memory_budget={memory_budget}: choose bytes per rank, at least 1, or leave it unset for no limit"
        )


def _check_kinds(plan: StaticPlan) -> None:
    """Refuse a field whose value is of another kind than its annotation says; whole numbers of NumPy become Python's."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.type == "bool":
            fits, wanted = isinstance(value, bool), "True or False"
        elif field.type in ("int", "int | None"):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            fits, wanted = whole or (value is None and field.type != "int"), "a whole number"
            if whole:
                object.__setattr__(plan, field.name, int(value))
        else:
            fits, wanted = isinstance(value, str), "a name, as text"
        if not fits:
            raise InputError(f"plan.{field.name}={value!r}: must be {wanted}")
