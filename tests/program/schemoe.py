"""ScheMoE's model of a layer as a program, and slow searches for its best order that share no code with the fast one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Stage, Task

PASSES = ("C1", "A1", "D1", "E", "C2", "A2", "D2")
MOVED = ("A1", "A2")
_STAGES = dict(zip(PASSES, (Stage.DISPATCH,) * 3 + (Stage.EXPERT,) + (Stage.COMBINE,) * 3))


def schemoe(num_chunks: int) -> Program:
    """Return the seven tasks of each chunk, chunk after chunk; the paper's only communication lane is `inter`."""
    tasks, slots = [], []
    for chunk in range(num_chunks):
        names = [f"x.{chunk}", *(f"{word}.{chunk}" for word in PASSES)]
        slots += [Slot(name=name, kind=Kind.ROWS, layout=Layout(chunk=chunk)) for name in names]
        for word, source, target in zip(PASSES, names, names[1:]):
            moves = word in MOVED
            tasks.append(
                Task(
                    name=target,
                    op=Op.MOVE if moves else Op.ADD,
                    reads=(source,),
                    writes=(target,),
                    stage=_STAGES[word],
                    lane=Lane.INTER if moves else Lane.COMPUTE,
                    group=("ep",) if moves else (),
                )
            )
    return Program(
        name=f"schemoe {num_chunks}",
        slots=tuple(slots),
        tasks=tuple(tasks),
        inputs=tuple(f"x.{chunk}" for chunk in range(num_chunks)),
        outputs=tuple(f"D2.{chunk}" for chunk in range(num_chunks)),
    )


def durations_of(rng: random.Random, num_chunks: int, *, equal_chunks: bool, equal_passes: bool) -> dict[str, float]:
    """Return random durations. With equal passes, C1 = C2, A1 = A2 and D1 = D2."""
    seconds: dict[str, float] = {}
    for chunk in range(num_chunks):
        for word in PASSES:
            first = f"{word}.0"
            twin = f"{word[0]}1.{chunk}"
            if equal_chunks and chunk:
                length = seconds[first]
            elif equal_passes and word[1:] == "2":
                length = seconds[twin]
            else:
                length = rng.choice((rng.uniform(0.1, 1), rng.uniform(1, 4)))
            seconds[f"{word}.{chunk}"] = length
    return seconds


def best_of_lane_orders(seconds: dict[str, float]) -> float:
    """Return the smallest makespan over all pairs of a compute order and a communication order of two chunks."""
    best = float("inf")
    for compute in merges([f"{word}.0" for word in PASSES if word not in MOVED], 1):
        for moves in merges([f"{word}.0" for word in MOVED], 1):
            best = min(best, _run_lanes(seconds, [compute, moves]))
    return best


def merges(first: list[str], other: int) -> Iterator[list[str]]:
    """Yield all merges of one chunk's chain with the same chain of another chunk."""
    second = [f"{name.split('.')[0]}.{other}" for name in first]
    total = len(first) + len(second)
    for places in combinations(range(total), len(first)):
        one, two = iter(first), iter(second)
        yield [next(one) if place in places else next(two) for place in range(total)]


def _run_lanes(seconds: dict[str, float], lanes: list[list[str]]) -> float:
    """Return the makespan of queues whose tasks wait for each other; infinity if they deadlock."""
    ends: dict[str, float] = {}
    free, positions = [0.0] * len(lanes), [0] * len(lanes)
    progress = True
    while progress:
        progress = False
        for lane, queue in enumerate(lanes):
            while positions[lane] < len(queue):
                word, chunk = queue[positions[lane]].split(".")
                place = PASSES.index(word)
                before = f"{PASSES[place - 1]}.{chunk}"
                if place and before not in ends:
                    break
                free[lane] = max(free[lane], ends.get(before, 0.0) if place else 0.0) + seconds[queue[positions[lane]]]
                ends[queue[positions[lane]]] = free[lane]
                positions[lane] += 1
                progress = True
    return max(free) if len(ends) == len(seconds) else float("inf")


def best_of_all_merges(seconds: dict[str, float], num_chunks: int) -> float:
    """Return the smallest makespan by dynamic programming over the progress of each chunk, keeping all Pareto states."""
    layers = {(0,) * num_chunks: {(0.0, 0.0, *(0.0,) * num_chunks)}}
    for _ in range(len(PASSES) * num_chunks):
        reached: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
        for progress, states in layers.items():
            for state in states:
                for chunk in range(num_chunks):
                    if progress[chunk] < len(PASSES):
                        word = PASSES[progress[chunk]]
                        lane = int(word in MOVED)
                        times = list(state)
                        times[lane] = times[2 + chunk] = max(state[lane], state[2 + chunk]) + seconds[f"{word}.{chunk}"]
                        after = tuple(steps + (number == chunk) for number, steps in enumerate(progress))
                        reached.setdefault(after, set()).add(tuple(times))
        layers = {progress: _pareto(states) for progress, states in reached.items()}
    (states,) = layers.values()
    return min(max(state) for state in states)


def _pareto(states: set[tuple[float, ...]]) -> set[tuple[float, ...]]:
    best: list[tuple[float, ...]] = []
    for state in sorted(states):
        if not any(all(a <= b for a, b in zip(other, state)) for other in best):
            best.append(state)
    return set(best)


def random_program(rng: random.Random, num_tasks: int, lanes: tuple[Lane, ...]) -> Program:
    """Return a program whose tasks depend on each other at random, on random lanes."""
    tasks: list[Task] = []
    slots = [Slot(name="x", kind=Kind.ROWS, layout=Layout())]
    for number in range(num_tasks):
        reads = tuple(task.name for task in tasks if rng.random() < 1.3 / num_tasks) or ("x",)
        lane, stage = rng.choice(lanes), rng.choice((Stage.DISPATCH, Stage.EXPERT, Stage.COMBINE))
        op = Op.MOVE if lane in (Lane.INTRA, Lane.INTER) else Op.ADD
        group = ("ep",) if op is Op.MOVE else ()
        name = f"t{number}"
        slots.append(Slot(name=name, kind=Kind.ROWS, layout=Layout(chunk=rng.randrange(2))))
        tasks.append(Task(name=name, op=op, reads=reads, writes=(name,), stage=stage, lane=lane, group=group))
    return Program(name="random", slots=tuple(slots), tasks=tuple(tasks), inputs=("x",), outputs=(tasks[-1].name,))
