"""Issue every movement as soon as what it reads is there, and compute in the order of the chunks meanwhile.

For equal chunks this is ScheMoE's OptSche (Shi et al., EuroSys 2024, section 4): all dispatches first, then expert by expert,
each result sent off at once. It is derived from the dependencies, so backward programs and every pass are ordered alike.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Op, Program


def early(program: Program) -> Program:
    """Return the program with its tasks in that order; the same on all ranks, since it reads nothing but the program."""
    have = set(program.inputs)
    waiting = list(program.tasks)
    ordered = []
    while waiting:
        ready = [task for task in waiting if have.issuperset(task.reads)]
        assert ready, f"{program.name}: tasks wait for each other: {', '.join(task.name for task in waiting)}"
        chosen = min(
            ready, key=lambda task: (task.op is not Op.MOVE, _chunk(program, task.reads[0]), waiting.index(task))
        )
        waiting.remove(chosen)
        ordered.append(chosen)
        have.update(chosen.writes)
    return replace(program, tasks=tuple(ordered))


def _chunk(program: Program, name: str) -> int:
    chunk = program.slot(name).layout.chunk
    return -1 if chunk is None else chunk
