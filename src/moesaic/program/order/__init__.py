"""Orders: in which sequence the tasks of a program are issued; the dependencies stay.

An order permutes tasks and changes nothing else. Every rank must choose the same one: an order reads the program and
durations that all ranks agreed on, and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from moesaic.program.order.exact import exact
from moesaic.program.order.graph import early, fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.task import Program


class TaskOrder(Protocol):
    """A function that puts the tasks of a program in another sequence."""

    def __call__(
        self,
        program: Program,
        seconds: Callable[[], Mapping[str, float]] | None = None,
        *,
        host_runs_compute: bool = False,
    ) -> Program:
        """Return the program in this order.

        Args:
            program: forward or backward.
            seconds: returns the duration of each task by name, the same on all ranks; only an order that reads durations
                asks for them.
            host_runs_compute: as of `lay_out`.
        """


ORDERS: dict[str, TaskOrder] = {
    "fifo": fifo,
    "early": early,
    "optsche": optsche,
    "exact": exact,
}
"""By the name in a plan."""
