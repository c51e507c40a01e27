"""Orders: functions that choose the sequence in which the tasks of a program are issued.

An order permutes tasks, respects their dependencies, and changes nothing else. All ranks must choose the same order, so
it may use only the program and durations that all ranks agreed on, and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from moesaic.program.order.exact import exact
from moesaic.program.order.graph import early, fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.task import Program


class TaskOrder(Protocol):
    """A function that reorders the tasks of a program."""

    def __call__(
        self,
        program: Program,
        seconds: Callable[[], Mapping[str, float]] | None = None,
        *,
        host_runs_compute: bool = False,
    ) -> Program:
        """Return the program in this order.

        Args:
            program: a forward or backward program.
            seconds: returns the duration of each task by name, identical on all ranks. Called only by orders that use
                durations.
            host_runs_compute: see `lay_out`.
        """


ORDERS: dict[str, TaskOrder] = {
    "fifo": fifo,
    "early": early,
    "optsche": optsche,
    "exact": exact,
}
"""All orders, by the name that a plan uses."""
