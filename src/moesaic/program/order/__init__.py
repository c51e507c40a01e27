"""Orders: in which sequence the tasks of a program are issued; the dependencies stay.

An order permutes tasks and changes nothing else. Every rank must choose the same one: an order reads the program and
durations that all ranks agreed on, and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moesaic.program.order.early import early
from moesaic.program.order.exact import exact
from moesaic.program.order.fifo import fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.task import Program

ORDERS: dict[str, Callable[[Program, Mapping[str, float] | None], Program]] = {
    "fifo": fifo,
    "early": early,
    "optsche": optsche,
    "exact": exact,
}
"""By the name in a plan. Each takes a program and the duration of its tasks by name, in seconds, or None."""
