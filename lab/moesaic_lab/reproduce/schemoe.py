"""ScheMoE's layers and steps as our programs: codec, Pipe-A2A and OptSche compared with Tutel's
plain layer.

Shi et al. (EuroSys 2024), on 8 nodes of four RTX 2080 Ti. The paper assumes that NCCL's all-to-all
sends one message after another (eq. 17), and that Pipe-A2A does so on two communicators at once.
This module makes the same assumptions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from moesaic.planner.cluster import ClusterSpec, Host, Tflops, read_cluster
from moesaic.planner.rank_memory import GIB
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import AllToAll, Plan
from moesaic.program.task import Kind, Op, Stage
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction
from moesaic_lab.reproduce.sweep import SweptRuns, sweep_simulator

GRID = Grid(world=32, ep=32, ranks_per_node=4)
PLANS = {
    "naive": Plan(),
    "zfp": Plan(codec="zfp", backward_codec="zfp"),
    "pipe": Plan(codec="zfp", backward_codec="zfp", all_to_all="pipelined"),
    "schedule": Plan(
        codec="zfp", backward_codec="zfp", all_to_all="pipelined", chunks=2, order="optsche"
    ),
}
"""Plans of the ablation's rows, each of which adds a part to the previous one: from Tutel's layer
to ScheMoE's."""
DEPTHS = (12, 16, 20, 24)
"""Numbers of layers of the CT-MoE models."""
BATCHES = (2, 4, 8)
FACTORS = (1.0, 1.1, 1.2)
LENGTHS = (512, 1024, 2048)
WIDTHS = (512, 1024, 2048, 4096, 8192)
ALGORITHMS: tuple[AllToAll, ...] = ("linear", "pipelined", "hier2d", "hier1d")


def layer(tokens: int, dim: int, hidden: int, factor: float = 1.0) -> Workload:
    """Return a layer as in the paper: top-1, one expert per GPU, float32."""
    return Workload(
        tokens=tokens,
        num_experts=32,
        top_k=1,
        dim=dim,
        hidden=hidden,
        matrices=2,
        dtype="fp32",
        capacity_factor=factor,
    )


CT_MOE = layer(136 * 31, 512, 512)
"""One layer of CT-MoE: 8.63 MB of rows per GPU."""
ABLATION = layer(8 * 2048, 8192, 8192, 1.2)
BERT = layer(128, 1024, 4096)
"""One layer of BERT-Large-MoE."""


class ScheMoECluster:
    """Simulates layers and steps on the paper's testbed.

    Args:
        book: gives the constants.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        spec = cluster(book)
        self._in_turn = SweptRuns(spec)
        self._two_lanes = SweptRuns(_together(spec))
        issued = replace(spec, host=replace(spec.host, task_us=0.0))
        # the same two where tasks are issued in no time, by whether lanes run at once
        self._issued = {False: SweptRuns(issued), True: SweptRuns(_together(issued))}

    def seconds(self, name: str, workload: Workload) -> float:
        """Return the seconds of a layer, forward and backward.

        Args:
            name: the plan, a key of `PLANS`.
        """
        return self.seconds_of(PLANS[name], workload)

    def seconds_of(self, plan: Plan, workload: Workload) -> float:
        """Return the seconds of a layer under any plan, forward and backward."""
        runs = self._two_lanes if plan.all_to_all == "pipelined" else self._in_turn
        return sum(run.seconds for run in runs.run(plan, GRID, workload))

    def issued_seconds(self, name: str, workload: Workload) -> float:
        """Return the seconds of a layer if tasks are issued in no time, forward and backward."""
        plan = PLANS[name]
        runs = self._issued[plan.all_to_all == "pipelined"]
        return sum(run.seconds for run in runs.run(plan, GRID, workload))

    def step_ms(self, name: str, depth: int) -> float:
        """Return the milliseconds of a training step of CT-MoE with `depth` layers."""
        rest = self.book.constant("schemoe.rest.fixed") + depth * self.book.constant(
            "schemoe.rest.layer"
        )
        return rest + depth * 1e3 * self.seconds(name, CT_MOE)

    def all_to_all_ms(self, depth: int) -> float:
        """Return the milliseconds of all all-to-alls of token rows in a step of CT-MoE under
        Tutel."""
        return 4 * depth * 1e3 * exchange_seconds(self._in_turn.simulator.cluster, "linear", CT_MOE)


def cluster(book: Book) -> ClusterSpec:
    """Return the testbed's preset with the constants in place; a message between nodes gets a
    quarter of the NIC."""
    spec = read_cluster("schemoe")
    pcie, nic = spec.links
    pcie = replace(pcie, gbps=(book.constant("parm.b.link"),))
    nic = replace(nic, devices=1, gbps=(book.constant("schemoe.turn"),))
    device = replace(
        spec.device,
        tflops=Tflops(fp32=book.constant("schemoe.tflops")),
        codec_gigabytes_per_second=book.constant("schemoe.codec"),
    )
    host = Host(task_us=book.constant("tutel.issue"), messages="in_turn")
    return replace(spec, device=device, links=(pcie, nic), host=host)


def _together(spec: ClusterSpec) -> ClusterSpec:
    """Return the testbed with messages on two communicators at once."""
    return replace(spec, host=replace(spec.host, messages="together"))


def layers() -> Iterator[tuple[Workload, int]]:
    """Yield the different ones of the sweep's 675 layers, each with the number of identical
    layers."""
    # several batch sizes and lengths have the same product
    count_by_tokens = Counter(batch * length for batch in BATCHES for length in LENGTHS)
    for tokens, count in sorted(count_by_tokens.items()):
        for factor, hidden, dim in itertools.product(FACTORS, WIDTHS, WIDTHS):
            yield layer(tokens, dim, hidden, factor), count


def exchange_seconds(
    spec: ClusterSpec, algorithm: AllToAll, workload: Workload, grid: Grid = GRID
) -> float:
    """Return the seconds of one all-to-all of token rows.

    Its hops run one after another, except that those of "pipelined" run at once on different lanes.

    Args:
        algorithm: the all-to-all's algorithm.
        workload: the layer that sends the rows.
        grid: the mesh.
    """
    program = compile_plan(Plan(all_to_all=algorithm), grid).forward
    volumes = sweep_simulator(spec).volumes(program, workload, grid)
    slots = {slot.name: slot for slot in program.slots}
    seconds = []  # of each hop of the dispatch
    for task in program.tasks:
        if task.stage is not Stage.DISPATCH or task.op not in (Op.MOVE, Op.HOP):
            continue
        source, *_ = task.of or task.reads  # of a hop, the source of the whole movement
        if slots[source].kind is Kind.ROWS:
            movements = volumes.movements(task, slots, "")
            seconds.append(sum(movement.load.alone for movement in movements))
    return max(seconds) if algorithm == "pipelined" else sum(seconds)


def exchange_gib(algorithm: AllToAll, num_bytes: float) -> float:
    """Return the GiB that the busiest rank of an all-to-all holds.

    Each rank holds its rows before and after the exchange. 1DH's leader also holds those of its
    whole node before and after. 2DH's ranks also hold the rows that they forward.

    Args:
        algorithm: the all-to-all's algorithm.
        num_bytes: bytes of one rank's rows.
    """
    buffers = {"hier1d": 2 + 2 * 4, "hier2d": 2 + 1}.get(algorithm, 2)
    return buffers * num_bytes / GIB


def sized(num_bytes: int) -> Workload:
    """Return a layer in which each rank exchanges `num_bytes`."""
    dim = 8
    return layer(num_bytes // (4 * dim), dim, dim)


def reproduce(book: Book) -> Reproduction:
    """Simulate the layers and steps, and compare them with the paper's figures."""
    bed = ScheMoECluster(book)
    figures: dict[str, float] = {}
    for depth in DEPTHS:
        figures[f"schemoe.a2a.{depth}"] = bed.all_to_all_ms(depth)
    for system, plan in (("tutel", "naive"), ("fastermoe", "naive"), ("schemoe", "schedule")):
        for depth in DEPTHS:
            figures[f"schemoe.step.{system}.{depth}"] = bed.step_ms(plan, depth)
    for name in PLANS:
        figures[f"schemoe.ablation.{name}"] = 1e3 * bed.seconds(name, ABLATION)
    gains, counts = gains_of_layers(bed, PLANS["schedule"])
    figures["schemoe.layers.gain"] = float(np.average(gains, weights=counts))

    # gains of Pipe-A2A by bytes per GPU, from 1 KiB to 2 GiB
    sizes = tuple(2**power for power in range(10, 32))
    curves: dict[str, list[float]] = {
        name: [exchange_seconds(cluster(book), name, sized(size)) for size in sizes]
        for name in ALGORITHMS
    }
    small = []
    large = []
    for size, linear, pipelined in zip(sizes, curves["linear"], curves["pipelined"]):
        gain = 100 * (linear / pipelined - 1)
        if size > 200e6:
            large.append(gain)
        elif size >= 2**20:
            small.append(gain)
    figures["schemoe.pipe.small"] = float(np.mean(small))
    figures["schemoe.pipe.large"] = max(large)

    # what is beside the MoE layer grows with the tokens
    rest = bed.book.constant("schemoe.rest.layer") * BERT.tokens / CT_MOE.tokens
    # ScheMoE's core is C/C++ (section 3.3): the issuing time of Tutel's Python loop is not its own
    tutel, ours = (1e3 * bed.issued_seconds(name, BERT) for name in ("naive", "schedule"))
    figures["schemoe.bert.gain"] = 100 * ((tutel + rest) / (ours + rest) - 1)
    findings = _findings(bed, sizes, curves, gains, counts)
    charts = _charts(sizes, curves, gains, counts)
    return book.reproduction("schemoe", book.rows(figures), findings, charts)


def gains_of_layers(bed: ScheMoECluster, plan: Plan) -> tuple[list[float], list[int]]:
    """Return a plan's gain in per cent over Tutel's, for each different layer of the sweep, and the
    numbers of such layers."""
    gains = []
    counts = []
    for workload, count in layers():
        gains.append(100 * (bed.seconds("naive", workload) / bed.seconds_of(plan, workload) - 1))
        counts.append(count)
    return gains, counts


def _findings(
    bed: ScheMoECluster,
    sizes: tuple[int, ...],
    curves: dict[str, list[float]],
    gains: list[float],
    counts: list[int],
) -> tuple[PaperFinding, ...]:
    """Return the findings about the paper's statements.

    Args:
        sizes: bytes per GPU of all-to-alls.
        curves: seconds of all-to-alls of these sizes, by algorithm.
        gains: ScheMoE's gain in per cent for each different layer of the sweep.
        counts: numbers of such layers.
    """
    usable_gib = cluster(bed.book).device.memory_gib - 1
    too_large = [size for size in sizes if exchange_gib("hier1d", size) > usable_gib]
    others = [size for size in sizes if exchange_gib("hier2d", size) > usable_gib]
    large = sizes.index(2**28)
    over_2dh = curves["hier2d"][large] / curves["pipelined"][large]
    lossless = replace(PLANS["schedule"], codec="none", backward_codec="none")
    lossless_gains, _ = gains_of_layers(bed, lossless)
    slower = sum(count for gain, count in zip(gains, counts) if gain < 0)
    return (
        PaperFinding(
            "1DH runs out of memory at large sizes; the others do not up to 2 GB",
            f"1DH from {min(too_large) / 2**30:g} GiB per GPU" if too_large else "1DH never",
            bool(too_large) and not others,
        ),
        PaperFinding(
            "Pipe-A2A is up to about twice as fast as 2DH above "
            f"{bed.book.value('schemoe.pipe.from'):g} MB",
            f"{over_2dh:.2f}x at 256 MiB",
            1.5 <= over_2dh <= 2.5,
        ),
        PaperFinding(
            f"gains over the {bed.book.value('schemoe.layers'):g} layers",
            (
                f"{min(gains):.0f} to {max(gains):.0f} %; {slower} of {sum(counts)} layers, all "
                "with small messages, are slower"
            ),
        ),
        PaperFinding(
            "figure 8: faster in every layer of the sweep",
            f"slower in {slower} of {sum(counts)} layers",
            slower == 0,
        ),
        PaperFinding(
            "mean gain over the layers of the sweep without a codec, closer to the published "
            f"{bed.book.value('schemoe.layers.gain'):g} %",
            f"{np.average(lossless_gains, weights=counts):.0f} %",
        ),
    )


def _charts(
    sizes: tuple[int, ...], curves: dict[str, list[float]], gains: list[float], counts: list[int]
) -> tuple[Chart, ...]:
    """Return the charts of the paper; the arguments are those of `_findings`."""
    x = tuple(float(size) for size in sizes)
    times = tuple((name, x, tuple(values)) for name, values in curves.items())
    memory = []
    for name in ALGORITHMS:
        gib = tuple(exchange_gib(name, size) for size in sizes)
        memory.append((name, x, gib))
    heights, edges = np.histogram(gains, bins=np.arange(-100.0, 260.0, 20.0), weights=counts)
    layers = (("simulated", tuple(edges[:-1].tolist()), tuple(map(float, heights))),)
    return (
        Chart("all-to-all on 32 GPUs", "bytes per GPU", "seconds", times, log_x=True, log_y=True),
        Chart(
            "memory of the busiest rank",
            "bytes per GPU",
            "GiB",
            tuple(memory),
            log_x=True,
            log_y=True,
        ),
        Chart("675 layers: ScheMoE over Tutel", "gain, %", "layers", layers),
    )
