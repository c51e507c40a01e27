"""Counts how often a layer's call makes the host wait for a GPU, under every plan. It uses the
stand-in and needs no GPU.

There is a plan for each name in each registry, so that new registry entries are counted without a
change here. Each plan runs two steps on ranks of one process. The second step is counted, since the
first compiles, uploads and agrees once for all steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Crossing, Plan
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic_lab.device.ranks import plans
from stand_in import DEVICE, StandIn, pretending, to_device, values

CAPACITIES: dict[str, AbstractCapacity] = {
    "dropless": Dropless(),
    "capacity": Capacity.fixed(0.75),
    "padded": Capacity.fixed(0.75, scope="rank", padded=True),
}
DIM = 16
HIDDEN = 32
EXPERTS = 8
TOP_K = 2
TOKENS = 12
BY_HOST = ("zfp",)
"""Codecs that run on the host, for which every message waits."""


@dataclass(frozen=True, kw_only=True)
class WaitCase:
    """One case to count: a layer on a mesh under one plan and one capacity."""

    name: str
    plan: Plan
    grid: Grid
    capacity: str

    @property
    def most(self) -> tuple[int, int]:
        """Allowed waits in (forward, backward): one for the counts, unless all sizes are known
        beforehand."""
        if self.capacity == "padded":
            return 0, 0
        # Multicast exchanges the tokens per node only once the copies are known, if copies may be
        # dropped or tp > 1.
        is_late = self.plan.crossing is Crossing.MULTICAST and (
            self.capacity == "capacity" or self.grid.tp > 1
        )
        return 1 + is_late, 0

    @property
    def most_uploads(self) -> int:
        """Allowed copies to the device: one for runs of rows, and one for the times that the
        arbiter exchanges."""
        return 0 if self.capacity == "padded" else 1 + (self.plan.replication == "arbiter")


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits and errors counted in one step of a case; waits and uploads are those of the rank with
    most waits."""

    forward: int
    """Waits in the forward pass."""
    backward: int
    """Waits in the backward pass."""
    uploads: int
    """Copies to the device that do not wait, in both passes."""
    lines: tuple[str, ...]
    """Each wait, with the line of code that caused it."""
    unordered: tuple[str, ...]
    """Sums of floats in an order that varies, on any rank."""
    error: float
    """Largest error of output and input gradient against the CPU, relative to their largest
    value."""


def cases() -> Iterator[WaitCase]:
    """Yield each plan with each capacity; `count_waits` returns None for combinations that the
    layer refuses."""
    for (name, plan, grid), capacity in itertools.product(plans(), CAPACITIES):
        if name in BY_HOST:
            continue
        yield WaitCase(name=f"{name}.{capacity}", plan=plan, grid=grid, capacity=capacity)


def count_waits(case: WaitCase, *, triton: bool = False) -> Waits | None:
    """Run a case and return its counts; None if the plan does not allow the capacity or the mesh.

    Args:
        case: the case to run.
        triton: whether to run Triton's kernels, under Triton's interpreter.
    """
    torch.manual_seed(0)
    whole = MoE(
        DIM, HIDDEN, EXPERTS, TOP_K, capacity=CAPACITIES[case.capacity], losses=()
    ).bfloat16()
    tokens = [torch.randn(TOKENS, DIM).bfloat16() for _ in range(case.grid.world)]

    def on_cpu(transport: AbstractTransport) -> list[torch.Tensor]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(case.grid, transport), case.plan)
        return _outputs(layer, tokens[case.grid.coordinate(transport.rank, "dp")], None)

    def on_stand_in(transport: AbstractTransport) -> tuple[list[torch.Tensor], int, StandIn]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(case.grid, transport), case.plan)
        with StandIn() as stand_in:
            transport.device = DEVICE
            to_device(layer)
            x = tokens[case.grid.coordinate(transport.rank, "dp")].to(DEVICE)
            _outputs(layer, x, None)
            stand_in.record.clear()
            outputs = _outputs(layer, x, stand_in)
        return outputs, stand_in.forward, stand_in

    try:
        expected = run_ranks(case.grid.world, on_cpu)
    except InputError:
        return None
    with pretending(triton=triton):
        results = run_ranks(case.grid.world, on_stand_in)
    pairs = [
        pair for (result, _, _), exact in zip(results, expected) for pair in zip(result, exact)
    ]
    errors = [
        float((values(a).float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30))
        for a, b in pairs
    ]
    busiest = max(results, key=lambda result: len(result[2].record.waits))
    return Waits(
        forward=busiest[1],
        backward=len(busiest[2].record.waits) - busiest[1],
        uploads=len(busiest[2].record.uploads),
        lines=tuple(busiest[2].record.waits),
        error=max(errors),
        unordered=tuple(line for _, _, stand_in in results for line in stand_in.record.unordered),
    )


def _outputs(layer: MoE, x: torch.Tensor, stand_in: StandIn | None) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    if stand_in is not None:
        stand_in.forward = len(stand_in.record.waits)
    (y * y).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]
