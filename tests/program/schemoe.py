"""ScheMoE's model of a layer as a program, and a slow search for its best order that shares no code
with the fast one."""

from __future__ import annotations

import random

from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Stage, Task

PASSES = ("C1", "A1", "D1", "E", "C2", "A2", "D2")
MOVED = ("A1", "A2")
_STAGES = dict(zip(PASSES, (Stage.DISPATCH,) * 3 + (Stage.EXPERT,) + (Stage.COMBINE,) * 3))


def schemoe(num_chunks: int) -> Program:
    """Return the seven tasks of each chunk, chunk after chunk; the paper's only communication lane
    is `inter`."""
    tasks = []
    slots = []
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


def durations_of(rng: random.Random, num_chunks: int) -> dict[str, float]:
    """Return random durations, equal for all chunks, with C1 = C2, A1 = A2 and D1 = D2."""
    lengths = {kind: rng.choice((rng.uniform(0.1, 1), rng.uniform(1, 4))) for kind in "CADE"}
    return {f"{word}.{chunk}": lengths[word[0]] for chunk in range(num_chunks) for word in PASSES}


def best_of_all_merges(seconds: dict[str, float], num_chunks: int) -> float:
    """Return the smallest makespan by dynamic programming over the progress of each chunk, keeping
    all Pareto states."""
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
                        times[lane] = times[2 + chunk] = (
                            max(state[lane], state[2 + chunk]) + seconds[f"{word}.{chunk}"]
                        )
                        after = tuple(
                            steps + (number == chunk) for number, steps in enumerate(progress)
                        )
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
        lane = rng.choice(lanes)
        stage = rng.choice((Stage.DISPATCH, Stage.EXPERT, Stage.COMBINE))
        op = Op.MOVE if lane in (Lane.INTRA, Lane.INTER) else Op.ADD
        group = ("ep",) if op is Op.MOVE else ()
        name = f"t{number}"
        slots.append(Slot(name=name, kind=Kind.ROWS, layout=Layout(chunk=rng.randrange(2))))
        tasks.append(
            Task(name=name, op=op, reads=reads, writes=(name,), stage=stage, lane=lane, group=group)
        )
    return Program(
        name="random",
        slots=tuple(slots),
        tasks=tuple(tasks),
        inputs=("x",),
        outputs=(tasks[-1].name,),
    )
