"""Measures the peak memory of a step: the bytes of all tensors alive at once, tracked operation by
operation.

`peak_growth_bytes` of `moesaic_lab/device/cases.py` counts the same with torch's profiler. The
profiler takes a second to start in each of many ranks that share two cores, and writes to their
output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moesaic.balance.budget import BudgetUse
from moesaic.balance.run.calls import BalancedCalls
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.across_ranks import ToldRouter
from moesaic_lab.benchmark import Told, each_kept
from moesaic_lab.recorder import AbstractPassing


class Alive(TorchDispatchMode):
    """Tracks the storages that torch operations allocate. Storages that existed before are not
    counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most bytes that were alive at once."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        """By address: each storage that an operation allocated, and its bytes."""
        self._known: dict[int, StorageWeakRef] = {}
        """By address: the storages that existed before."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and track the storages that it allocates."""
        for value in _tensors((args, kwargs or {})):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive:
                self._known[ref.cdata] = ref  # the reference keeps the address from being reused
        result = function(*args, **(kwargs or {}))
        self._prune()
        for value in _tensors(result):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive and ref.cdata not in self._known:
                self._alive[ref.cdata] = (ref, value.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def _prune(self) -> None:
        """Remove storages that were freed."""
        expired = [address for address, (ref, _) in self._alive.items() if ref.expired()]
        for address in expired:
            del self._alive[address]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a call had alive at once, beyond those that existed
    before it.

    Memory that no torch operation allocated, such as a library's own buffers, is not counted for
    any method.

    Args:
        call: the function to watch, including a backward pass that it runs on the calling thread.
    """
    with Alive() as alive:
        call()
    return alive.peak_bytes


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Unwatched(AbstractPassing):
    """Wraps a transport whose own copies of messages must not be counted, since a real transport
    keeps none."""

    def issue(self, transfer: Transfer) -> Handle:
        with _disable_current_modes():
            return super().issue(transfer)

    def wait(self, handle: Handle) -> None:
        with _disable_current_modes():
            super().wait(handle)


GRID = Grid(world=8, ep=8, ranks_per_node=2)
PER_RANK = 2
TOKENS = 192
TOP_K = 2
"""The layer whose memory is counted: its mesh, experts per rank, tokens per rank, and copies per
token."""
WIDTHS = {"light weights": (96, 32), "heavy weights": (48, 256)}
"""Width of a token, and inner width of an expert with three matrices."""
LOADS = {"even": 0.0, "half of all to one rank": 3.0, "all to the experts of one rank": 7.0}
"""Kinds of routing, with their MaxVio of ranks."""
SHARES = (1.25, 2.0)
"""Budgets, as multiples of the peak of plain expert parallelism under even loads."""
REPLICATIONS = ("none", "spill", "arbiter")
PATIENCE = 1800.0
"""Timeout of a run in seconds. Bytes are counted, not time, so a busy machine may be slow."""


@dataclass(frozen=True, kw_only=True)
class BudgetHeld:
    """The memory that a layer held under a budget, on the rank with the highest peak."""

    weights: str
    load: str
    replication: str
    over_even: float
    """The budget over the peak of plain expert parallelism under even loads."""
    promised_bytes: int
    """The budget."""
    peak_bytes: int
    """Bytes that were alive at once, over forward and backward."""
    unbounded_bytes: int
    """The peak of plain expert parallelism without a budget."""
    slices: int
    kept_slices: int


def budgets_held(told: Told, keep: Path) -> list[BudgetHeld]:
    """Run a layer under every budget and load, with all ranks in this process, and count the bytes
    alive at once. The folder `keep` has a file for each load and width that is counted already; the
    others are added."""
    runs = {
        f"memory, {weights}, {load}": partial(_rows_under, weights, load)
        for weights in WIDTHS
        for load in LOADS
    }
    return [BudgetHeld(**row) for _, rows in each_kept(keep, runs, told) for row in rows]


def _rows_under(weights: str, load: str) -> list[dict[str, Any]]:
    """Return the fields of `BudgetHeld` for every budget under one kind of routing."""
    layer = MoE(*WIDTHS[weights], GRID.world * PER_RANK, TOP_K, router=ToldRouter, losses=())
    max_vio = LOADS[load]
    even, _ = _peak_bytes(layer, Plan(), LOADS["even"])
    unbounded, _ = _peak_bytes(layer, Plan(), max_vio)
    rows = []
    for replication, share in product(REPLICATIONS, SHARES):
        budget = int(share * even)
        plan = Plan(replication=replication, memory_budget=budget)
        peak, use = _peak_bytes(layer, plan, max_vio)
        result = BudgetHeld(
            weights=weights,
            load=load,
            replication=replication,
            over_even=share,
            promised_bytes=budget,
            peak_bytes=peak,
            unbounded_bytes=unbounded,
            slices=use.slices,
            kept_slices=use.kept_slices,
        )
        rows.append(asdict(result))
    return rows


def _peak_bytes(whole: MoE, plan: Plan, max_vio: float) -> tuple[int, BudgetUse]:
    """Return the highest peak of any rank, in bytes, in the second call of a layer, and how its
    budget was used."""
    chosen = _skewed_experts(max_vio)

    def run_rank(transport: AbstractTransport) -> tuple[int, BudgetUse]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(GRID, Unwatched(transport)), plan)
        assert isinstance(layer.router, ToldRouter)
        layer.router.tell(chosen)
        x = torch.randn(TOKENS, whole.dim, requires_grad=True)
        dy = torch.randn(TOKENS, whole.dim)

        def step() -> None:
            layer(x).backward(dy)

        step()  # what only a first call allocates is not counted
        x.grad = None
        layer.zero_grad()
        assert layer.on_mesh is not None
        calls = layer.on_mesh.calls
        if not isinstance(calls, BalancedCalls):  # a plan that replicates nothing
            return peak_bytes(step), BudgetUse()
        calls.budget.take()  # discards the use by the first call
        peak = peak_bytes(step)
        return peak, calls.budget.take()

    per_rank = run_ranks(GRID.world, run_rank, timeout_seconds=PATIENCE)
    peaks = [peak for peak, _ in per_rank]
    _, first_use = per_rank[0]  # all ranks decide alike
    return max(peaks), first_use


def _skewed_experts(max_vio: float) -> Tensor:
    """Return each token's experts, (TOKENS, TOP_K) int64. The first rank gets the share of tokens
    that gives the MaxVio, and the others share the rest evenly."""
    num_on_first = round(TOKENS * (1 + max_vio) / GRID.world)
    first = torch.zeros(num_on_first, dtype=torch.int64)
    others = torch.arange(TOKENS - num_on_first) % (GRID.world - 1) + 1
    rank = torch.cat([first, others])
    # a token goes to the first TOP_K experts of its rank
    return rank.unsqueeze(1) * PER_RANK + torch.arange(TOP_K)
