"""The kinds of faults, and schedules of faults drawn from a seed, so that a schedule can be
repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import InputError, suggestion
from moesaic_lab.system_calls import can_watch, require_watching

WORLD = 4
RANKS_PER_NODE = 2
INTERVAL = 2
"""Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A kind of fault."""

    summary: str
    ways: tuple[str, ...] = ("",)
    """Variants of the fault; the schedule goes through them in turn."""
    is_fatal: bool = True
    """Whether the fault ends the run; otherwise the run must continue unchanged. `Fault.is_fatal`
    also depends on the way."""
    needs_bed: bool = False
    """Whether the fault requires an emulated cluster."""
    is_of_writes: bool = False
    """Whether the fault strikes at a write of a command on one or two ranks; see `struck`."""


KINDS = {
    "forward": FaultKind(summary="SIGKILL between two messages of a layer's forward pass"),
    "backward": FaultKind(summary="SIGKILL between two messages of a layer's backward pass"),
    "optimizer": FaultKind(
        summary="SIGKILL before or after the optimizer's update", ways=("before", "after")
    ),
    "save": FaultKind(summary="SIGKILL at a file-system event of a save"),
    "startup": FaultKind(
        summary=(
            "SIGKILL or SIGSTOP at an instant of the start, where rank 0 keeps the ranks' store too"
        ),
        ways=("killed", "killed, no store", "stopped", "stopped, no store"),
    ),
    "hangup": FaultKind(
        summary="SIGHUP, as from a terminal that closes",
        ways=("one rank", "all ranks"),
        is_fatal=False,
    ),
    "stop": FaultKind(
        summary="SIGSTOP, with SIGCONT in time or never", ways=("continued", "for good")
    ),
    "cut": FaultKind(
        summary="a node's link is cut, for a while or for good",
        ways=("mended", "for good"),
        needs_bed=True,
    ),
    "slow": FaultKind(
        summary="a node's link has a hundredth of its rate", is_fatal=False, needs_bed=True
    ),
    "flap": FaultKind(
        summary="a node's link goes and comes ten times", is_fatal=False, needs_bed=True
    ),
    "disk": FaultKind(
        summary="no space, or no right to a larger file, when a checkpoint is written"
    ),
    "damage": FaultKind(
        summary="a file of the newest checkpoint is damaged between two runs",
        ways=("bit", "cut", "zeros", "removed", "longer"),
        is_fatal=False,
    ),
    "strangers": FaultKind(
        summary="callers at every port that the ranks open",
        ways=("garbage", "silence", "trickle", "hang up"),
        is_fatal=False,
    ),
    "restart": FaultKind(
        summary=(
            "SIGKILL, then all ranks start anew on the same store, as torchrun --max-restarts does"
        )
    ),
    "clock": FaultKind(
        summary="the wall clock jumps by up to nine years at every look", is_fatal=False
    ),
    "finetune": FaultKind(
        summary="a signal or SIGKILL at a write of a save of `moesaic finetune`",
        ways=("SIGKILL", "SIGTERM", "SIGKILL", "SIGINT", "SIGKILL", "SIGHUP"),
        is_of_writes=True,
    ),
    "output": FaultKind(
        summary="the reader of a command's output ends, or the disk of its log is full",
        ways=(
            "train, reader gone",
            "finetune, disk full",
            "train, disk full",
            "finetune, reader gone",
        ),
        is_fatal=False,
        is_of_writes=True,
    ),
}
"""Kinds of faults by name."""
SURVIVED = ("continued", "mended")
"""Ways of fatal kinds that a run survives nevertheless."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault in a schedule."""

    number: int
    """Position in the schedule; also seeds the fault's own random choices."""
    kind: str
    """Key of `KINDS`."""
    way: str
    """One of the ways of its kind."""
    rank: int
    """Rank that is hit; for faults of links, a rank of the node that is hit."""
    after: int
    """Steps between the newest checkpoint at the start of the attempt and the fault."""
    chance: float
    """From 0 to 1: selects the instant, file or size within what the kind allows."""

    @property
    def is_fatal(self) -> bool:
        """Whether the fault must end the run."""
        return KINDS[self.kind].is_fatal and self.way not in SURVIVED

    @property
    def is_stop(self) -> bool:
        """Whether the rank that is hit is stopped for good."""
        can_stop = self.kind in ("stop", "startup") and not self.way.startswith("killed")
        return can_stop and self.is_fatal

    @property
    def has_store(self) -> bool:
        """Whether a process of the launcher keeps the ranks' store; otherwise rank 0 does."""
        return not self.way.endswith("no store")

    @property
    def node(self) -> int:
        """Node of the rank that is hit."""
        return self.rank // RANKS_PER_NODE


def draw_faults(count: int, seed: int, kinds: Sequence[str]) -> list[Fault]:
    """Return `count` faults, evenly spread over `kinds`; the seed decides their order, ranks and
    instants."""
    draw = random.Random(seed)
    order = []  # (kind, its way)
    for number in range(count):
        turn, place = divmod(number, len(kinds))
        kind = kinds[place]
        ways = KINDS[kind].ways
        order.append((kind, ways[turn % len(ways)]))
    draw.shuffle(order)

    faults = []
    for number, (kind, way) in enumerate(order):
        rank = draw.randrange(WORLD)
        after = draw.randint(1, 2 * INTERVAL)
        chance = draw.random()
        faults.append(
            Fault(number=number, kind=kind, way=way, rank=rank, after=after, chance=chance)
        )
    return faults


def kinds_of(asked: Sequence[str], on_bed: bool) -> list[str]:
    """Return the kinds in `asked`, or all kinds that are possible here if it is empty.

    Args:
        asked: names of kinds.
        on_bed: whether the runs take place on an emulated cluster.

    Raises:
        InputError: for an unknown kind, or for one that requires an emulated cluster if there is
            none.
    """
    for name in asked:
        if name not in KINDS:
            raise InputError(f"--kinds {name}: unknown{suggestion(name, list(KINDS))}")
        if KINDS[name].is_of_writes:
            require_watching()
        if KINDS[name].needs_bed and not on_bed:
            raise InputError(
                f"--kinds {name}: needs an emulated cluster, which this machine cannot make: "
                "leave it out"
            )
    if asked:
        return list(asked)
    possible = []
    for name, kind in KINDS.items():
        lacks_bed = kind.needs_bed and not on_bed
        lacks_watching = kind.is_of_writes and not can_watch()
        if not lacks_bed and not lacks_watching:
            possible.append(name)
    return possible
