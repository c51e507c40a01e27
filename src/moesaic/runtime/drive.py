"""The driver: run a rank's interpreter on its wire."""

from __future__ import annotations

from moesaic.comm.wire import AbstractWire, Ticket, Transfer
from moesaic.runtime.call import Environment
from moesaic.runtime.interpret import Steps


def drive(steps: Steps, wire: AbstractWire) -> Environment:
    """Run one rank to its end on a wire that blocks, as each process of a real world does."""
    answer: Ticket | None = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            result: Environment = end.value
            return result
        if isinstance(request, Transfer):
            answer = wire.issue(request)
        else:
            wire.wait(request)
            answer = None
