"""Process number 1 of a bed: creates the network and starts ranks in it. When it ends, the whole
bed ends.

A bed is a process namespace of its own. When its process number 1 ends, the kernel kills every
other process inside. With the last process, the network namespaces and their links disappear. So
nothing has to be cleaned up, however the parent ends.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing import process, spawn
from typing import Any

from moesaic_testbed.bed import Bed
from moesaic_testbed.messages import (
    Answer,
    Channel,
    Command,
    Count,
    Failure,
    RunFunction,
    RunInside,
)
from moesaic_testbed.rank import failure_of
from moesaic_testbed.round import CommandRound, FunctionRound
from moesaic_testbed.wiring import Wiring, WiringError

FIRST_PORT = 29500
NUM_PORTS = 1000


class Supervisor:
    """Serves the requests of one parent on one bed.

    Raises:
        WiringError: if the network cannot be created.
    """

    def __init__(self, channel: Channel, bed: Bed) -> None:
        self._channel = channel
        self._bed = bed
        self._wiring = Wiring(bed)
        self._rounds = 0

    def serve(self) -> None:
        """Answer the parent's requests until it closes the socket."""
        while True:
            try:
                request, files = self._channel.receive()
                answer = self._answer(request, files)
            except WiringError as error:
                answer = Answer(failure=Failure(reason=str(error)))
            except EOFError:
                return
            for file in files:
                os.close(file)
            self._channel.send(answer)

    def _answer(self, request: object, files: list[int]) -> Answer:
        """Return the answer to a request; `files` are the ranks' standard output and error."""
        # another port for each run: that of the last one may not be free yet
        port = FIRST_PORT + self._rounds % NUM_PORTS
        self._rounds += 1
        if isinstance(request, RunFunction):
            try:
                function, arguments = _load(request)
            except BaseException as error:
                return Answer(failure=failure_of(None, error))
            if isinstance(request, RunInside):
                return _called(function, (self._wiring, *arguments))
            return FunctionRound(
                self._wiring,
                self._channel,
                port=port,
                output=files,
                threads=request.threads,
                function=function,
                arguments=arguments,
            ).run()
        if isinstance(request, Command):
            return CommandRound(self._wiring, self._channel, port, files, request).run()
        if isinstance(request, Count):
            return Answer(value=self._wiring.traffic())
        return Answer()


def _called(function: Any, arguments: tuple[Any, ...]) -> Answer:
    """Return the answer with a function's result."""
    try:
        return Answer(value=[pickle.dumps(function(*arguments))])
    except BaseException as error:
        return Answer(failure=failure_of(None, error))


def _load(request: RunFunction) -> tuple[Any, tuple[Any, ...]]:
    """Unpickle the function and its arguments. Before ranks are forked, its imports thus run only
    once."""
    sys.path[:] = request.path
    os.chdir(request.cwd)
    if request.main is not None:
        here = process.current_process()
        # gives a script without a main guard the error of multiprocessing
        here._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(dict(request.main))
        finally:
            del here._inheriting  # type: ignore[attr-defined]
    function, arguments = pickle.loads(request.call)
    return function, arguments
