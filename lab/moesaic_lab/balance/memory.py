"""How much memory a step holds at once: bytes of all tensors alive, watched operation by operation.

`peak_growth_bytes` of `moesaic_lab/device/cases.py` counts the same by torch's profiler, which takes a second to start in each
of many ranks that share two cores, and writes on their output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.layer import MoE
from moesaic.plan.budget import BudgetUse
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid
from moesaic.runtime.balance.calls import BalancedCalls
from moesaic_lab.across_ranks import ToldRouter
from moesaic_lab.recorder import AbstractPassing


class Alive(TorchDispatchMode):
    """Watches the storages that operations make. What was there before counts nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most bytes that were alive at once."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _tensors((args, kwargs or {})):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive:
                self._known[ref.cdata] = ref  # held, so that nothing new gets its address
        result = function(*args, **(kwargs or {}))
        self._prune()
        for value in _tensors(result):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive and ref.cdata not in self._known:
                self._alive[ref.cdata] = (ref, value.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def _prune(self) -> None:
        """Forget the storages that are gone."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a call had alive at once, beyond those that were there before.

    Bytes that no operation of torch made, as of a library's own buffers, are not counted, for nobody.

    Args:
        call: what is watched, forward and backward of it on the calling thread.
    """
    with Alive() as alive:
        call()
    return alive.peak_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class Unwatched(AbstractPassing):
    """Passes everything on to a transport whose own copies of messages are not counted: a real one keeps none."""

    def issue(self, transfer: Transfer) -> Handle:
        with _disable_current_modes():
            return super().issue(transfer)

    def wait(self, handle: Handle) -> None:
        with _disable_current_modes():
            super().wait(handle)


GRID, PER_RANK, TOKENS, TOP_K = Grid(world=8, ep=8, ranks_per_node=2), 2, 192, 2
"""Ranks, experts and tokens of each, and copies of a token, of the layer whose memory is counted."""
WIDTHS = {"light weights": (96, 32), "heavy weights": (48, 256)}
"""Width of a token, and inner width of an expert of three matrices."""
LOADS = {"even": 0.0, "half of all to one rank": 3.0, "all to the experts of one rank": 7.0}
"""Kinds of routing, and their MaxVio of ranks."""
SHARES = (1.25, 2.0)
"""Budgets, over what a rank holds of plain expert parallelism where loads are even."""
REPLICATIONS = ("none", "spill", "arbiter")
PATIENCE = 1800.0
"""Seconds that a run may take: bytes are counted, and a machine that does much else may take its time."""


@dataclass(frozen=True, kw_only=True)
class BudgetHeld:
    """What a layer held under a budget, of the rank that held most."""

    weights: str
    load: str
    replication: str
    over_even: float
    """The budget, over what a rank holds where loads are even."""
    promised_bytes: int
    """The budget."""
    peak_bytes: int
    """That were alive at once, forward and backward."""
    unbounded_bytes: int
    """The same of plain expert parallelism without a budget."""
    slices: int
    kept_slices: int


def budgets_held(told: Callable[[str], object]) -> list[BudgetHeld]:
    """Run a layer under every budget and load, all ranks in this process, and count the bytes that are alive."""
    found = []
    for weights, (dim, hidden) in WIDTHS.items():
        layer = MoE(dim, hidden, GRID.world * PER_RANK, TOP_K, router=ToldRouter, losses=())
        even, _ = _held(layer, Plan(), LOADS["even"])
        for load, max_vio in LOADS.items():
            told(f"memory: {weights}, {load}")
            unbounded, _ = _held(layer, Plan(), max_vio)
            for replication in REPLICATIONS:
                for share in SHARES:
                    budget = int(share * even)
                    peak, use = _held(layer, Plan(replication=replication, memory_budget=budget), max_vio)
                    found.append(
                        BudgetHeld(
                            weights=weights, load=load, replication=replication, over_even=share, promised_bytes=budget,
                            peak_bytes=peak, unbounded_bytes=unbounded, slices=use.slices, kept_slices=use.kept_slices,
                        )
                    )  # fmt: skip
    return found


def _held(whole: MoE, plan: Plan, max_vio: float) -> tuple[int, BudgetUse]:
    """Return the most bytes that a rank has alive in the second call of a layer, and what its budget did."""
    chosen = _chosen(max_vio)

    def rank(transport: AbstractTransport) -> tuple[int, BudgetUse]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(GRID, Unwatched(transport)), plan)
        assert isinstance(layer.router, ToldRouter)
        layer.router.tell(chosen)
        x, dy = (torch.randn(TOKENS, whole.dim, requires_grad=needs) for needs in (True, False))

        def step() -> None:
            layer(x).backward(dy)

        step()
        x.grad = None
        layer.zero_grad()
        assert layer.on_mesh is not None
        calls = layer.on_mesh.calls
        if isinstance(calls, BalancedCalls):
            calls.budget.take()
        peak = peak_bytes(step)
        return peak, calls.budget.take() if isinstance(calls, BalancedCalls) else BudgetUse()

    found = run_ranks(GRID.world, rank, timeout_seconds=PATIENCE)
    return max(peak for peak, _ in found), found[0][1]


def _chosen(max_vio: float) -> Tensor:
    """Return each token's experts, (TOKENS, TOP_K) int64: the first rank's share of them is what a MaxVio asks for, the others
    get equally many."""
    here = round(TOKENS * (1 + max_vio) / GRID.world)
    rest = torch.arange(TOKENS - here) % (GRID.world - 1) + 1
    place = torch.cat([torch.zeros(here, dtype=torch.int64), rest])
    return place.unsqueeze(1) * PER_RANK + torch.arange(TOP_K)
