"""Four ranks over NCCL on one GPU: every plan, the trainer (FSDP2, tensor parallelism), and
transformers' sharded experts.

NCCL refuses two ranks on one device only if they say that they are on one host. So each rank names
a host of its own, and the ranks talk over the loopback network. Without a GPU, Gloo takes NCCL's
place.
"""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from moesaic.codecs import CODECS, NO_CODEC
from moesaic.comm.mesh import Mesh
from moesaic.configfile import override
from moesaic.kernels.codecs import missing_codecs
from moesaic.layer import MoE
from moesaic.policies import REPLICATION
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.plan import Plan
from moesaic.testing.runner import on_ranks
from moesaic_lab.claims import ROOT
from moesaic_lab.device.results import Row, reason

WORLD = 4
NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
}
"""NCCL's own variables for ranks that share a GPU, besides the host."""
EP = Grid(world=WORLD, ep=4, ranks_per_node=2)
SHARDS = Grid(world=WORLD, tp=2, ep=2, etp=2, ranks_per_node=2)
SIZES = (64, 128, 8, 2)
TOKENS = 96
"""(dim, hidden, experts, top_k) and tokens per rank of the layer that runs under every plan."""
RUN: dict[str, Any] = {
    "steps": 4,
    "batch_size": 4,
    "precision": "float32",
    "log_every": 1,
    "tensorboard": False,
    "evaluate": {"every": 100, "sequences": 4},
    "save": {"every": 2},
    "model": {
        "dim": 64,
        "num_layers": 2,
        "num_heads": 4,
        "seq_len": 64,
        "moe": {"num_experts": 8, "top_k": 2, "hidden": 64},
    },
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}
"""A training run as a table."""
HALVES = {"batch_size": 2, "accumulation": 2}
RUNS: dict[str, dict[str, Any]] = {
    "ep 4": {"mesh": {"ep": 4}},
    "tp 2, ep 2": {"mesh": {"tp": 2, "ep": 2}},
    "tp 2, etp 2": {"mesh": {"tp": 2, "etp": 2}},
    "pp 2, ep 2": {"mesh": {"pp": 2, "ep": 2}, **HALVES},
    "two micro-batches in flight": {
        "mesh": {"tp": 2, "ep": 2},
        "micro_batches_in_flight": 2,
        **HALVES,
    },
}
"""Runs on four ranks by name: what differs from `RUN`."""


def plans() -> Iterator[tuple[str, Plan, Grid]]:
    """Yield (name, plan, mesh) for each name in each registry and for each other choice in a
    plan."""
    for name in SCHEDULES:
        yield name, Plan(schedule=name), SHARDS
    for name in ALL_TO_ALLS:
        yield name, Plan(all_to_all=name), EP
    yield "multicast", Plan(all_to_all="multicast"), EP
    yield "multicast.s2", Plan(schedule="s2", all_to_all="multicast"), SHARDS
    for name in CODECS:
        if name != NO_CODEC:
            yield name, Plan(codec=name, backward_codec=name), EP
    for name in ORDERS:
        yield name, Plan(order=name, chunks=2), EP
    for name in REPLICATION:
        yield name, Plan(replication=name), EP
    yield "peer_groups", Plan(peer_groups=2), EP
    yield "fuse", Plan(schedule="s3", fuse=True), SHARDS
    yield "overlap_gather", Plan(schedule="s2", overlap_gather=True), SHARDS
    yield "gather_weights", Plan(schedule="s2", gather_weights=0), SHARDS


def sharing_gpu(function: Callable[..., Any], *arguments: object, dry: bool) -> list[Any]:
    """Call `function(device, *arguments)` on `WORLD` ranks that share one GPU, and return each
    rank's result."""
    backend = "gloo" if dry else "cpu:gloo,cuda:nccl"
    return on_ranks(
        WORLD, _as_host, function, "cpu" if dry else "cuda", *arguments, backend=backend
    )


def _as_host(function: Callable[..., Any], device: str, *arguments: object) -> Any:
    """Call a function on a rank that has its own host as far as NCCL knows; NCCL asks at its first
    message."""
    os.environ.update(NCCL, NCCL_HOSTID=f"host{dist.get_rank()}", LOCAL_RANK="0")
    return function(device, *arguments)


def compare_plans(device: str) -> list[Row]:
    """Run a layer under every plan on this rank; return a row per plan with its error against the
    layer without a mesh."""
    rows = []
    meshes = dict[Grid, Mesh]()
    missing = missing_codecs()
    for name, plan, grid in plans():
        if plan.codec in missing:
            continue
        if grid not in meshes:
            sizes = {
                "tp": grid.tp,
                "ep": grid.ep,
                "etp": grid.etp,
                "ranks_per_node": grid.ranks_per_node,
            }
            meshes[grid] = Mesh.create(**sizes, device_type=device)  # type: ignore[arg-type]
        mesh = meshes[grid]
        try:
            torch.manual_seed(0)
            whole = MoE(*SIZES, losses=(), device=device)
            layer = copy.deepcopy(whole)
            # ranks of one tensor-parallel group have the same tokens
            torch.manual_seed(1 + grid.coordinate(mesh.rank, "dp"))
            x = torch.randn(TOKENS, SIZES[0]).to(device)
            layer.parallelize(mesh, plan)
            errors = [
                float((result - exact).abs().max() / exact.abs().max())
                for result, exact in zip(_step(layer, x), _step(whole, x))
            ]
            rows.append({"plan": name, "error": max(errors), "is_lossless": plan.is_lossless})
        except Exception as error:  # a plan that fails must not cost the others
            rows.append({"plan": name, "reason": reason(error), "is_lossless": plan.is_lossless})
    return rows


def _step(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the input's gradient."""
    x = x.detach().requires_grad_()
    y = layer(x)
    dy = torch.linspace(0.0, 1.0, y.numel(), device=y.device).view_as(y)
    (y * dy).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def worst_of(by_rank: list[list[Row]]) -> Row:
    """Return the plans with the largest error of each on any rank, and the largest of all lossless
    plans; a plan that failed on a rank counts as an error of 1.

    Args:
        by_rank: the rows of `compare_plans` of each rank, in the same order of plans.
    """
    rows = []
    for plan_rows in zip(*by_rank):
        failed = [row for row in plan_rows if "reason" in row]
        rows.append(failed[0] if failed else max(plan_rows, key=lambda row: row["error"]))
    errors = [row.get("error", 1.0) for row in rows if row["is_lossless"] or "reason" in row]
    return {"plans": rows, "worst": max(errors)}


def plans_row(*, dry: bool) -> Row:
    """Return the row of all plans."""
    return worst_of(sharing_gpu(compare_plans, dry=dry))


def losses_of(device: str, runs: dict[str, dict[str, Any]], folder: str) -> dict[str, list[float]]:
    """Train runs one after another on this rank, or on this process alone; return the losses of the
    steps of each.

    Args:
        runs: by name of a run's folder, which a later run may resume, fields that differ from
            `RUN`.
        folder: where the folders lie.
    """
    from moesaic.train.config import TrainConfig
    from moesaic.train.loop import train
    from moesaic.train.metrics import read_metrics

    losses = {}
    for name, changes in runs.items():
        config = override(override(TrainConfig(), RUN, source="RUN"), changes, source=name)
        out = Path(folder) / changes.get("out", name)
        data = replace(config.data, path=(str(ROOT / "README.md"),))
        train(
            replace(config, out=str(out), data=data, device=device),
            console=Console(file=io.StringIO()),
        )
        losses[name] = [
            line["loss"]
            for line in read_metrics(out)
            if line.get("kind", "train") == "train" and "loss" in line
        ]
    return losses


def training_row(*, dry: bool) -> Row:
    """Return the losses of one process, of each mesh, and of a run that ends on another mesh than
    it began on."""
    with tempfile.TemporaryDirectory() as folder:
        alone = {"one process": {}, "one process, halves": HALVES}
        device = "cpu" if dry else "cuda"
        alone_losses = losses_of(device, alone, folder)
        runs = dict(RUNS)
        runs["begun"] = {"mesh": {"ep": 4}, "steps": 2}
        runs["resumed on another mesh"] = {
            "mesh": {"tp": 2, "etp": 2},
            "out": "begun",
            "existing": "resume",
        }
        rank_losses = sharing_gpu(losses_of, runs, folder, dry=dry)[0]
    del rank_losses["begun"]  # the run that resumes it has the losses of its steps too
    differences = []
    for name, run_losses in rank_losses.items():
        # a step's load-balance loss is of its micro-batches
        in_halves = "accumulation" in RUNS.get(name, {})
        expected = alone_losses["one process, halves" if in_halves else "one process"]
        differences += [abs(a - b) for a, b in zip(run_losses, expected, strict=True)]
    return {"losses": alone_losses | rank_losses, "worst": max(differences)}


def sharded_row(*, dry: bool) -> Row:
    """Return the errors of models of transformers whose experts are sharded over the ranks, against
    one process."""
    from moesaic_lab import hf

    with tempfile.TemporaryDirectory() as folder:
        cases = hf.cases_on(WORLD, *hf.write_models(Path(folder)))
        results = sharing_gpu(hf.steps, cases, dry=dry)
        errors = hf.ep_errors(WORLD, cases, results)
    rows = [
        {"model": Path(case.folder).name, "ep": case.ep, "tp": case.tp, "error": error}
        for case, error in zip(cases, errors)
    ]
    return {"cases": rows, "worst": max(errors)}
