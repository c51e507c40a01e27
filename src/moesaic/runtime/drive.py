"""The driver: run a rank's interpreter on its transport."""

from __future__ import annotations

from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.runtime.call import Environment
from moesaic.runtime.interpret import Steps


def drive(steps: Steps, transport: AbstractTransport) -> Environment:
    """Run one rank to its end on a transport that blocks, as each process of a real world does."""
    answer: Handle | None = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            result: Environment = end.value
            return result
        answer = transport.issue(request) if isinstance(request, Transfer) else transport.wait(request)
        del request  # its messages need not live until the next one
