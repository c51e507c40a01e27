"""Entries of the ledger.

Others measured parts of a step in isolation (collectives inside a node, products, expert stages,
layers), and whole steps with their memory. Further entries come from this laboratory's own
measurements and reproductions.

Each generator here reads the rows of one table of measurements, predicts each of them by the
planner's model of the row's machine (a preset, by `cluster_of`), and yields both as an `Entry`.
Entries marked `fitted` are those to which numbers of the preset were fitted: no evidence. A gated
expert has three matrices of dim x hidden, so a row takes 6 * dim * hidden FLOPs forward, and as
many bytes of bfloat16 weights are read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from moesaic.configfile import override
from moesaic.planner.call_sizes import node_tokens_per_node
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.compute import rates_of, router_seconds, sort_seconds
from moesaic.planner.hub import read_shape
from moesaic.planner.job import DataShape, Job
from moesaic.planner.other_systems import OthersLayout, predict
from moesaic.planner.rank_memory import GIB
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import LAUNCHES, all_reduce_seconds
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.multicast import in_pieces
from moesaic.program.plan import Plan
from moesaic.program.task import Op, Stage
from moesaic_lab.claims import RESULTS
from moesaic_lab.ledger.records import Entry, Kind, read_figures, read_published

FITTED_GPUS = {"dgx-h200": ("2", "8"), "8xl40s-pcie": ("2", "4", "8")}
"""By machine, the numbers of GPUs whose collectives its links were fitted to."""
FITTED_OPERATIONS = ("alltoall", "all_gather")
"""The collectives to which links were fitted."""
FITTED_EXPERTS = ("8", "128")
"""Numbers of experts of the expert stages to which devices were fitted."""
UNFITTED_DIM = "2048"
"""Width of the expert stages that were left out of the fit."""
UNFITTED_OWN_DIM = "1536"
"""Width of our own expert stages that were left out of the fit."""

cluster_of = functools.lru_cache(read_cluster)
"""`read_cluster`, which reads each preset only once."""


def ring(ranks: int, num_bytes: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the messages of a ring's n - 1 steps over a buffer: sources, targets, bytes, numbers
    of messages, (n,) each."""
    source = np.arange(ranks)
    target = (source + 1) % ranks
    sent_bytes = np.full(ranks, (ranks - 1) / ranks * num_bytes)
    return source, target, sent_bytes, np.full(ranks, float(ranks - 1))


def everybody(
    ranks: int, num_bytes: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the messages of an all-to-all in which each rank has a buffer of `num_bytes`, in the
    form of `ring`."""
    source, target = (each.ravel() for each in np.indices((ranks, ranks)))
    leaves = source != target
    count = int(leaves.sum())
    return source[leaves], target[leaves], np.full(count, num_bytes / ranks), np.ones(count)


def alone(cluster: ClusterSpec, ranks: int, *messages: np.ndarray) -> float:
    """Return the seconds that messages between the ranks of one node take in isolation, launch
    included."""
    return cluster.host.task_us * 1e-6 + Topology(cluster, ranks, ranks).loads(*messages).alone


def collective(cluster: ClusterSpec, operation: str, ranks: int, num_bytes: float) -> float:
    """Return the predicted seconds of an NCCL operation inside a node; all-gathers and
    reduce-scatters are rings."""
    if operation == "all_reduce":
        grid = Grid(world=ranks, ranks_per_node=ranks)
        return cluster.host.task_us * 1e-6 + all_reduce_seconds(cluster, grid, num_bytes, ranks)
    messages = everybody if operation == "alltoall" else ring
    return alone(cluster, ranks, *messages(ranks, num_bytes))


def nccl(
    machine: Callable[[str], ClusterSpec] = cluster_of, fitted_of: str | None = None
) -> Iterator[Entry]:
    """Yield NCCL's collectives inside one node.

    Args:
        machine: returns the cluster of a machine's name.
        fitted_of: a machine, to yield only the entries to which its links are fitted; None for all.
    """
    for row in read_figures("nccl"):
        fitted_gpus = FITTED_GPUS.get(row["machine"], ())
        fitted = row["operation"] in FITTED_OPERATIONS and row["gpus"] in fitted_gpus
        if fitted_of is not None and not (fitted and row["machine"] == fitted_of):
            continue
        ranks = int(row["gpus"])
        num_bytes = float(row["bytes"])
        seconds = collective(machine(row["machine"]), row["operation"], ranks, num_bytes)
        yield Entry(
            kind="collectives",
            what=f"{row['operation']} of {ranks}, {num_bytes / 2**20:g} MiB",
            machine=row["machine"],
            measured=float(row["us"]),
            predicted=seconds * 1e6,
            unit="us",
            source="aiconfigurator",
            fitted=fitted,
        )


def deepep() -> Iterator[Entry]:
    """Yield DeepEP's dispatch, in float8 with a float32 scale per 128 columns, and its combine, in
    bfloat16.

    A token is sent once to each rank that has any of its experts.
    """
    for row in read_figures("deepep"):
        cluster = cluster_of(row["machine"])
        tokens = int(row["tokens"])
        dim = int(row["dim"])
        layer = Workload(
            tokens=tokens,
            num_experts=int(row["experts"]),
            top_k=int(row["top_k"]),
            dim=dim,
            hidden=1,
        )
        # of a rank: the tokens for each of 8 ranks, times their columns
        sent_elements = node_tokens_per_node(layer, 8, 1) * 8 * dim
        for what, element_bytes in (("dispatch", 1 + 4 / 128), ("combine", 2)):
            yield Entry(
                kind="collectives",
                what=(
                    f"DeepEP {what}, {tokens:,} tokens of {dim}, {row['top_k']} of {row['experts']}"
                ),
                machine=row["machine"],
                measured=float(row[f"{what}_us"]),
                predicted=alone(cluster, 8, *everybody(8, sent_elements * element_bytes)) * 1e6,
                unit="us",
                source="aiconfigurator",
            )


def deepep_across() -> Iterator[Entry]:
    """Yield what DeepEP's second version reports between nodes and inside one: 8,192 tokens, float8
    dispatch, bfloat16 combine.

    Its bandwidth is logical: it counts a token's rows for all nodes, the sender's own node
    included. Inside one node, it counts the rows for all ranks, the sender included.
    """
    for row in read_published()["deepep"]:
        nodes = row["nodes"]
        tokens = 8192
        dim = 7168
        layer = Workload(tokens=tokens, num_experts=256, top_k=8, dim=dim, hidden=1)
        grid = Grid(world=8 * nodes, ep=8 * nodes, ranks_per_node=8)
        compiled = compile_plan(Plan(all_to_all="multicast", order="fifo"), grid)
        program = in_pieces(compiled.forward, "fp8")
        simulated = Simulator(cluster_of(row["machine"], nodes=nodes)).run(program, layer, grid)
        moves = set()
        for task in program.tasks:
            if task.op is Op.MOVE and task.of is not None:
                moves.add(task.name)
        receivers = nodes if nodes > 1 else 8
        logical_rows = node_tokens_per_node(layer, receivers, 1) * receivers
        for what, stage, element_bytes in (
            ("dispatch", Stage.DISPATCH, 1 + 4 / 128),
            ("combine", Stage.COMBINE, 2),
        ):
            spans = [span for span in simulated.timeline.spans if span.stage is stage]
            sending = [span for span in spans if span.task in moves]
            seconds = max(span.end for span in sending) - min(span.start for span in sending)
            yield Entry(
                kind="collectives",
                what=f"DeepEP V2 {what}, 8,192 tokens of 7168, 8 x {nodes}, {row['sms']} SMs",
                machine=row["machine"],
                measured=logical_rows * element_bytes * dim / row[what] / 1e3,  # row: GB/s
                unit="us",
                source="deepep",
                predicted=seconds * 1e6,
            )


def products() -> Iterator[Entry]:
    """Yield products of two matrices; no number of a preset was fitted to them."""
    for row in read_figures("products"):
        yield _product(row, "bf16", element_bytes=2)


def narrow_products() -> Iterator[Entry]:
    """Yield float8 products with a scale per tensor or per block; those per tensor set one end of
    the preset's interval."""
    for row in read_figures("narrow_products"):
        product = _product(row, "fp8", element_bytes=1)
        yield replace(
            product,
            what=f"fp8, a scale per {row['scales']}, {product.what}",
            fitted=row["scales"] == "tensor",
        )


def _product(row: dict[str, str], dtype: str, element_bytes: int) -> Entry:
    """Return the entry of a product of two matrices, (m, k) times (k, n)."""
    m = int(row["m"])
    n = int(row["n"])
    k = int(row["k"])
    rates = rates_of(cluster_of(row["machine"]), dtype)
    seconds_of_one = rates.product_seconds(
        rows=np.array([float(m)]),
        flops_per_row=2.0 * n * k,
        weight_bytes=float(element_bytes) * n * k,
    )
    return Entry(
        kind="products",
        what=f"{m:,} x {k:,} x {n:,}",
        machine=row["machine"],
        measured=float(row["us"]),
        predicted=float(seconds_of_one[0]) * 1e6,
        unit="us",
        source="aiconfigurator",
    )


def expert_stage(cluster: ClusterSpec, row: dict[str, str]) -> float:
    """Return the predicted seconds of the forward pass of one device's experts, each with the same
    number of rows: products, traffic of activations (3 matrices, 2 bytes), and one launch."""
    dim = int(row["dim"])
    hidden = int(row["hidden"])
    experts = int(row["experts"])
    rates = rates_of(cluster, "bf16")
    copies = int(row["tokens"]) * int(row["top_k"])
    rows = np.full(experts, copies / experts)
    work = 6.0 * dim * hidden
    seconds = rates.product_seconds(rows, work, work, grouped=True)
    traffic_seconds = rates.traffic_seconds(rows, dim, hidden, matrices=3, element_bytes=2)
    return float((seconds + traffic_seconds).sum()) + cluster.host.task_us * 1e-6


def expert_stages(machine: Callable[[str], ClusterSpec] = cluster_of) -> Iterator[Entry]:
    """Yield expert stages: the forward pass of experts of three matrices, all on one device."""
    for row in read_figures("expert_stages"):
        fitted_sizes = row["experts"] in FITTED_EXPERTS and row["dim"] != UNFITTED_DIM
        yield Entry(
            kind="expert stages",
            what=(
                f"{row['tokens']} tokens, {row['top_k']} of {row['experts']} experts {row['dim']} "
                f"x {row['hidden']}"
            ),
            machine=row["machine"],
            measured=float(row["us"]),
            predicted=expert_stage(machine(row["machine"]), row) * 1e6,
            unit="us",
            source="aiconfigurator",
            fitted=row["machine"] == "dgx-h200" and fitted_sizes,
        )


PRODUCTS = {
    "forward": ("up", "down"),
    "backward": ("down_grad", "rows_grad", "weight_grad", "weight_grad_down"),
}
"""The products of gated experts by direction, as columns of our own measurements are called."""


def own_products(machine: Callable[[str], ClusterSpec] = cluster_of) -> Iterator[Entry]:
    """Yield the products of our own expert kernels on one GPU, each timed alone and added up."""
    for row in read_figures("own_stages"):
        rates = rates_of(machine(row["machine"]), "bf16")
        layer = _own_layer(row)
        rows = np.full(layer.num_experts, layer.copies / layer.num_experts)
        work = 6.0 * layer.dim * layer.hidden
        by_expert = rates.product_seconds(rows, work, work, grouped=True)
        by_expert += rates.traffic_seconds(
            rows, layer.dim, layer.hidden, matrices=3, element_bytes=2
        )
        forward_seconds = float(by_expert.sum())
        # backward has two products for each one of forward
        for direction, times in (("forward", 1), ("backward", 2)):
            measured = sum(float(row[f"{name}_us"]) for name in PRODUCTS[direction])
            yield _own_entry("own products", row, direction, measured, times * forward_seconds)


def own_stages(machine: Callable[[str], ClusterSpec] = cluster_of) -> Iterator[Entry]:
    """Yield expert stages of our own kernels on one GPU, from sorted copies to summed rows: forward
    and backward."""
    for row in read_figures("own_stages"):
        cluster = machine(row["machine"])
        layer = _own_layer(row)
        compiled = compile_plan(Plan(order="fifo"), Grid(world=1))
        forward, backward = Simulator(cluster.of_devices(1)).passes(
            compiled.forward, compiled.backward, layer, compiled.grid
        )
        sorting = sort_seconds(cluster, layer.copies)  # forward sorts the copies by expert
        yield _own_entry(
            "own stages", row, "forward", float(row["forward_us"]), forward.seconds + sorting
        )
        yield _own_entry("own stages", row, "backward", float(row["backward_us"]), backward.seconds)


def own_layers() -> Iterator[Entry]:
    """Yield our `MoE` on one GPU: its measured expert stage, and the predicted router with its
    kernels."""
    for row in read_figures("own_stages"):
        layer = _own_layer(row)
        cluster = cluster_of(row["machine"])
        by_direction = router_seconds(
            cluster, layer.tokens, layer.dim, layer.num_experts, layer.element_bytes
        )
        for direction, router in zip(("forward", "backward"), by_direction):
            seconds = float(row[f"{direction}_us"]) * 1e-6 + router
            measured_us = float(row[f"layer_{direction}_us"])
            yield _own_entry("own layers", row, direction, measured_us, seconds)


def _own_layer(row: dict[str, str]) -> Workload:
    """Return the layer of a measurement of our own."""
    sizes: dict[str, Any] = {
        name: int(row[name]) for name in ("tokens", "dim", "hidden", "num_experts", "top_k")
    }
    return Workload(**sizes)


def _own_entry(
    kind: Kind, row: dict[str, str], direction: str, measured_us: float, seconds: float
) -> Entry:
    """Return the entry of one pass of a measurement of our own."""
    experts = f"{row['top_k']} of {row['num_experts']} experts {row['dim']} x {row['hidden']}"
    return Entry(
        kind=kind,
        what=f"{int(row['tokens']):,} tokens, {experts}, {direction}",
        machine=row["machine"],
        measured=measured_us,
        predicted=seconds * 1e6,
        unit="us",
        source="own",
        fitted=row["dim"] != UNFITTED_OWN_DIM,
    )


def grouped_products(machine: Callable[[str], ClusterSpec] = cluster_of) -> Iterator[Entry]:
    """Yield the products of gated experts on one device: forward, and for both gradients, which are
    accumulated in float32."""
    for row in read_figures("grouped_products"):
        experts = int(row["experts"])
        count = int(row["rows"])
        dim = int(row["dim"])
        hidden = int(row["hidden"])
        rates = rates_of(machine(row["machine"]), "bf16")
        rows = np.full(experts, float(count))
        work = 6.0 * dim * hidden
        seconds = 3 * rates.product_seconds(rows, work, work, grouped=True)
        yield Entry(
            kind="expert stages",
            what=(
                f"{experts} experts {dim} x {hidden}, {count:,} rows each, products forward and "
                "backward"
            ),
            machine=row["machine"],
            measured=float(row["us"]),
            predicted=float(seconds.sum()) * 1e6,
            unit="us",
            source="simumax",
            fitted=True,
        )


def layers() -> Iterator[Entry]:
    """Yield the forward and backward passes of whole layers."""
    for row in read_published()["layer"]:
        cluster = cluster_of(row["machine"], nodes=row.get("nodes", 1))
        per_node = cluster.devices_per_node
        grid = Grid(world=cluster.world, ep=row["ep"], ranks_per_node=per_node)
        sizes = {
            name: row[name]
            for name in ("tokens", "num_experts", "top_k", "dim", "hidden", "matrices")
        }
        layer = Workload(**sizes, **row.get("routing", {}))
        compiled = compile_plan(
            Plan(order="fifo", all_to_all=row.get("all_to_all", "linear")), grid
        )
        simulator = Simulator(cluster)
        for direction, program in (("forward", compiled.forward), ("backward", compiled.backward)):
            seconds = simulator.run(program, layer, compiled.grid).seconds
            yield Entry(
                kind="layers",
                what=f"{row['what']}, {direction}",
                machine=row["machine"],
                measured=row[f"{direction}_ms"],
                predicted=seconds * 1e3,
                unit="ms",
                source=row["source"],
            )


def laer() -> Iterator[Entry]:
    """Yield the time that LAER's ranks compute experts in a step of two micro-batches, forward and
    backward.

    The time is a mean over ranks, so it is predicted for the mean load. All-to-alls are left out,
    since the artifact does not say which ranks take part in them.
    """
    for row in read_figures("laer"):
        # models of Mixtral's width: dim 4096, hidden 14336, or half of it with 16 experts
        hidden = 14336 // 2 if "e16" in row["model"] else 14336
        rates = rates_of(cluster_of("laer"), "bf16")
        rows = np.array([float(row["copies"])])
        work = 6.0 * 4096 * hidden
        forward_seconds = rates.product_seconds(rows, work, work, grouped=True)
        forward_seconds += rates.traffic_seconds(rows, 4096, hidden, matrices=3, element_bytes=2)
        yield Entry(
            kind="layers",
            what=f"LAER's artifact, experts of {row['model']} under {row['method']}, a step",
            machine="laer",
            measured=float(row["expert_s"]),
            # backward takes two forward passes, and a step has two micro-batches
            predicted=float(forward_seconds[0]) * 3 * 2 * int(row["layers"]),
            unit="s",
            source="laer",
        )


def predicted_step(
    row: dict[str, Any], models: dict[str, Any], *, launches: tuple[float, float] = LAUNCHES
) -> tuple[PlannedStep, float]:
    """Return the prediction of a published step, and the predicted tokens per second and device.

    Args:
        row: a step of `published.toml`.
        models: the sizes of models by name.
        launches: as in `StepModel`.
    """
    shape = read_shape(models[row["model"]], row["model"], seq_len=row["seq_len"])
    machine = row["machine"]
    gpus = row["gpus"]
    nodes = -(-gpus // cluster_of(machine).devices_per_node)
    cluster = cluster_of(machine, nodes=nodes).of_devices(gpus)
    layout = override(OthersLayout(), row["layout"], source=row["what"])
    job = Job(
        batch_size=gpus, precision="bfloat16", model=shape, data=DataShape(vocab_size=shape.vocab)
    )
    prediction = predict(job, cluster, layout, launches=launches)
    tokens = layout.sequences(gpus) * row["seq_len"]
    return prediction, tokens / prediction.seconds / gpus


def steps() -> Iterator[Entry]:
    """Yield the seconds of published steps, and their memory if it is published."""
    published = read_published()
    for row in published["step"]:
        prediction, speed = predicted_step(row, published["model"])
        sequences = row["layout"].get("global_batch", row["gpus"])
        tokens = sequences * row["seq_len"] / row["gpus"]
        yield Entry(
            kind="steps",
            what=_described(row),
            machine=row["machine"],
            measured=tokens / row["tokens_per_second"],
            predicted=tokens / speed,
            unit="s",
            source=row["source"],
            system=row["system"],
            why=row.get("why", ""),
        )
        if "memory_gib" in row:
            yield _memory(row, row["what"], prediction)


def memory() -> Iterator[Entry]:
    """Yield the published memory of runs whose times are not in the ledger."""
    published = read_published()
    for row in published["memory"]:
        prediction, _ = predicted_step(row, published["model"])
        yield _memory(row, _described(row), prediction)


def _described(row: dict[str, Any]) -> str:
    """Return what a published step is, and what was assumed about it."""
    return f"{row['what']} (assumed: {row['assumed']})" if "assumed" in row else str(row["what"])


def _memory(row: dict[str, Any], what: str, prediction: PlannedStep) -> Entry:
    """Return the entry of a published step's memory."""
    return Entry(
        kind="memory",
        what=what,
        machine=row["machine"],
        measured=row["memory_gib"],
        predicted=prediction.memory.total / GIB,
        unit="GiB",
        source=row["source"],
        system=row["system"],
        why=row.get("why_memory", ""),
    )


def papers() -> Iterator[Entry]:
    """Yield the figures of the five reproductions from their committed results, except those in
    percentage points."""
    results = json.loads((RESULTS / "reproduce.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        if row["ratio"] is not None:
            yield Entry(
                kind="papers",
                what=row["cell"],
                machine=row["paper"],
                measured=1.0,
                predicted=row["ratio"],
                unit="ratio",
                source="papers",
                fitted=row["role"] == "fit",
            )


def beds() -> Iterator[Entry]:
    """Yield the layers on emulated clusters from the committed results, as measured and as
    predicted from a profile."""
    results = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        if "predicted_seconds" in row:
            yield Entry(
                kind="beds",
                what=f"{row['case']}, {row['plan']}",
                machine=f"bed {row['bed']}",
                unit="s",
                source="beds",
                measured=row["measured_seconds"],
                predicted=row["predicted_seconds"],
            )
