"""Tests that several ranks route like one process with their concatenated tokens: rows, drops,
counts, losses, gradients.

Ranks run on loopback; the expected values come from one process that has all tokens and no peers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers import TOP_K, make_router, pairwise, refused
from moesaic import Mesh, MoE, Plan
from moesaic.comm.collectives import share_of
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.losses import AbstractLoss, Importance, LoadBalance, ZLoss
from moesaic.routing.peers import Peers
from moesaic.routing.route import Routed, TokenInfo, route

DIM = 8
EXPERTS = 4
ONE_TOKEN_AT_A_TIME = [
    "softmax",
    "sigmoid",
    "switch",
    "group_limited",
    "cosine",
    "hash",
    "noisy",
    "gshard",
]
LOSSES = (LoadBalance(0.7), Importance(0.3), ZLoss(0.2))
CAPACITIES: dict[str, AbstractCapacity] = {
    "dropless": Dropless(),
    "fixed": Capacity.fixed(0.6),
    "tight": Capacity.fixed(0.1),
    "fitted": Capacity.fitted(),
    "at most": Capacity.fitted(at_most=0.8),
}


class CountingPeers(Peers):
    """The peers of all ranks of a transport, with a counter of exchanges."""

    def __init__(self, transport: AbstractTransport, slices: int = 1) -> None:
        super().__init__(transport, Grid(world=transport.world, tp=slices), slices > 1, bytes(16))
        self.exchanges = 0

    def gather(self, message: Tensor) -> Tensor:
        self.exchanges += 1
        return super().gather(message)


@dataclass(frozen=True)
class Tokens:
    """All tokens of a call, and the end of each rank's part."""

    x: Tensor
    valid: Tensor | None
    ids: Tensor
    noise: Tensor | None
    ends: list[int]

    def part(self, rank: int) -> slice:
        return slice(self.ends[rank - 1] if rank else 0, self.ends[rank])


def draw(name: str, lengths: Sequence[int], *, padded: bool, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    x = torch.randn(total, DIM, generator=generator, dtype=torch.float64) + torch.linspace(
        -1, 2, DIM
    )
    valid = torch.rand(total, generator=generator) < 0.7 if padded else None
    ids = torch.randint(0, 50, (total,), generator=generator)
    torch.manual_seed(seed)
    noise = make_router(name, DIM, EXPERTS).draw(total, x.device)
    return Tokens(x, valid, ids, noise, torch.tensor(lengths).cumsum(0).tolist())


def run(
    name: str,
    tokens: Tokens,
    part: slice,
    capacity: AbstractCapacity,
    losses: Sequence[AbstractLoss] = LOSSES,
    peers: Peers | None = None,
    **options: int | None,
) -> tuple[Routed, Tensor, list[Tensor]]:
    """Route a part of the tokens, and return the result with the auxiliary loss's gradients for the
    input and the router."""
    torch.manual_seed(7)
    router = make_router(name, DIM, EXPERTS).double()
    x = tokens.x[part].clone().requires_grad_()
    batch = TokenInfo(
        valid_T=None if tokens.valid is None else tokens.valid[part],
        token_ids=tokens.ids[part],
        noise=None if tokens.noise is None else tokens.noise[part],
        **options,  # type: ignore[arg-type]
    )
    routed = route(
        router,
        x,
        top_k=TOP_K.get(name, 2),
        capacity=capacity,
        losses=losses,
        batch=batch,
        peers=peers,
    )
    parameters = list(router.parameters())
    if routed.loss is None or not routed.loss.requires_grad:
        return routed, torch.zeros_like(x), [torch.zeros_like(p) for p in parameters]
    grads = torch.autograd.grad(routed.loss, [x, *parameters], materialize_grads=True)
    return routed, grads[0], list(grads[1:])


def rows(routed: Routed, first: int = 0) -> list[tuple[int, int, float]]:
    routing = routed.routing
    return sorted(
        zip((routing.token + first).tolist(), routing.expert.tolist(), routing.weight.tolist())
    )


def lengths_of(seed: int) -> list[int]:
    """Return a random number of tokens for each rank."""
    rng = random.Random(seed)
    return [rng.choice([0, 1, 4, 9]) for _ in range(rng.choice([2, 3, 4]))]


def has_one_rank(name: str, capacity: str, seed: int) -> bool:
    """Return whether at most one rank has tokens."""
    return sum(map(bool, lengths_of(seed))) < 2


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "group_limited"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_that_are_linear_in_sums_are_those_of_one_process(name: str, seed: int) -> None:
    losses = (LoadBalance(0.7), ZLoss(0.2))
    lengths = [4, 0, 9]
    tokens = draw(name, lengths, padded=seed > 0, seed=seed)
    whole, dx, dw = run(name, tokens, slice(0, sum(lengths)), Dropless(), losses)
    assert whole.loss is not None

    def rank(transport: AbstractTransport) -> tuple[Routed, Tensor, list[Tensor]]:
        return run(
            name, tokens, tokens.part(transport.rank), Dropless(), losses, CountingPeers(transport)
        )

    found = run_ranks(len(lengths), rank, seed=seed)
    for routed, _, _ in found:
        assert routed.loss is not None
        torch.testing.assert_close(routed.loss, whole.loss)
        assert list(map(float, routed.routing.losses.values())) == pytest.approx(
            [*map(float, whole.routing.losses.values())]
        )
    torch.testing.assert_close(torch.cat([grads for _, grads, _ in found]), dx)
    for parts, true in zip(zip(*(grads for _, _, grads in found)), dw, strict=True):
        torch.testing.assert_close(sum(parts), true)


@pytest.mark.parametrize(
    ("name", "capacity", "seed"),
    pairwise(ONE_TOKEN_AT_A_TIME, CAPACITIES, range(3), empty=has_one_rank),
)
def test_ranks_send_what_one_process_with_all_tokens_sends(
    name: str, capacity: str, seed: int
) -> None:
    lengths = lengths_of(seed)
    world = len(lengths)
    tokens = draw(name, lengths, padded=seed == 1, seed=seed)
    whole, dx, dw = run(name, tokens, slice(0, sum(lengths)), CAPACITIES[capacity])

    def rank(transport: AbstractTransport) -> tuple[Routed, Tensor, list[Tensor]]:
        return run(
            name,
            tokens,
            tokens.part(transport.rank),
            CAPACITIES[capacity],
            peers=CountingPeers(transport),
        )

    found = run_ranks(world, rank, seed=seed)
    together = [
        row for r, (routed, *_) in enumerate(found) for row in rows(routed, tokens.part(r).start)
    ]
    assert sorted(together) == rows(whole)
    for r, (routed, *_) in enumerate(found):
        routing = routed.routing
        record = routed.record
        assert routing.requested.tolist() == whole.routing.requested.tolist()
        assert routing.counts.tolist() == whole.routing.counts.tolist()
        assert int(routing.num_valid) == int(whole.routing.num_valid)
        assert (routing.capacity is None) == (whole.routing.capacity is None)
        if routing.capacity is not None:
            assert int(routing.capacity) == int(whole.routing.capacity)  # type: ignore[arg-type]
        own = torch.bincount(routing.expert, minlength=EXPERTS).tolist()
        assert record.gathered.by_rank[r].tolist() == own, (
            "what the others were told is what this rank sends"
        )
        for loss, value in routing.losses.items():
            torch.testing.assert_close(value, whole.routing.losses[loss])
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found]), dx)
    for at, grad in enumerate(dw):
        torch.testing.assert_close(sum(grads[at] for *_, grads in found), grad)


@pytest.mark.parametrize("order", ["position", "score"])
@pytest.mark.parametrize("name", ["softmax", "switch", "sigmoid"])
def test_a_limit_per_rank_drops_as_each_rank_alone_would(name: str, order: str) -> None:
    capacity = Capacity.fixed(0.6, scope="rank", order=order)  # type: ignore[arg-type]
    lengths = [5, 0, 9]
    tokens = draw(name, lengths, padded=True, seed=4)
    whole, *_ = run(name, tokens, slice(0, 14), Dropless())
    alone = [run(name, tokens, tokens.part(r), capacity, losses=())[0] for r in range(3)]

    def rank(transport: AbstractTransport) -> Routed:
        return run(
            name, tokens, tokens.part(transport.rank), capacity, peers=CountingPeers(transport)
        )[0]

    found = run_ranks(3, rank)
    for r, routed in enumerate(found):
        assert rows(routed) == rows(alone[r])
        assert routed.record.gathered.by_rank.tolist() == [
            each.routing.counts.tolist() for each in alone
        ]
        assert routed.routing.counts.tolist() == sum(each.routing.counts for each in alone).tolist()
        for loss, value in whole.routing.losses.items():
            # losses span all ranks nevertheless
            torch.testing.assert_close(routed.routing.losses[loss], value)
    assert sum(len(rows(each)) for each in alone) < len(rows(whole)), "something was dropped"


def test_order_by_score_is_each_ranks_own_under_either_scope() -> None:
    tokens = draw("softmax", [6, 6], padded=False, seed=2)

    def both(transport: AbstractTransport) -> list[list[tuple[int, int, float]]]:
        made = [Capacity.fixed(0.5, order="score", scope=scope) for scope in ("mesh", "rank")]  # type: ignore[arg-type]
        return [
            rows(
                run(
                    "softmax",
                    tokens,
                    tokens.part(transport.rank),
                    c,
                    peers=CountingPeers(transport),
                )[0]
            )
            for c in made
        ]

    for by_mesh, by_rank in run_ranks(2, both):
        assert by_mesh == by_rank


@pytest.mark.parametrize("level", ["micro_batch", "sequence", "global_batch"])
@pytest.mark.parametrize(
    ("sequences", "length", "slices", "groups"),
    [(2, 5, 2, 1), (3, 3, 4, 1), (2, 4, 2, 2), (1, 7, 3, 1)],
)
def test_slices_that_cut_sequences_give_the_losses_of_whole_ones(
    sequences, length, slices, groups, level
):
    """In schedule S1 each rank of a tensor group routes a contiguous share of the group's tokens,
    which may cut sequences."""
    per_group = sequences * length
    starts = [g * per_group + per_group * i // slices for g in range(groups) for i in range(slices)]
    ends = [*starts[1:], groups * per_group]
    tokens = draw("softmax", [b - a for a, b in zip(starts, ends)], padded=True, seed=3)
    losses = (LoadBalance(0.7, level=level), Importance(0.3), ZLoss(0.2))  # type: ignore[arg-type]
    earlier = torch.tensor([3, 0, 9, 1])
    whole, dx, dw = run(
        "softmax",
        tokens,
        slice(0, groups * per_group),
        Dropless(),
        losses,
        num_sequences=groups * sequences,
        earlier_counts=earlier,  # type: ignore[arg-type]
    )

    def rank(transport: AbstractTransport) -> tuple[Routed, Tensor, list[Tensor]]:
        first = share_of(per_group, transport.rank % slices, slices).start
        return run(
            "softmax",
            tokens,
            tokens.part(transport.rank),
            Dropless(),
            losses,
            CountingPeers(transport, slices),
            num_sequences=sequences,
            first_token=first,
            sequence_length=length,
            earlier_counts=earlier,  # type: ignore[arg-type]
        )

    found = run_ranks(slices * groups, rank)
    for routed, *_ in found:
        for name, value in whole.routing.losses.items():
            torch.testing.assert_close(routed.routing.losses[name], value)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found]), dx)
    for at, grad in enumerate(dw):
        torch.testing.assert_close(sum(grads[at] for *_, grads in found), grad)


def test_ranks_exchange_once_a_call_and_not_at_all_in_a_replay() -> None:
    tokens = draw("softmax", [3, 4], padded=False, seed=5)

    def rank(transport: AbstractTransport) -> tuple[int, int, bool]:
        peers = CountingPeers(transport)
        router = make_router("softmax", DIM, EXPERTS).double()
        x = tokens.x[tokens.part(transport.rank)]
        options = {"top_k": 2, "capacity": Capacity.fixed(0.7), "losses": LOSSES, "peers": peers}
        first = route(router, x, **options)  # type: ignore[arg-type]
        once = peers.exchanges
        again = route(router, x, replay=first.record, **options)  # type: ignore[arg-type]
        same = rows(first) == rows(again) and all(
            torch.equal(value, again.routing.losses[name])
            for name, value in first.routing.losses.items()
        )
        return once, peers.exchanges, same

    assert run_ranks(2, rank) == [(1, 1, True)] * 2


def test_different_numbers_of_sequences_are_refused_on_every_rank() -> None:
    grid = Grid(world=2, ep=2)
    messages: list[str] = []

    def rank(transport: AbstractTransport) -> None:
        layer = MoE(8, 8, 4, 2, losses=(LoadBalance(0.1, level="sequence"),))
        layer.parallelize(Mesh(grid, transport), Plan())
        caught = refused(lambda: layer(torch.randn(2 + transport.rank, 5, 8)))
        assert "call.sequences differs: 2 on rank 0, 3 on rank 1: pad" in caught
        messages.append(caught)

    run_ranks(2, rank)
    assert len(messages) == 2
    assert messages[0] == messages[1]
