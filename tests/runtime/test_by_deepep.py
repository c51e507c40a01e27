"""DeepEP's part against an imitation of its `ElasticBuffer`, over loopback; the kernels themselves need GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moesaic import Capacity, Mesh, MoE, Plan
from moesaic.comm import deepep
from moesaic.comm.collectives import all_gather, all_reduce_sum
from moesaic.comm.loopback import run_ranks
from moesaic.comm.wire import AbstractWire
from moesaic.errors import InputError
from moesaic.plan import compile_plan
from moesaic.program.grid import Grid
from moesaic.runtime import on_mesh

DIM, EXPERTS, TOKENS = 16, 8, 6
GRID = Grid(world=4, ep=4)


class Buffer:
    """Each rank gets every rank's tokens that have an expert on it, source after source."""

    def __init__(self, group: AbstractWire, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
        self.wire, self.room, self.peers = group, num_max_tokens_per_rank, tuple(range(group.world))
        assert (hidden, num_topk) == (DIM, 2)

    def dispatch(self, x: Tensor, handle: Tensor | None = None, topk_idx=None, topk_weights=None, num_experts=0, **_):
        assert len(x) <= self.room
        tokens = torch.cat(all_gather(self.wire, self.peers, x))
        if handle is not None:
            return tokens[handle], None, None, handle, Event()
        each = num_experts // self.wire.world
        expert = torch.cat(all_gather(self.wire, self.peers, topk_idx)) - self.wire.rank * each
        weight = torch.cat(all_gather(self.wire, self.peers, topk_weights))
        here = (expert >= 0) & (expert < each)
        rows = here.any(1).nonzero().squeeze(1)
        expert, weight = expert.masked_fill(~here, -1), weight.masked_fill(~here, 0.0)
        return tokens[rows], expert[rows], weight[rows], rows, Event()

    def combine(self, rows: Tensor, handle: Tensor, topk_weights: Tensor | None = None, **_):
        return self._sum(rows, handle), None if topk_weights is None else self._sum(topk_weights, handle), Event()

    def _sum(self, rows: Tensor, handle: Tensor) -> Tensor:
        whole = torch.zeros(self.wire.world * TOKENS, rows.shape[1], dtype=torch.float32)
        whole[handle] = rows.float()
        summed = all_reduce_sum(self.wire, self.peers, whole)
        return summed[self.wire.rank * TOKENS :][:TOKENS].to(rows.dtype)


class Event:
    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deep_ep", SimpleNamespace(ElasticBuffer=Buffer))
    monkeypatch.setattr(deepep, "missing", lambda: "")


def run(wire: AbstractWire, plan: Plan, capacity: Capacity | None, **options: object) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    layer = MoE(DIM, 8, EXPERTS, 2, capacity=capacity, **options)
    layer.parallelize(Mesh(GRID, wire), plan)
    x = torch.randn(4, TOKENS, DIM)[wire.rank].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    (y * torch.linspace(-1, 1, DIM)).sum().backward()
    parameters = [parameter.grad for parameter in layer.parameters()]
    assert x.grad is not None
    return y.detach(), x.grad, *(gradient for gradient in parameters if gradient is not None)


@pytest.mark.usefixtures("imitation")
@pytest.mark.parametrize("capacity", [None, Capacity.fixed(0.75)], ids=["dropless", "drops"])
def test_it_computes_what_the_programs_compute(capacity: Capacity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_ranks(4, lambda wire: run(wire, Plan(), capacity))

    def ranks(wire: AbstractWire) -> tuple[Tensor, ...]:
        return run(wire, Plan(all_to_all="deepep"), capacity)

    wires: dict[int, AbstractWire] = {}
    monkeypatch.setattr(on_mesh, "open_deepep", lambda grid, rank, experts: deepep.DeepEP(wires[rank], experts))
    found = run_ranks(4, lambda wire: ranks(wires.setdefault(wire.rank, wire)))
    for ours, theirs in zip(found, plain, strict=True):
        assert len(ours) == len(theirs) == 6
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.03)


@pytest.mark.usefixtures("imitation")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"router": "expert_choice"}, "deepep needs a router in which every token chooses"),
        ({"apply_weight": "before"}, 'apply_weight="before" clashes with plan.all_to_all=deepep'),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_mesh, "open_deepep", lambda grid, rank, experts: deepep.DeepEP(None, experts))
    with pytest.raises(InputError, match=words):
        run_ranks(4, lambda wire: run(wire, Plan(all_to_all="deepep"), None, **options))


def test_without_the_package_every_rank_says_so() -> None:
    with pytest.raises(
        InputError, match=r"plan.all_to_all=deepep: the package deep_ep is not installed: choose multicast"
    ):
        run_ranks(4, lambda wire: run(wire, Plan(all_to_all="deepep"), None))


@pytest.mark.parametrize(
    ("plan", "grid", "words"),
    [
        (Plan(all_to_all="deepep", chunks=2), GRID, "plan.chunks=2 clashes with plan.all_to_all=deepep"),
        (Plan(all_to_all="deepep", codec="int8"), GRID, "plan.codec=int8 clashes"),
        (Plan(all_to_all="deepep"), Grid(world=4, ep=2, etp=2), "needs mesh.tp=1 and mesh.etp=1, got 1 and 2"),
    ],
)
def test_clashes_are_named(plan: Plan, grid: Grid, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compile_plan(plan, grid)
