"""ScheMoE's layers and steps as our programs: codec, Pipe-A2A and OptSche beside Tutel's plain layer.

Shi et al. (EuroSys 2024), on 8 nodes of four RTX 2080 Ti. The paper takes NCCL's all-to-all to send one message after the other
(eq. 17), and Pipe-A2A to do so on two communicators at once; so does this.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from moesaic.cost.cluster import ClusterSpec, Host, Tflops, read_cluster
from moesaic.cost.memory import GIB
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.plan import AllToAll
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Op, Stage
from moesaic_lab.reproduce.records import Book
from moesaic_lab.reproduce.sweep import sweep_simulator

GRID = Grid(world=32, ep=32, ranks_per_node=4)
PLANS = {
    "naive": Plan(),
    "zfp": Plan(codec="zfp", backward_codec="zfp"),
    "pipe": Plan(codec="zfp", backward_codec="zfp", all_to_all="pipelined"),
    "schedule": Plan(codec="zfp", backward_codec="zfp", all_to_all="pipelined", chunks=2, order="optsche"),
}
"""The rows of the ablation, each with those before it; the first is Tutel's layer, the last ScheMoE's."""
DEPTHS = (12, 16, 20, 24)
"""Layers of CT-MoE."""
BATCHES, FACTORS, LENGTHS, WIDTHS = (2, 4, 8), (1.0, 1.1, 1.2), (512, 1024, 2048), (512, 1024, 2048, 4096, 8192)
ALGORITHMS: tuple[AllToAll, ...] = ("linear", "pipelined", "hier2d", "hier1d")


def layer(tokens: int, dim: int, hidden: int, factor: float = 1.0) -> Workload:
    """Return a layer of the paper: top-1, an expert per GPU, float32."""
    return Workload(
        tokens=tokens, num_experts=32, top_k=1, dim=dim, hidden=hidden, matrices=2, dtype="fp32", capacity_factor=factor
    )


CT_MOE = layer(136 * 31, 512, 512)
"""One layer of CT-MoE: 8.63 MB of rows per GPU."""
ABLATION = layer(8 * 2048, 8192, 8192, 1.2)
BERT = layer(128, 1024, 4096)
"""One layer of BERT-Large-MoE."""


class ScheMoECluster:
    """The testbed, with the issuing thread of Tutel and of ScheMoE.

    Args:
        book: tells the constants.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        plain, scheduled = cluster(book), cluster(book, issue_us=book.constant("schemoe.issue"))
        two_lanes = replace(scheduled, host=replace(scheduled.host, messages="together"))
        self._simulators = {
            "tutel": sweep_simulator(plain), "schemoe": sweep_simulator(scheduled), "two lanes": sweep_simulator(two_lanes)
        }  # fmt: skip
        self._compiled: dict[Plan, Compiled] = {}

    def seconds(self, name: str, workload: Workload) -> float:
        """Return the time of a layer, forward and backward.

        Args:
            name: of the plan, in `PLANS`.
            workload: the layer.
        """
        return self.seconds_of(PLANS[name], workload)

    def seconds_of(self, plan: Plan, workload: Workload) -> float:
        """Return the time of a layer under any plan; a plain one is issued by Tutel."""
        if plan not in self._compiled:
            self._compiled[plan] = compile_plan(plan, GRID)
        which = "tutel" if plan == Plan() else "two lanes" if plan.all_to_all == "pipelined" else "schemoe"
        made, simulator = self._compiled[plan], self._simulators[which]
        return sum(simulator.run(program, workload, GRID).seconds for program in (made.forward, made.backward))

    def step_ms(self, name: str, depth: int) -> float:
        """Return the time of a step of CT-MoE, milliseconds."""
        rest = self.book.constant("schemoe.rest.fixed") + depth * self.book.constant("schemoe.rest.layer")
        return rest + depth * 1e3 * self.seconds(name, CT_MOE)

    def all_to_all_ms(self, depth: int) -> float:
        """Return the time of all all-to-alls of rows of a step of CT-MoE under Tutel, milliseconds."""
        return 4 * depth * 1e3 * exchange_seconds(self._simulators["tutel"].cluster, "linear", CT_MOE)


def cluster(book: Book, *, issue_us: float | None = None) -> ClusterSpec:
    """Return the testbed: its preset with the constants in place; a message between nodes has a quarter of the NIC.

    Args:
        book: tells the constants.
        issue_us: of the issuing thread per task; None for the preset's.
    """
    spec = read_cluster("schemoe")
    pcie, nic = spec.links
    pcie = replace(pcie, gbps=(book.constant("parm.b.link"),))
    nic = replace(nic, devices=1, gbps=(book.constant("schemoe.turn"),))
    device = replace(
        spec.device,
        tflops=Tflops(fp32=book.constant("schemoe.tflops")),
        codec_gigabytes_per_second=book.constant("schemoe.codec"),
    )
    task_us = spec.host.task_us if issue_us is None else issue_us
    return replace(spec, device=device, links=(pcie, nic), host=Host(task_us=task_us, messages="in_turn"))


def layers() -> Iterator[tuple[Workload, int]]:
    """Yield the 675 layers of the sweep, equal ones once, with their number."""
    tokens = Counter(batch * length for batch, length in itertools.product(BATCHES, LENGTHS))
    for (size, count), factor, hidden, dim in itertools.product(sorted(tokens.items()), FACTORS, WIDTHS, WIDTHS):
        yield layer(size, dim, hidden, factor), count


def exchange_seconds(spec: ClusterSpec, algorithm: AllToAll, workload: Workload) -> float:
    """Return the time of one all-to-all of rows: hops one after the other, on different lanes at once.

    Args:
        spec: the cluster.
        algorithm: of the all-to-all.
        workload: whose rows.
    """
    program = compile_plan(Plan(all_to_all=algorithm), GRID).forward
    volumes = sweep_simulator(spec).volumes(program, workload, GRID)
    slots = {slot.name: slot for slot in program.slots}
    each = []
    for task in program.tasks:
        moves = task.op in (Op.MOVE, Op.HOP) and task.stage is Stage.DISPATCH
        if moves and slots[(task.of or task.reads)[0]].kind is Kind.ROWS:
            each.append(sum(moved.load.alone for moved in volumes.movements(task, slots, "")))
    return max(each) if algorithm == "pipelined" else sum(each)


def exchange_gib(algorithm: AllToAll, num_bytes: float) -> float:
    """Return the GiB that the busiest rank of an all-to-all holds: its rows before and after, and what it holds for others.

    1DH's leader holds those of its node before and after, beside its own; 2DH's ranks once more what they hand on.

    Args:
        algorithm: of the all-to-all.
        num_bytes: of one rank's rows.
    """
    held = {"hier1d": 2 + 2 * 4, "hier2d": 2 + 1}.get(algorithm, 2)
    return held * num_bytes / GIB


def sized(num_bytes: int) -> Workload:
    """Return a layer whose ranks exchange so many bytes each."""
    dim = 8
    return layer(num_bytes // (4 * dim), dim, dim)
