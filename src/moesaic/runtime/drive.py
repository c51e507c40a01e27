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
        answer = wire.issue(request) if isinstance(request, Transfer) else wire.wait(request)
        del request  # its messages need not live until the next one
