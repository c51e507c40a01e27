"""Events follow the timeline's rules without contention, and split shared links as computed by
hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from moesaic.planner.cluster import ClusterSpec, Link
from moesaic.planner.events import Events, Use, graph_of, speeds
from moesaic.planner.movement import Movement
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.topology import Load
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Stage, Task
from moesaic.program.timeline import lay_out
from planner.clusters import DEVICE, flat, tree

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
WORKLOAD = Workload(tokens=512, num_experts=8, top_k=2, dim=64, hidden=128)


def chain(lanes: list[tuple[Lane, list[int]]]) -> Program:
    """Return a program of tasks t0, t1, ... on lanes, each of which reads what others write."""
    slots = [Slot(name="in", kind=Kind.ROWS, layout=Layout())]
    tasks = []
    for number, (lane, reads) in enumerate(lanes):
        slots.append(Slot(name=f"t{number}", kind=Kind.ROWS, layout=Layout()))
        op = Op.MOVE if lane in (Lane.INTRA, Lane.INTER) else Op.ADD
        names = tuple(f"t{read}" for read in reads) or ("in",)
        tasks.append(
            Task(
                name=f"t{number}",
                op=op,
                reads=names,
                writes=(f"t{number}",),
                stage=Stage.DISPATCH,
                lane=lane,
            )
        )
    outputs = (tasks[-1].writes[0],)
    return Program(
        name="chain", slots=tuple(slots), tasks=tuple(tasks), inputs=("in",), outputs=outputs
    )


def run(
    program: Program, seconds: list[float], *, host: bool, actors: int = 1, own_links: bool = True
) -> Events:
    """Run a program whose movements have separate links, or all share link 0."""
    compute = np.zeros((len(seconds), actors))
    movements: list[list[Movement]] = []
    for number, task in enumerate(program.tasks):
        movements.append([])
        if task.op is Op.MOVE and seconds[number] > 0:
            link = np.array([number if own_links else 0])
            load = Load(link, np.array([seconds[number]]), np.ones(1), 0.0)
            movements[-1].append(Movement(tuple(range(actors)), load, np.zeros(actors)))
        else:
            compute[number] = seconds[number]
    events = Events(
        graph_of(program, host_runs_compute=host), np.zeros_like(compute), compute, movements
    )
    events.run()
    return events


@pytest.mark.parametrize("host", [False, True])
def test_without_contention_it_is_lay_out(host: bool) -> None:
    draw = random.Random(11)
    lanes = [Lane.COMPUTE, Lane.INTRA, Lane.INTER, Lane.HOST]
    for _ in range(60):
        count = draw.randint(1, 14)
        listed = [
            (draw.choice(lanes), draw.sample(range(n), draw.randint(0, min(n, 3))))
            for n in range(count)
        ]
        program = chain(listed)
        seconds = [draw.choice([0.0, 1.0, 2.5, 4.0]) for _ in range(count)]
        expected = lay_out(
            program, {f"t{n}": value for n, value in enumerate(seconds)}, host_runs_compute=host
        )
        for actors in (1, 3):
            events = run(program, seconds, host=host, actors=actors)
            for number, span in enumerate(expected.spans):
                assert events.ends[number].tolist() == pytest.approx([span.end] * actors)
                assert events.starts[number].tolist() == pytest.approx([span.start] * actors)


def test_two_movements_on_one_link_take_turns_bit_by_bit() -> None:
    """Movements of 2 s and 4 s on one link: both at half speed until the short one ends at 4; the
    other ends at 6."""
    program = chain([(Lane.INTRA, []), (Lane.INTER, [])])
    events = run(program, [2.0, 4.0], host=False, own_links=False)
    assert events.ends[:, 0].tolist() == pytest.approx([4.0, 6.0])


def test_a_movement_that_comes_later_slows_one_under_way() -> None:
    """4 s from 0 and 2 s from 1: both at half speed until 5; the first then needs one more
    second."""
    program = chain([(Lane.INTRA, []), (Lane.COMPUTE, []), (Lane.INTER, [1])])
    events = run(program, [4.0, 1.0, 2.0], host=False, own_links=False)
    assert events.ends[:, 0].tolist() == pytest.approx([6.0, 1.0, 5.0])


def test_a_movement_waits_for_its_slowest_member_and_holds_all() -> None:
    program = chain([(Lane.COMPUTE, []), (Lane.INTER, [0]), (Lane.COMPUTE, [1])])
    load = Load(np.array([0]), np.array([1.0]), np.ones(1), 0.5)
    compute = np.array([[1.0, 3.0], [0.0, 0.0], [1.0, 2.0]])
    events = Events(
        graph_of(program, host_runs_compute=False),
        np.zeros((3, 2)),
        compute,
        [[], [Movement((0, 1), load, np.zeros(2))], []],
    )
    events.run()
    assert events.starts[1].tolist() == [1.0, 3.0]
    assert events.ends[1].tolist() == [4.5, 4.5]
    assert events.ends[2].tolist() == [5.5, 6.5]


def test_copies_around_a_movement_take_what_its_slowest_member_needs() -> None:
    program = chain([(Lane.INTER, [])])
    load = Load(np.array([0]), np.array([1.0]), np.ones(1), 0.5)
    compute = np.array([[0.25, 2.0]])
    graph = graph_of(program, host_runs_compute=False)
    events = Events(graph, np.zeros((1, 2)), compute, [[Movement((0, 1), load, np.zeros(2))]])
    events.run()
    assert events.ends.tolist() == [[3.5, 3.5]]


def test_issuing_costs_the_thread() -> None:
    program = chain([(Lane.INTER, []), (Lane.INTRA, []), (Lane.COMPUTE, [])])
    load = Load(np.array([0]), np.array([1.0]), np.ones(1), 0.0)
    other = Load(np.array([1]), np.array([1.0]), np.ones(1), 0.0)
    parts = [[Movement((0,), load, np.zeros(1))], [Movement((0,), other, np.zeros(1))], []]
    issue = np.array([[0.25], [0.5], [0.125]])
    events = Events(
        graph_of(program, host_runs_compute=True), issue, np.array([[0.0], [0.0], [2.0]]), parts
    )
    events.run()
    assert events.starts[:, 0].tolist() == [0.25, 0.75, 0.875]
    assert events.ends[:, 0].tolist() == [1.25, 1.75, 2.875]


def test_shares_are_max_min_by_message() -> None:
    one = {0: Use(1.0, 1.0)}
    two = {0: Use(1.0, 1.0)}
    assert speeds([one, two]) == pytest.approx([0.5, 0.5])
    assert speeds([{0: Use(1.0, 3.0)}, {0: Use(1.0, 1.0)}]) == pytest.approx([0.75, 0.25])
    assert speeds([{0: Use(1.0, 1.0)}, {0: Use(0.1, 1.0), 1: Use(1.0, 1.0)}]) == pytest.approx(
        [0.9, 1.0]
    )
    three = speeds(
        [
            {0: Use(1.0, 1.0)},
            {0: Use(1.0, 1.0), 1: Use(1.0, 1.0)},
            {1: Use(1.0, 1.0), 2: Use(0.5, 1.0)},
        ]
    )
    assert three == pytest.approx([0.5, 0.5, 0.5])
    chained = speeds(
        [
            {0: Use(1.0, 1.0)},
            {0: Use(1.0, 1.0)},
            {0: Use(1.0, 1.0), 1: Use(1.0, 1.0)},
            {1: Use(1.0, 1.0)},
        ]
    )
    assert chained == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_no_link_is_oversubscribed_and_no_wanted_link_idles() -> None:
    draw = random.Random(3)
    for _ in range(300):
        uses = []
        for _ in range(draw.randint(1, 6)):
            links = draw.sample(range(5), draw.randint(1, 4))
            parts = [draw.uniform(0.05, 1.0) for _ in links]
            uses.append(
                {
                    link: Use(part / max(parts), draw.randint(1, 4))
                    for link, part in zip(links, parts)
                }
            )
        new_speeds = speeds(uses)
        link_use = {
            link: sum(s * use[link].part for s, use in zip(new_speeds, uses) if link in use)
            for link in range(5)
        }
        assert max(link_use.values()) <= 1 + 1e-9
        for speed, use in zip(new_speeds, uses):
            assert 0 < speed <= 1 + 1e-12
            assert speed > 1 - 1e-9 or any(link_use[link] > 1 - 1e-9 for link in use)


def simulated(spec: ClusterSpec, **plan: object) -> list[Simulated]:
    compiled = compile_plan(Plan(**plan), GRID)  # type: ignore[arg-type]
    simulator = Simulator(spec)
    return [
        simulator.run(program, WORKLOAD, compiled.grid)
        for program in (compiled.forward, compiled.backward)
    ]


@pytest.mark.parametrize("all_to_all", ["linear", "pipelined", "hier2d", "multicast"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_never_below_the_limit_and_scales_with_all_rates(all_to_all: str, chunks: int) -> None:
    spec = tree(2, 4)
    faster = replace(
        spec,
        links=tuple(
            replace(
                link,
                gbps=tuple(2 * r for r in link.gbps),
                latency_us=link.latency_us / 2,
                message_us=link.message_us / 2,
            )
            for link in spec.links
        ),
        device=replace(
            DEVICE, tflops=replace(DEVICE.tflops, bf16=200.0), memory_gigabytes_per_second=2000.0
        ),
    )
    for slow, fast in zip(
        simulated(spec, schedule="s2", chunks=chunks, all_to_all=all_to_all),
        simulated(faster, schedule="s2", chunks=chunks, all_to_all=all_to_all),
    ):
        assert slow.seconds >= slow.limit * (1 - 1e-9)
        assert slow.limit >= max(slow.link_seconds.values())
        assert fast.seconds == pytest.approx(slow.seconds / 2)


def test_a_slower_link_is_named_as_the_bottleneck() -> None:
    slow = flat(2, 4, inter=0.1, device=DEVICE)
    run = simulated(slow, schedule="s1")[0]
    assert run.bottleneck.startswith("port")
    fast = flat(2, 4, intra=1e6, inter=1e6, device=DEVICE)
    assert simulated(fast, schedule="s1")[0].bottleneck == "compute"
    deferred_wgrad = flat(2, 4, intra=1e6, inter=1e6, inter_us=1e5, device=DEVICE)
    assert simulated(deferred_wgrad, schedule="s1")[0].bottleneck == "start-up on lane inter"


def test_a_shared_medium_takes_both_directions() -> None:
    bus = ClusterSpec(
        nodes=1,
        devices_per_node=4,
        device=DEVICE,
        links=(Link(name="lo", devices=4, gbps=(8.0,), carries="inside", shared=True),),
    )
    grid = Grid(world=4, ep=4)
    compiled = compile_plan(Plan(), grid)
    run = Simulator(bus).run(compiled.forward, WORKLOAD, grid)
    rows = 512 * 2 / 8 * 2
    total = 4 * 3 * rows * (2 * 64 * 2 + 4)
    assert run.link_seconds == pytest.approx({"lo": total / 1e9})


def message(sender: int, receiver: int, links: list[int], seconds: float) -> Movement:
    load = Load(np.array(links), np.full(len(links), seconds), np.ones(len(links)), 0.0)
    return Movement((min(sender, receiver), max(sender, receiver)), load, np.ones(2), sender)


def queued(program: Program, issue: list[list[float]], movements: list[list[Movement]]) -> Events:
    """Run a program of messages."""
    table = np.array(issue)
    graph = graph_of(program, host_runs_compute=True, has_lanes=False)
    events = Events(graph, table, np.zeros_like(table), movements, queues=True)
    events.run()
    return events


MOVE_AND_READ = [(Lane.INTER, []), (Lane.COMPUTE, [0])]


def test_a_message_leaves_with_its_sender_and_is_waited_for_by_its_receiver() -> None:
    """Actor 1 starts late: by then, actor 0's message has arrived, and actor 1's own message takes
    its full time."""
    movements = [[message(0, 1, [0], 3.0), message(1, 0, [1], 3.0)], []]
    events = queued(chain(MOVE_AND_READ), [[1.0, 9.0], [0.0, 0.0]], movements)
    assert events.ends[0].tolist() == [12.0, 9.0]


def test_links_serve_messages_in_the_order_in_which_they_come() -> None:
    """Both messages use one link: the first passes as if alone, the second after it."""
    movements = [[message(0, 1, [0], 3.0), message(1, 0, [0], 3.0)], []]
    events = queued(chain(MOVE_AND_READ), [[1.0, 2.0], [0.0, 0.0]], movements)
    assert events.ends[0].tolist() == [7.0, 4.0]


def test_a_message_passes_on_while_it_still_comes_in() -> None:
    """Two links of 3 s each take 3 s, not 6. A second message to the same target from another link
    waits there for the first."""
    movements = [[message(0, 2, [0, 1], 3.0), message(1, 2, [2, 1], 3.0)], []]
    events = queued(chain(MOVE_AND_READ), [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], movements)
    assert events.ends[0, 2] == 6.0


def test_a_link_serves_others_while_a_message_waits_on_an_earlier_link() -> None:
    """Actor 0's message to 2 starts at 3, after its message to 1; the link into 2 serves actor 3's
    message before."""
    movements = [
        [message(0, 1, [0], 3.0), message(0, 2, [0, 1], 3.0), message(3, 2, [2, 1], 3.0)],
        [],
    ]
    events = queued(chain(MOVE_AND_READ), [[0.0, 0.0, 0.0, 1.0], [0.0] * 4], movements)
    assert events.ends[0, 2] == 7.0
