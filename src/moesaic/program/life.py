"""When the slots of a program are born and when they die, as its executor runs it.

A slot is a named value of a program. Tasks read and write slots; a move or a hop does so by
messages. A program runs in steps: one task, or movements that are sent as one message per peer. A
slot that a task computes is born in the task's step. One that messages bring is in flight until a
step reads it; it is born just before that step, with all other slots of the same messages. A slot
dies after the last step that reads or writes it, unless the caller asks for it.

The executor frees memory by this walk, and the models of memory of the runtime and of the planner
count it (`call_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from moesaic.program.joined_messages import bundles
from moesaic.program.task import Lane, Op, Program, Task
from moesaic.program.transpose import SUFFIX

STORED = "w"
"""The slot of the experts' parameters, which are stored anyway and never die: every movement of
weights reads their shape."""


def kept(task_name: str) -> str:
    """Return the name of what an expert task keeps for backward besides its slots, given the name
    of the task or of its gradient task."""
    return f"{task_name.removesuffix(SUFFIX)}*"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tasks that start together, and the lives that begin and end with them."""

    number: int
    """The place of the first task in the program, which is also the offset of its tag."""
    tasks: tuple[Task, ...]
    """One task, or movements whose rows are sent in one message per peer."""
    reads: tuple[str, ...]
    """Slots that the tasks read."""
    lands: tuple[int, ...]
    """Steps, by their place among the steps, whose messages arrive before this one, in order."""
    born: tuple[str, ...]
    """What the tasks make: slots, which are in flight if the tasks send, and what experts keep."""
    dies: tuple[str, ...]
    """What no later step reads, and the caller does not ask for."""
    sends: bool
    """Whether the tasks send messages."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The steps of a program."""

    steps: tuple[Step, ...]
    lands: tuple[int, ...]
    """Steps whose messages arrive after the last one, in order."""

    @cached_property
    def slowest(self) -> Lane:
        """The lane whose messages take longest: between nodes if any message crosses nodes."""
        between = any(step.tasks[0].lane is not Lane.INTRA for step in self.steps if step.sends)
        return Lane.INTER if between else Lane.INTRA

    @cached_property
    def pauses(self) -> frozenset[int]:
        """The steps before which a run may pause, as places in `steps`: the first that waits for
        messages of the slowest lane, and the first that does so after the last expert task."""
        waiting = list[int]()
        last_expert = -1  # before all steps, if there is no expert task
        for place, step in enumerate(self.steps):
            lanes = [self.steps[sender].tasks[0].lane for sender in step.lands]
            # lanes differ only by whether they are inside nodes: all others count as one
            if any((lane is Lane.INTRA) == (self.slowest is Lane.INTRA) for lane in lanes):
                waiting.append(place)
            if step.tasks[0].op in (Op.EXPERT, Op.EXPERT_GRAD):
                last_expert = place
        waiting_after_experts = [place for place in waiting if place > last_expert]
        return frozenset(waiting[:1] + waiting_after_experts[:1])


@lru_cache(maxsize=512)
def life_of(program: Program, outputs: frozenset[str] | None) -> Life:
    """Return the steps of a program in the order in which it runs.

    Args:
        program: the program.
        outputs: names that live to the end; None for all of them.
    """
    numbers_of_steps = bundles(program)
    tasks_of_steps = [
        tuple(program.tasks[number] for number in numbers) for numbers in numbers_of_steps
    ]
    dies = _deaths(tasks_of_steps, outputs)
    steps = []
    sent_by: dict[str, int] = {}  # a slot in flight -> the place of the step that sent it
    for place, tasks in enumerate(tasks_of_steps):
        reads = tuple(name for task in tasks for name in task.reads)
        senders = [sent_by[name] for name in reads if name in sent_by]
        lands = tuple(dict.fromkeys(senders))  # each once, in order
        sent_by = {name: sender for name, sender in sent_by.items() if sender not in lands}
        step = Step(
            number=numbers_of_steps[place][0],
            tasks=tasks,
            reads=reads,
            lands=lands,
            born=tuple(name for task in tasks for name in _born(task)),
            dies=tuple(dies[place]),
            sends=tasks[0].op in (Op.MOVE, Op.HOP),
        )
        steps.append(step)
        if step.sends:
            sent_by |= dict.fromkeys(step.born, place)
    return Life(steps=tuple(steps), lands=tuple(dict.fromkeys(sent_by.values())))


def _deaths(
    tasks_of_steps: list[tuple[Task, ...]], outputs: frozenset[str] | None
) -> list[list[str]]:
    """Return for each step the names that die after it; arguments as of `life_of`."""
    dies: list[list[str]] = [[] for _ in tasks_of_steps]
    if outputs is None:
        return dies
    for name, place in _last_uses(tasks_of_steps).items():
        if name != STORED and name not in outputs:
            dies[place].append(name)
    return dies


def _last_uses(tasks_of_steps: list[tuple[Task, ...]]) -> dict[str, int]:
    """Return for each name the place of the last step that reads or makes it."""
    last_use: dict[str, int] = {}
    for place, tasks in enumerate(tasks_of_steps):
        for task in tasks:
            for name in (*task.reads, *_born(task)):
                last_use[name] = place
            if task.op is Op.EXPERT_GRAD:  # reads what its expert task kept
                last_use[kept(task.name)] = place
    return last_use


def _born(task: Task) -> tuple[str, ...]:
    """Return the names of what a task makes."""
    return (*task.writes, kept(task.name)) if task.op is Op.EXPERT else task.writes
