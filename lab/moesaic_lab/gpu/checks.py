"""Checks that the library runs correctly on a GPU: results against the CPU, host waits, CUDA graphs, and meshes without NCCL.

Each check becomes a claim. A check that raises becomes a claim without a value, with the reason. With `--dry` the checks run
on the stand-in instead of a GPU.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.routing.capacity import Capacity
from moesaic_lab.claims import Claim
from moesaic_lab.gpu import waits
from moesaic_lab.gpu.stand_in import DEVICE, StandIn, pretending, to_device, values
from moesaic_lab.gpu.waits import WaitCase, cases, count_waits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ERRORS = {"float32": 1e-2, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest allowed relative error by dtype; float32 leaves room for TF32, which the CPU does not have."""
ROUTERS = ("softmax", "sigmoid", "switch", "expert_choice")
CAPACITIES = {"dropless": None, "capacity": Capacity.fixed(0.75)}
PLANS = ("linear.dropless", "linear.padded", "hier2d.dropless", "multicast.dropless", "s2.dropless", "int8.dropless")
SIZES, TOKENS = (64, 96, 8, 2), 200
"""(dim, hidden, experts, top_k) and the number of tokens of the checked layers."""


def write(out: Path, *, dry: bool) -> int:
    """Run all checks, write the results to `out` after each, and return the exit code 0."""
    all_claims: list[Claim] = []
    for name, target, check in _checks(dry=dry):
        try:
            claim = Claim(name=f"gpu.{name}", value=check(), unit="1", target=target, op="<=")
        except Exception as error:  # whatever a device raises, the other checks still run
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            claim = Claim(name=f"gpu.{name}", value=None, unit="1", target=target, op="<=", reason=reason)
        all_claims.append(claim)
        content = {"claims": [claim.as_dict() for claim in all_claims]}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _checks(*, dry: bool) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield (name, largest allowed value, function that returns the value) per check."""
    for dtype, router in itertools.product(("bfloat16",) if dry else DTYPES, ROUTERS[:1] if dry else ROUTERS):
        for capacity, rule in CAPACITIES.items():
            arguments = (dtype, {"router": router, "capacity": rule}, dry)
            name, max_error = f"{dtype}.{router}.{capacity}", ERRORS[dtype]
            yield f"error.{name}", max_error, partial(error_of, *arguments)
            if router == ROUTERS[0]:
                yield f"waits.{name}", 0, partial(waits_of, *arguments)
                yield f"graph_error.{name}", max_error, partial(graph_error, *arguments)
    yield "graph_error.padded_plan", ERRORS["bfloat16"], partial(padded_graph_error, dry)
    case_by_name = {case.name: case for case in cases()}
    for plan in PLANS[1:2] if dry else PLANS:
        yield f"host_waits.{plan}", max(case_by_name[plan].most), partial(_waits_of_plan, case_by_name[plan])
        if not dry:
            yield f"mesh_error.{plan}", 5e-2, partial(mesh_error, case_by_name[plan])


def _layer(dtype: str, options: dict[str, Any]) -> tuple[MoE, Tensor]:
    torch.manual_seed(0)
    dim, hidden, experts, top_k = SIZES
    layer = MoE(dim, hidden, experts, top_k, losses=(), **options).to(DTYPES[dtype])
    return layer, torch.randn(TOKENS, dim).to(DTYPES[dtype])


def _step(layer: MoE, x: Tensor) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = layer(x)
    (y * y).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]  # type: ignore[list-item]


@contextmanager
def _opened_device(dry: bool) -> Iterator[tuple[str, Callable[[Any], Any], StandIn | None]]:
    """Yield a device's name, a function that moves a layer to the device, and the stand-in (None on a real GPU)."""
    if not dry:
        yield "cuda", lambda layer: layer.to("cuda"), None
        return
    with pretending(), StandIn() as stand_in:
        yield "cuda:0", to_device, stand_in


def error_of(dtype: str, options: dict[str, Any], dry: bool) -> float:
    """Return the largest relative error of output and gradients against the same layer in float32 on the CPU."""
    layer, x = _layer(dtype, options)
    expected = _step(copy.deepcopy(layer).float(), x.float())
    with _opened_device(dry) as (device, move, _):
        results = [values(tensor) for tensor in _step(move(layer), x.to(device))]
    return max(_relative(result.cpu().float(), exact) for result, exact in zip(results, expected, strict=True))


def waits_of(dtype: str, options: dict[str, Any], dry: bool) -> float:
    """Return how often the second step makes the host wait.

    On a GPU the first wait raises an error, so that the value is always 0.
    """
    layer, x = _layer(dtype, options)
    with _opened_device(dry) as (device, move, stand_in):
        layer, x = move(layer), x.to(device)
        _step(layer, x)
        if stand_in is not None:
            stand_in.record.clear()
            _step(layer, x)
            return len(stand_in.record.waits)
        torch.cuda.set_sync_debug_mode("error")
        try:
            _step(layer, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return 0.0


def graph_error(dtype: str, options: dict[str, Any], dry: bool) -> float:
    """Return the relative error of a captured step, replayed on other tokens, against the same step run eagerly.

    Without a GPU, return the number of waits and uploads in a step: a CUDA graph can contain neither.
    """
    return _replayed(*_layer(dtype, options), dry)


def padded_graph_error(dry: bool) -> float:
    """Return `graph_error` of a layer on a mesh of one rank with a padded capacity: it runs a plan's tasks without messages."""
    layer, x = _layer("bfloat16", {"capacity": waits.CAPACITIES["padded"]})

    def rank(transport: AbstractTransport) -> float:
        layer.parallelize(Mesh(Grid(world=1), transport))
        return _replayed(layer, x, dry, transport)

    return run_ranks(1, rank)[0]


def _replayed(layer: MoE, x: Tensor, dry: bool, transport: AbstractTransport | None = None) -> float:
    with _opened_device(dry) as (device, move, stand_in):
        layer, x = move(layer), x.to(device)
        if transport is not None:
            transport.device = DEVICE if dry else torch.device("cuda")
        if stand_in is not None:
            _step(layer, x)
            stand_in.record.clear()
            _step(layer, x)
            return len(stand_in.record.waits) + len(stand_in.record.uploads)
        static = x.clone().requires_grad_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                _step(layer, static)
        torch.cuda.current_stream().wait_stream(stream)
        layer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(static)
            (y * y).sum().backward()
        other = x.flip(0)
        with torch.no_grad():
            static.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [y.detach().clone(), static.grad.clone()]  # type: ignore[union-attr]
        expected = _step(layer, other)
    return max(_relative(a.float(), b.float()) for a, b in zip(replayed, expected))


def mesh_error(case: WaitCase) -> float:
    """Return the largest relative error of ranks that share one process and one GPU, against the same ranks on the CPU."""
    torch.manual_seed(0)
    whole = MoE(*SIZES, capacity=waits.CAPACITIES[case.capacity], losses=()).bfloat16()
    tokens = [torch.randn(32, SIZES[0]).bfloat16() for _ in range(case.grid.world)]

    def rank(transport: AbstractTransport, device: str) -> list[Tensor]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(case.grid, transport), case.plan)
        transport.device = torch.device(device)
        x = tokens[case.grid.coordinate(transport.rank, "dp")].to(device)
        return [tensor.cpu() for tensor in _step(layer.to(device), x)[:2]]

    on_cpu, on_gpu = (run_ranks(case.grid.world, partial(rank, device=device)) for device in ("cpu", "cuda"))
    pairs = [pair for a, b in zip(on_gpu, on_cpu) for pair in zip(a, b)]
    return max(_relative(a.float(), b.float()) for a, b in pairs)


def _waits_of_plan(case: WaitCase) -> float:
    counted = count_waits(case)
    assert counted is not None
    return float(max(counted.forward, counted.backward))


def _relative(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
