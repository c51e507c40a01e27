"""The use of DeepEP, with an imitation of its `ElasticBuffer` over loopback; the kernels themselves
need GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moesaic import Capacity, Mesh, MoE, Plan
from moesaic.comm.collectives import all_gather, all_reduce_sum
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.runtime import deepep

DIM = 16
EXPERTS = 8
TOKENS = 6
GRID = Grid(world=4, ep=4)


@dataclass
class Handle:
    """The public part of DeepEP's `EPHandle`, and what the imitation must remember."""

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    buffer: Buffer
    rows: Tensor


class Event:
    """DeepEP's `EventOverlap`."""

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Return at once: there is nothing to wait for."""


class Buffer:
    """An imitation of `deep_ep.ElasticBuffer`, versions 2.0 and 2.1: arguments, defaults and
    errors, over a transport.

    Each rank receives the tokens of every rank that have an expert on it, source by source.
    """

    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ) -> None:
        self.transport = group
        self.peers = tuple(range(group.world))
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.hidden = hidden
        self.num_topk = num_topk
        sizes = torch.tensor([num_max_tokens_per_rank, hidden, num_topk])
        assert all(
            torch.equal(other, sizes) for other in all_gather(self.transport, self.peers, sizes)
        ), "ranks differ"

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        assert num_experts % self.transport.world == 0
        return 24

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        num_topk = (handle.topk_idx if topk_idx is None else topk_idx).shape[1]
        num_sms = self.get_theoretical_num_sms(num_experts, num_topk) if num_sms == 0 else num_sms
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert handle.buffer is self, "a handle is of the buffer that made it"
            num_experts = handle.num_experts
            num_max_tokens_per_rank = handle.num_max_tokens_per_rank
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] == self.hidden
        assert num_topk <= self.num_topk
        assert len(x) <= num_max_tokens_per_rank <= self.num_max_tokens_per_rank
        tokens = torch.cat(all_gather(self.transport, self.peers, x))
        if handle is not None:
            return tokens[handle.rows], None, None, handle, Event()
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        each = num_experts // self.transport.world
        expert = (
            torch.cat(all_gather(self.transport, self.peers, topk_idx)) - self.transport.rank * each
        )
        weight = torch.cat(all_gather(self.transport, self.peers, topk_weights))
        here = (expert >= 0) & (expert < each)
        rows = here.any(1).nonzero().squeeze(1)
        expert = expert.masked_fill(~here, -1)
        weight = weight.masked_fill(~here, 0.0)
        handle = Handle(
            num_experts,
            1 if expert_alignment is None else expert_alignment,
            num_max_tokens_per_rank,
            num_sms,
            topk_idx.clone(),
            self,
            rows,
        )
        return tokens[rows], expert[rows], weight[rows], handle, Event()

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        assert handle.buffer is self, "a handle is of the buffer that made it"
        assert x.dtype == torch.bfloat16
        assert x.shape == (len(handle.rows), self.hidden)
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(x, handle), weights, Event()

    def _sum(self, rows: Tensor, handle: Handle) -> Tensor:
        tokens = len(handle.topk_idx)
        whole = torch.zeros(self.transport.world * tokens, rows.shape[1], dtype=torch.float32)
        whole[handle.rows] = rows.float()
        summed = all_reduce_sum(self.transport, self.peers, whole)
        return summed[self.transport.rank * tokens :][:tokens].to(rows.dtype)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Buffer]:
    """Install the imitation as `deep_ep`; return the list of all ranks' buffers, which grows as
    they are opened."""
    found: list[Buffer] = []

    def open_one(*arguments: object, **options: object) -> Buffer:
        found.append(Buffer(*arguments, **options))
        return found[-1]

    monkeypatch.setitem(
        __import__("sys").modules, "deep_ep", SimpleNamespace(ElasticBuffer=open_one)
    )
    monkeypatch.setattr(deepep, "missing", lambda: "")
    over_ep = property(lambda mesh: {"ep": SimpleNamespace(get_group=lambda: mesh.transport)})
    monkeypatch.setattr(Mesh, "sparse", over_ep)
    return found


def make(
    mesh: Mesh, plan: Plan, capacity: Capacity | None = None, top_k: int = 2, **options: object
) -> MoE:
    torch.manual_seed(0)
    layer = MoE(DIM, 8, EXPERTS, top_k, capacity=capacity, **options)
    layer.parallelize(mesh, plan)
    return layer


def forward(layer: MoE, rank: int, tokens: int = TOKENS, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, tokens, DIM, generator=torch.Generator().manual_seed(seed))[
        rank
    ].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        return x, layer(x)


def backward(layer: MoE, *calls: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Run the backward passes in the order of the calls; return results and all gradients."""
    for _, y in calls:
        (y * torch.linspace(-1, 1, DIM)).sum().backward()
    parameters = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return *(y.detach() for _, y in calls), *(x.grad for x, _ in calls), *parameters


def run(
    transport: AbstractTransport, plan: Plan, capacity: Capacity | None, **options: object
) -> tuple[Tensor, ...]:
    layer = make(Mesh(GRID, transport), plan, capacity, **options)
    return backward(layer, forward(layer, transport.rank))


def agree(found: list[tuple[Tensor, ...]], expected: list[tuple[Tensor, ...]], number: int) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) == number
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.03)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("capacity", [None, Capacity.fixed(0.75)], ids=["dropless", "drops"])
def test_it_computes_what_the_programs_compute(capacity: Capacity | None) -> None:
    plain, found = (
        run_ranks(4, lambda transport, plan=plan: run(transport, plan, capacity))
        for plan in (Plan(), Plan(all_to_all="deepep"))
    )
    agree(found, plain, 5)


def test_the_layers_of_a_mesh_share_a_buffer(opened: list[Buffer]) -> None:
    """There is one buffer per rank, width and top_k."""

    def work(transport: AbstractTransport) -> None:
        mesh = Mesh(GRID, transport)
        plan = Plan(all_to_all="deepep")
        for layer in [
            make(mesh, plan),
            make(mesh, plan),
            make(mesh, plan, Capacity.fixed(1.0)),
            make(mesh, plan, top_k=3),
        ]:
            backward(
                layer, forward(layer, transport.rank), forward(layer, transport.rank, TOKENS - 2)
            )

    run_ranks(4, work)
    assert sorted(buffer.num_topk for buffer in opened) == [2] * 4 + [3] * 4


def test_a_larger_call_leaves_earlier_ones_their_buffer(opened: list[Buffer]) -> None:
    """Forward, a larger forward, then both backward passes; the smaller buffer lives until its call
    no longer needs it."""

    def work(plan: Plan, transport: AbstractTransport) -> tuple[Tensor, ...]:
        layer = make(Mesh(GRID, transport), plan)
        calls = [
            forward(layer, transport.rank, tokens, seed) for seed, tokens in enumerate((3, 5, 5, 4))
        ]
        return backward(layer, *calls)

    plain, found = (
        run_ranks(4, lambda transport, plan=plan: work(plan, transport))
        for plan in (Plan(), Plan(all_to_all="deepep"))
    )
    agree(found, plain, 11)
    assert sorted(buffer.num_max_tokens_per_rank for buffer in opened) == [3] * 4 + [5] * 4


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"router": "expert_choice"}, "deepep needs a router in which every token chooses"),
        ({"apply_weight": "before"}, 'apply_weight="before" clashes with plan.all_to_all=deepep'),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run_ranks(4, lambda transport: run(transport, Plan(all_to_all="deepep"), None, **options))


def test_without_the_package_every_rank_says_so() -> None:
    with pytest.raises(
        InputError,
        match=r"plan.all_to_all=deepep: the package deep_ep is not installed: choose multicast",
    ):
        run_ranks(4, lambda transport: run(transport, Plan(all_to_all="deepep"), None))


@pytest.mark.parametrize(
    ("plan", "grid", "words"),
    [
        (
            Plan(all_to_all="deepep", chunks=2),
            GRID,
            "plan.chunks=2 clashes with plan.all_to_all=deepep",
        ),
        (Plan(all_to_all="deepep", codec="int8"), GRID, "plan.codec=int8 clashes"),
        (
            Plan(all_to_all="deepep"),
            Grid(world=4, ep=2, etp=2),
            "needs mesh.tp=1 and mesh.etp=1, got 1 and 2",
        ),
    ],
)
def test_clashes_are_named(plan: Plan, grid: Grid, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compile_plan(plan, grid)
