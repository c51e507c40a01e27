"""The machines on which torchrun has started the ranks of a run, and what each of them prints: the
first rank's progress is seen on its own machine alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import in_one_line


@dataclass(frozen=True)
class Machine:
    """This rank's machine, one of several."""

    command: str
    """What the machine's lines begin with."""
    number: int
    """From 0 on, as torchrun numbers its agents."""
    local_rank: int
    """This rank's number on the machine."""
    ranks: range
    """The ranks of the run that are on the machine."""
    world: int

    @classmethod
    def of_several(cls, command: str) -> Machine | None:
        """Return this rank's machine, whose lines begin with `command`; None if torchrun has not
        started ranks on several ones."""
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
            return None
        local_rank = int(os.environ["LOCAL_RANK"])
        first = int(os.environ["RANK"]) - local_rank
        return cls(
            command=command,
            number=int(os.environ["GROUP_RANK"]),
            local_rank=local_rank,
            ranks=range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])),
            world=int(os.environ["WORLD_SIZE"]),
        )

    def say_waits(self) -> None:
        """Say that the ranks of the machine wait for the others."""
        ranks = f"{self.ranks[0]}-{self.ranks[-1]}"
        noun = "ranks"
        if len(self.ranks) == 1:
            ranks = str(self.ranks[0])
            noun = "rank"
        self._say(f"{noun} {ranks} of {self.world}, waiting for the other machines' ranks")

    def say_met(self, host_of_first: str) -> None:
        """Say that all ranks have met, where the first rank does not say how it goes on."""
        if self.ranks[0] != 0:
            self._say(f"all ranks have met; {host_of_first} shows the progress")

    def say_ended(self, *, was_stopped: bool) -> None:
        """Say how the run has ended, where the first rank does not say it."""
        if self.ranks[0] != 0:
            how = "was stopped, and is saved" if was_stopped else "is done"
            self._say(f"the run {how}")

    def ends_torchrun(self, was_asked: Sequence[tuple[int, bool]]) -> bool:
        """Return whether the torchrun of this machine must be ended: only others were asked to end.
        It would wait for them for five minutes, although they have not waited for it.

        Args:
            was_asked: for each rank the number of its machine, and whether it got a signal to end;
                torchrun passes one on to all its ranks.
        """
        asked: dict[int, bool] = {}
        for number, is_asked in was_asked:
            asked[number] = asked.get(number, True) and is_asked
        return any(asked.values()) and not asked[self.number]

    def _say(self, line: str) -> None:
        """Print a line, on the first rank of the machine."""
        if self.local_rank == 0:
            text = f"{self.command}: machine {socket.gethostname()}: {line}"
            print(in_one_line(text), flush=True)


def once_all_ended() -> str:
    """Return the words that say when a stopped run can go on: with the same port, a new torchrun
    would join an old one that still runs. None are needed on one machine."""
    if Machine.of_several("") is None:
        return ""
    return "once torchrun has ended on every machine, "
