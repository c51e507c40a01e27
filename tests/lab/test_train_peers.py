"""Layers of others compute what the dense reference computes: outputs and all gradients, over real
processes."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import open_transport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.testing.reference import in_float64, reference
from moesaic_lab.peers import absence
from moesaic_lab.peers.deepspeed import DeepSpeedLayer
from moesaic_lab.peers.exchange import AbstractExchange, ReceiveFirst, TorchExchange
from moesaic_lab.peers.plain import PlainExpertParallel
from moesaic_lab.train.systems import peer_experts
from worlds import on_ranks

DIM = 8
HIDDEN = 12
EXPERTS = 8
TOKENS = 7
EXCHANGES = ("torch's", "receive-first")
Tensors = dict[str, torch.Tensor]


def make_layer(top_k: int) -> MoE:
    torch.manual_seed(top_k)
    return MoE(DIM, HIDDEN, EXPERTS, top_k, losses=()).double()


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's tokens and the gradient of what they become; the last rank has one token
    only."""
    generator = torch.Generator().manual_seed(rank)
    count = 1 if rank == 1 else TOKENS
    return tuple(
        torch.randn(count, DIM, generator=generator, dtype=torch.float64) for _ in range(2)
    )  # type: ignore[return-value]


def run_peer(kind: str, top_k: int, exchange: AbstractExchange) -> Tensors:
    """Return y, the gradients of x and of this rank's parameters, in the reference's layout."""
    layer = make_layer(top_k)
    (x, dy) = tokens_of(exchange.rank)
    if kind == "deepspeed":
        layer = layer.float()
        x = x.float()
        dy = dy.float()
    peer = (PlainExpertParallel if kind == "plain" else DeepSpeedLayer)(layer, exchange)
    x.requires_grad_()
    y = peer(x)
    (y * dy).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    experts = {id(p) for p in peer_experts(peer)}
    (router,) = [p.grad for p in peer.parameters() if id(p) not in experts]
    dist.all_reduce(router)
    found["router"] = router
    if kind == "plain":
        return found | {name: p.grad for name, p in peer.experts.named_parameters()}
    grads = {
        name.split(".")[-1]: []
        for name, _ in peer.named_parameters()
        if "deepspeed_experts" in name
    }
    for name, parameter in peer.named_parameters():
        if "deepspeed_experts" in name:
            grads[name.split(".")[-1]].append(parameter.grad)
    return found | {name: torch.stack(parts) for name, parts in grads.items()}


def run_peers() -> tuple:
    transport = open_transport()
    found = {}
    sent = {}
    for name, exchange in zip(
        EXCHANGES, (TorchExchange(dist.group.WORLD), ReceiveFirst(transport))
    ):
        for kind in ["plain"] + ([] if absence() else ["deepspeed"]):
            for top_k in (2, 3):
                exchange.sent.clear()
                found[kind, name, top_k] = run_peer(kind, top_k, exchange)
                sent[kind, name, top_k] = list(exchange.sent)
    return found, sent


@lru_cache(maxsize=2)
def found_on(world: int) -> list:
    return on_ranks(world, run_peers)


@lru_cache(maxsize=4)
def expected_on(world: int, top_k: int) -> Tensors:
    """Return the reference's result for the tokens of all ranks together."""
    twin = in_float64(make_layer(top_k))
    x, dy = (torch.cat(parts) for parts in zip(*(tokens_of(rank) for rank in range(world))))
    x.requires_grad_()
    y = reference(twin, x).y
    (y * dy).sum().backward()
    grads = {name: p.grad for name, p in twin.experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "router": twin.router.weight.grad, **grads}


def check(kind: str, world: int, name: str, top_k: int, tolerance: float) -> None:
    expected = expected_on(world, top_k)
    first = 0
    each = EXPERTS // world
    for rank, (found, _) in enumerate(found_on(world)):
        mine = found[kind, name, top_k]
        assert set(mine) == set(expected)
        count = len(tokens_of(rank)[0])
        for what, value in mine.items():
            right = expected[what]
            if what in ("y", "x"):
                right = right[first : first + count]
            elif what != "router":
                right = right[rank * each : (rank + 1) * each]
            torch.testing.assert_close(
                value.double(), right, rtol=tolerance, atol=tolerance, msg=f"{what}, rank {rank}"
            )
        first += count


@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", [2, 4])
def test_plain_expert_parallelism_is_the_reference(world, name, top_k):
    check("plain", world, name, top_k, 1e-12)


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", [2, 4])
def test_deepspeed_is_the_reference(world, name, top_k):
    check("deepspeed", world, name, top_k, 1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_both_exchanges_send_the_copies_of_others_and_the_counts(world):
    for rank, (_, sent) in enumerate(found_on(world)):
        assert sent["plain", "torch's", 2] == sent["plain", "receive-first", 2]
        x, _ = tokens_of(rank)
        twin = make_layer(2)
        choice = twin.router.choose(twin.router.scores(x, None, None), 2, None, None)
        home = choice.expert // (EXPERTS // world)
        crossing = int((home != rank).sum())
        forward = sum(size for _, _, size in sent["plain", "torch's", 2][: world - 1])
        assert forward == (world - 1) * 8 * EXPERTS // world  # counts, int64
        # Rows leave and the gradients of the results leave alike; what comes back is sent by the
        # others.
        rows = [size for _, _, size in sent["plain", "torch's", 2][world - 1 :]]
        others = sum(
            int((of_home == rank).sum()) for other, of_home in homes(world) if other != rank
        )
        assert sum(rows) == 2 * (crossing + others) * DIM * 8


def homes(world: int) -> list[tuple[int, torch.Tensor]]:
    twin = make_layer(2)
    found = []
    for rank in range(world):
        choice = twin.router.choose(
            twin.router.scores(tokens_of(rank)[0], None, None), 2, None, None
        )
        found.append((rank, choice.expert // (EXPERTS // world)))
    return found


def test_receive_first_runs_over_any_transport():
    def rank(transport):
        rows = torch.arange(3.0) + 10 * transport.rank
        return (
            ReceiveFirst(transport)
            .move(rows.unsqueeze(1), (1, 2), (1 + transport.rank, 1 + transport.rank))
            .flatten()
            .tolist()
        )

    assert run_ranks(2, rank) == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]]


class Alone(AbstractExchange):
    """Nobody else."""

    def _run(self, rows, arrived, sends, receives):
        arrived.copy_(rows)


def test_deepspeed_refuses_what_it_does_not_compute():
    with pytest.raises(InputError, match="softmax over the chosen experts"):
        DeepSpeedLayer(MoE(DIM, HIDDEN, EXPERTS, 2, router="sigmoid"), Alone(0, 1))
    with pytest.raises(InputError, match="SwiGLU"):
        DeepSpeedLayer(MoE(DIM, HIDDEN, EXPERTS, 2, experts="gelu"), Alone(0, 1))
