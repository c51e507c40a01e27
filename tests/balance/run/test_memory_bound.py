"""The bytes that a call is told to need are an upper bound, and at most a tenth too high, over
sizes, plans and dtypes, on a CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import pairwise
from moesaic.balance.budget import MemoryBudget
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.call_counts import CountedCall
from moesaic_lab.balance.tracked_memory import Alive, Unwatched

GRID = Grid(world=4, ep=4, ranks_per_node=2)
EXPERTS = 8
PLANS = {
    "s1": Plan(),
    "multicast": Plan(all_to_all="multicast"),
    "hier2d": Plan(all_to_all="hier2d", order="early"),
    "2 chunks": Plan(schedule="s3", chunks=2),
}
LOADS = {"even": [1, 1, 1, 1, 1, 1, 1, 1], "skewed": [5, 1, 1, 1, 0, 0, 0, 0]}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bytes_of(
    tokens: int, dim: int, hidden: int, plan: Plan, dtype: torch.dtype, kind: str, load: list[int]
) -> tuple[int, float]:
    """Return the most bytes alive on a rank in a forward and a backward pass, and the bound."""
    torch.manual_seed(0)
    whole = MoE(dim, hidden, EXPERTS, 1, router="hash", experts=kind, losses=()).to(dtype)
    expert_of = whole.router.table[:, 0].tolist()  # type: ignore[union-attr, index]
    shares = [tokens // sum(load) * share for share in load]
    token_ids = torch.tensor(
        [expert_of.index(expert) for expert, share in enumerate(shares) for _ in range(share)]
    )
    work = compile_plan(plan, GRID)

    def rank(transport: AbstractTransport) -> int:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(GRID, Unwatched(transport)), work)
        x: Tensor = torch.randn(len(token_ids), dim, dtype=dtype, requires_grad=True)
        gradient = torch.randn(len(token_ids), dim, dtype=dtype)
        with Alive() as alive:
            layer(x, token_ids=token_ids).backward(gradient)
        return alive.peak_bytes

    copies = np.tile(shares, (GRID.world, 1))
    own = tuple(weight[:2] for weight in whole.experts.weights()[0])
    call = CountedCall(copies, copies.sum(1), hidden, lambda: whole.experts.sizes(own, dtype))
    told = MemoryBudget(work, EXPERTS).peak(work, None, call)
    return max(run_ranks(GRID.world, rank)), float(told.max())


@pytest.mark.parametrize(
    ("tokens", "ratio", "plan", "dtype", "kind", "load"),
    pairwise((128, 1024, 8192), (1 / 8, 1, 4), PLANS, DTYPES, ("swiglu", "gelu"), LOADS),
)
def test_the_bound_holds_and_is_at_most_a_tenth_too_high(
    tokens: int, ratio: float, plan: str, dtype: str, kind: str, load: str
) -> None:
    dim = 64
    real, told = bytes_of(
        tokens, dim, int(dim * ratio), PLANS[plan], DTYPES[dtype], kind, LOADS[load]
    )
    assert real <= told <= 1.1 * real
