"""Drivers: run interpreters on a wire, one rank per process or all ranks in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moesaic.comm.loopback import Loopback
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


def drive_all(runs: Sequence[Steps], wire: Loopback, seed: int = 0) -> list[Environment]:
    """Run all ranks in one process, advancing a random one of those that can go on.

    Args:
        runs: one interpreter per rank.
        wire: the mailbox.
        seed: of the order in which ranks advance.

    Raises:
        RuntimeError: if no rank can go on: the program would hang on a real world.
    """
    rng = random.Random(seed)
    answers: dict[int, Ticket | None] = dict.fromkeys(range(len(runs)))
    waiting: dict[int, Ticket] = {}
    results: dict[int, Environment] = {}
    while len(results) < len(runs):
        able = [r for r in range(len(runs)) if r not in results and (r not in waiting or wire.is_ready(waiting[r]))]
        if not able:
            raise RuntimeError(f"ranks {sorted(waiting)} wait for messages that nobody sends")
        rank = rng.choice(able)
        if rank in waiting:
            wire.wait(waiting.pop(rank))
            answers[rank] = None
        try:
            request = runs[rank].send(answers[rank])
        except StopIteration as end:
            results[rank] = end.value
            continue
        if isinstance(request, Transfer):
            answers[rank] = wire.issue(request)
        else:
            waiting[rank] = request
    return [results[rank] for rank in range(len(runs))]
