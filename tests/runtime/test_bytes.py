"""Bytes on the wire: the recorder misses none, and the computed volumes of programs equal the bytes
sent, task by task.

Routing is that of a random router, so counts are ragged. Rows, routing weights, indices, hidden
units and biases all count, forward and backward, with and without lowering.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from meshes import DIM, compiled, every_rank, make_layer, on_mesh, tokens_of
from torch import Tensor

from helpers import thinned
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace
from moesaic.planner.movement import coded_bytes
from moesaic.program.all_to_all.volume import messages_of, traffic
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.joined_messages import bundles
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op
from moesaic.routing.losses import LoadBalance
from moesaic_lab.recorder import Recorder

COLUMNS = {"swiglu": 3 * DIM, "biases": 2 * DIM + 1, "modules": 2 * 6 * DIM + 6 + DIM}
"""How many numbers a row of packed weights has: those of a hidden unit, or of a whole expert that
is sent as one row."""


def draw(rng: random.Random) -> tuple[Compiled, str]:
    while True:
        world = rng.choice([2, 4, 4, 8])
        sizes = [size for size in (1, 2, 4) if world % size == 0]
        pairs = [(p, s) for p in sizes for s in sizes if world % (p * s) == 0 and s <= 2]
        ep, etp = rng.choice(pairs)
        kind = rng.choice([*COLUMNS] if etp == 1 else ["swiglu", "biases"])
        try:
            grid = Grid(
                world=world,
                tp=rng.choice(sizes),
                ep=ep,
                etp=etp,
                innermost=rng.choice(["etp", "ep"]),
                ranks_per_node=rng.choice([1, 2, world]),
            )
            plan = Plan(
                schedule=rng.choice([*SCHEDULES]),
                fuse=rng.random() < 0.2,
                gather_weights=rng.choice([None, None, 0, 1]),
                chunks=rng.choice([1, 2]),
                peer_groups=rng.choice([1, 1, 2]),
                overlap_gather=rng.random() < 0.2,
                all_to_all=rng.choice([*SearchSpace().all_to_alls, "multicast"]),
                order=rng.choice(["fifo", "early", "optsche"]),  # type: ignore[arg-type]
            )
            return compiled(plan, grid, kind), kind
        except InputError:
            continue


def run(
    work: Compiled, kind: str, seed: int = 0
) -> tuple[list[Recorder], CallSizes, dict[tuple[int, int], int]]:
    """Run forward and backward; return what each rank sent, the call's sizes, and the bytes counted
    by the mailbox."""
    whole = make_layer(kind, losses=(LoadBalance(0.1),))
    found: list[Any] = []

    def rank(transport: AbstractTransport) -> Recorder:
        recorder = Recorder(transport)
        layer = on_mesh(whole, work.grid, recorder, work)  # type: ignore[arg-type]
        tables_of = layer.on_mesh._tables
        layer.on_mesh._tables = lambda *a: found.append(tables_of(*a)) or found[-1]  # type: ignore[method-assign, func-returns-value]
        x = tokens_of(
            work.grid.coordinate(transport.rank, "dp"),
            count=5 + work.grid.coordinate(transport.rank, "dp"),
            seed=seed,
        )
        layer(x.requires_grad_()).sin().sum().backward()
        found.append(transport.mailbox.bytes_sent)  # type: ignore[attr-defined]
        return recorder

    recorders = run_ranks(work.grid.world, rank, seed=seed)
    return recorders, next(each[0] for each in found if isinstance(each, tuple)), found[-1]


def sent_by_task(
    work: Compiled, recorders: list[Recorder], node_of: Any
) -> Counter[tuple[str, str, bool]]:
    """Return the bytes of all ranks by (direction, task, whether they cross nodes)."""
    tasks = [("forward", t.name) for t in work.forward.tasks] + [
        ("backward", t.name) for t in work.backward.tasks
    ]
    found: Counter[tuple[str, str, bool]] = Counter()
    for recorder in recorders:
        (of_program,) = [each for each in recorder.ranges if each.length == len(tasks)]
        for sent in of_program.messages:
            found[(*tasks[sent.tag], node_of(sent.source) != node_of(sent.target))] += (
                sent.num_bytes
            )
    return found


@pytest.mark.parametrize("seed", thinned(range(24), every=4))
def test_what_crosses_is_what_the_programs_volume_says(seed: int) -> None:
    work, kind = draw(random.Random(seed))
    recorders, sizes, _ = run(work, kind, seed)
    sent = sent_by_task(work, recorders, work.grid.node_of)
    expected: Counter[tuple[str, str, bool]] = Counter()
    for direction, program in (("forward", work.forward), ("backward", work.backward)):
        tasks = program.tasks
        first = {
            tasks[place].name: tasks[bundle[0]].name
            for bundle in bundles(program)
            for place in bundle
        }
        for moved in traffic(program, sizes, work.grid.node_of):
            inside, across = moved.num_bytes(DIM, 8, lane_bytes=8, unit_columns=COLUMNS[kind])
            expected[direction, first[moved.task], False] += inside
            expected[direction, first[moved.task], True] += across
    assert +sent == +expected, f"{work.plan} {work.grid} {kind}"


@pytest.mark.parametrize("seed", range(2))
def test_the_recorder_misses_nothing(seed: int) -> None:
    work, kind = draw(random.Random(1000 + seed))
    recorders, _, in_mailbox = run(work, kind, seed)
    pairs: Counter[tuple[int, int]] = Counter()
    for recorder in recorders:
        for each in recorder.ranges:
            for sent in each.messages:
                assert 0 <= sent.tag < each.length
                assert sent.source == recorder.rank
                pairs[sent.source, sent.target] += sent.num_bytes
    assert +pairs == +Counter(in_mailbox)


@pytest.mark.parametrize(
    ("codec", "all_to_all"),
    [("int8", "linear"), ("bf16", "hier2d"), ("fp8", "pipelined"), ("int8", "multicast")],
)
def test_coded_messages_are_as_long_as_their_codec_says(codec: str, all_to_all: str) -> None:
    """Codecs encode packets one by one; later hops inside a node forward the encoded bytes."""
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    work = compiled(Plan(codec=codec, all_to_all=all_to_all), grid)  # type: ignore[arg-type]
    recorders, sizes, _ = run(work, "swiglu")
    sent = sent_by_task(work, recorders, lambda rank: 0)
    slots = {slot.name: slot for slot in work.forward.slots}
    coded = {task.of for task in work.forward.tasks if task.op is Op.PACK and task.codec}
    assert coded
    for of in coded:
        hops = [task for task in work.forward.tasks if task.op is Op.HOP and task.of == of]
        move = next(task for task in work.forward.tasks if task.op is Op.PACK and task.of == of)
        direct = list(messages_of(replace_by_move(move), slots, sizes))
        total = sum(sent["forward", hop.name, False] for hop in hops)
        once = sum(coded_bytes(codec, rows, DIM, 8) for _, _, rows in direct)
        if len({hop.link for hop in hops}) == 1 and hops[0].link == "hier2d":
            twice = sum(
                coded_bytes(codec, rows, DIM, 8)
                for a, b, rows in direct
                if a // 2 != b // 2 and a % 2 != b % 2
            )
            once += twice
        assert total == once


def replace_by_move(pack: Any) -> Any:
    """Return the movement that starts with a packing, as one task."""
    return replace(pack, op=Op.MOVE, reads=(pack.of[0],), writes=(pack.of[1],), of=None)


def test_what_stays_on_a_rank_is_no_message() -> None:
    work = compiled(Plan(schedule="s2"), Grid(world=2, ep=1))
    recorders, _, _ = run(work, "swiglu")
    assert not sent_by_task(work, recorders, lambda rank: 0)

    def rank(transport: AbstractTransport, x: Tensor) -> int:
        with torch.no_grad():
            on_mesh(make_layer(), Grid(world=2, tp=2), transport, Plan())(x)
        return sum(transport.mailbox.bytes_sent.values())  # type: ignore[attr-defined]

    assert min(every_rank(Grid(world=2, tp=2), rank)) > 0  # type: ignore[type-var]
