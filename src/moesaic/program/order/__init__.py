"""Orders: functions that choose the sequence in which the tasks of a program are issued.

An order permutes tasks, respects their dependencies, and changes nothing else. All ranks must
choose the same order, so it may use only the program, and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from moesaic.program.order.graph import early, fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.task import Program

ORDERS: dict[str, Callable[[Program], Program]] = {"fifo": fifo, "early": early, "optsche": optsche}
"""All orders, by the name that a plan uses."""
