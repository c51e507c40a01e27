"""`parallelize` on ranks with different weights or settings, and calls that differ: one message, on
every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from moesaic import Capacity, Dropless, LoadBalance, Mesh, ModuleExperts, MoE, Plan, ZLoss
from moesaic.routing.routers import SigmoidTopK
from moesaic.runtime.sharding import described, fingerprint
from worlds import on_ranks, refusal


def layer(seed: int = 0, **options: object) -> MoE:
    torch.manual_seed(seed)
    return MoE(
        **{"dim": 4, "hidden": 8, "num_experts": 4, "top_k": 2, "router": "sigmoid", **options}
    ).double()


def spoiled(name: str) -> MoE:
    """Return a layer in which the last bit of one tensor's last word is flipped."""
    made = layer(shared_hidden=8)
    with torch.no_grad():
        flat = made.state_dict()[name].view(-1)
        flat[-1] = torch.nextafter(flat[-1], flat[-1] + 1)
    return made


def own_expert(seed: int) -> ModuleExperts:
    torch.manual_seed(seed)
    return ModuleExperts(lambda: nn.Linear(4, 4), 4, 4)


WEIGHTS: dict[str, tuple[Callable[[bool], MoE], str]] = {
    "seeds": (lambda odd: layer(seed=int(odd)), "weights.router.weight"),
    "router": (
        lambda odd: spoiled("router.weight") if odd else layer(shared_hidden=8),
        "weights.router.weight",
    ),
    "bias": (
        lambda odd: spoiled("router.bias") if odd else layer(shared_hidden=8),
        "weights.router.bias",
    ),
    "experts": (
        lambda odd: spoiled("experts.w2") if odd else layer(shared_hidden=8),
        "weights.experts.w2",
    ),
    "shared": (
        lambda odd: spoiled("shared.w13") if odd else layer(shared_hidden=8),
        "weights.shared.w13",
    ),
    "modules": (
        lambda odd: layer(experts=lambda *_: own_expert(int(odd))),
        "weights.experts.experts.0.weight",
    ),
}
"""For each name: a layer that differs on one rank, and the start of the message."""
SETTINGS: dict[str, tuple[Callable[[bool], MoE], str]] = {
    "hidden": (
        lambda odd: layer(hidden=16 if odd else 8),
        "layer.hidden differs: 8 on {most}, 16 on {odd}",
    ),
    "dim": (lambda odd: layer(dim=8 if odd else 4), "layer.dim differs: 4 on {most}, 8 on {odd}"),
    "num_experts": (
        lambda odd: layer(num_experts=8 if odd else 4),
        "layer.num_experts differs: 4 on {most}, 8 on {odd}",
    ),
    "top_k": (
        lambda odd: layer(top_k=3 if odd else 2),
        "layer.top_k differs: 2 on {most}, 3 on {odd}",
    ),
    "losses": (
        lambda odd: layer(losses=(ZLoss(0.1),) if odd else ()),
        "layer.losses differs: () on {most}, (ZLoss(",
    ),
    "coefficient": (
        lambda odd: layer(losses=(LoadBalance(0.1 + odd),)),
        "layer.losses differs: (LoadBalance(coefficient=0.1",
    ),
    "capacity": (
        lambda odd: layer(capacity=Capacity.fixed(2.0) if odd else Dropless()),
        "layer.capacity differs: Dropless() on {most}, Capacity(",
    ),
    "router": (
        lambda odd: layer(router="softmax" if odd else "sigmoid"),
        "layer.router differs: SigmoidTopK on {most}, ",
    ),
    "rate": (
        lambda odd: layer(router=partial(SigmoidTopK, bias_rate=0.5 if odd else 0.25)),
        "layer.router.bias_rate differs: 0.25 on {most}, 0.5 on {odd}",
    ),
    "dtype": (
        lambda odd: layer().float() if odd else layer(),
        "weights.router.weight differs: float64 (4, 4) ",
    ),
}
CALLS: dict[str, tuple[Callable[[MoE, torch.Tensor, bool], object], str]] = {
    "dtype": (
        lambda moe, x, odd: moe(x.float() if odd else x),
        (
            "call.dtype differs: torch.float64 on {most}, torch.float32 on {odd}: call the layer "
            "identically"
        ),
    ),
    "top_k": (
        lambda moe, x, odd: moe(x, top_k=1 if odd else 2),
        "call.top_k differs: 2 on {most}, 1 on {odd}: call the layer identically",
    ),
    "top_k and capacity": (
        lambda moe, x, odd: moe(x, top_k=1 if odd else 2, capacity=Capacity.fixed(1.0)),
        "call.top_k differs: 2 on {most}, 1 on {odd}: call the layer identically",
    ),
    "gradients": (
        lambda moe, x, odd: torch.no_grad()(moe)(x) if odd else moe(x),
        "call.gradients differs: True on {most}, False on {odd}: call the layer identically",
    ),
    "training": (
        lambda moe, x, odd: moe.train(not odd)(x),
        "call.training differs: True on {most}, False on {odd}: call the layer identically",
    ),
}


def refusals(transport: str = "gloo") -> dict[str, str]:
    """Return each rank's error, with new transports, since some errors close them."""
    odd = dist.get_rank() == 1
    found = {}
    for kind, table in (("weights", WEIGHTS), ("settings", SETTINGS)):
        for name, (make, _) in table.items():
            found[f"{kind}, {name}"] = refusal(
                make(odd).parallelize, Mesh.create(ep=2, transport=transport), Plan()
            )
    for name, (call, _) in CALLS.items():
        moe = layer()
        moe.parallelize(Mesh.create(ep=2, transport=transport), Plan())
        x = torch.randn(6, 4, dtype=torch.float64)
        moe(x)
        found[f"calls, {name}"] = refusal(call, moe, x, odd)
    for name in ("first calls", "later calls"):  # of two equal layers, in another order
        mesh = Mesh.create(ep=2, transport=transport)
        pair = (layer(), layer())
        for moe in pair:
            moe.parallelize(mesh, Plan())
        x = torch.randn(6, 4, dtype=torch.float64)
        for moe in pair if name == "later calls" else ():
            moe(x)
        found[f"order, {name}"] = refusal(pair[odd], x)
    sharded = layer()
    fully_shard(sharded)
    found["order"] = refusal(sharded.parallelize, Mesh.create(ep=2, transport=transport), Plan())
    return found


def everything() -> tuple[dict[str, str], list[torch.Tensor], list[str]]:
    return refusals(), broadcast_weights(), on_meta()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, str], list[torch.Tensor], list[str]]]:
    return on_ranks(2, everything)


@pytest.fixture(scope="module")
def results(ranks) -> list[dict[str, str]]:
    return [said for said, *_ in ranks]


EXPECTED = {
    f"{kind}, {name}": line
    for kind, table in (("weights", WEIGHTS), ("settings", SETTINGS), ("calls", CALLS))
    for name, (_, line) in table.items()
}


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_that_differ_are_told_in_what(results, name):
    check_differences(name, results)


def check_differences(name: str, results: list[dict[str, str]]) -> None:
    odd = "rank 1"
    most = "rank 0"
    expected = "InputError: " + EXPECTED[name].format(odd=odd, most=most)
    for of_rank in results:
        assert of_rank[name].startswith(expected), of_rank[name]
        assert "\n" not in of_rank[name]
        if name.startswith("weights"):
            assert re.search(
                rf"differs: float(32|64) \(.* [0-9a-f]{{16}} on {most}, .* [0-9a-f]{{16}} on {odd}",
                of_rank[name],
            )
            assert "parallelize(..., broadcast=True)" in of_rank[name]
    assert len({of_rank[name] for of_rank in results}) == 1


@pytest.mark.parametrize("name", ["first calls", "later calls"])
def test_ranks_that_call_equal_layers_in_another_order_are_told_which(results, name):
    for of_rank in results:
        assert (
            "call.layer differs: 0 on rank 0, 1 on rank 1: call the layer identically"
            in of_rank[f"order, {name}"]
        )


def test_sharding_before_parallelizing_is_refused(results):
    for of_rank in results:
        assert of_rank["order"].endswith(
            "is sharded already: call parallelize first, then fully_shard"
        )


def broadcast_weights() -> list[torch.Tensor]:
    moe = layer(seed=dist.get_rank(), shared_hidden=8)
    first = layer(seed=0, shared_hidden=8)
    with torch.no_grad():
        moe.router.bias += dist.get_rank()
    moe.parallelize(Mesh.create(ep=2), Plan(), broadcast=True)
    first.parallelize(Mesh.create(ep=2), Plan())
    x = torch.randn(6, 4, dtype=torch.float64)
    return [moe(x).detach() - first(x).detach(), moe.router.bias - first.router.bias]


def test_the_first_ranks_weights_can_be_taken(ranks):
    for _, of_rank, _ in ranks:
        assert not any(difference.any() for difference in of_rank)


def on_meta() -> list[str]:
    found = []
    for broadcast in (False, True):
        with torch.device("meta"):
            moe = MoE(4, 8, 4, 2)
        found.append(refusal(moe.parallelize, Mesh.create(ep=2), Plan(), broadcast=broadcast))
    return found


def test_meta_weights_are_not_compared(ranks):
    with torch.device("meta"):
        moe = MoE(4, 8, 4, 2)
    assert described(moe, values=True)["experts.w13"] == "float32 (4, 2, 8, 4) on meta"
    assert [said for *_, said in ranks] == [["", ""], ["", ""]]


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (0, torch.float32),
        (1, torch.bool),
        (3, torch.bfloat16),
        (8, torch.int64),
        (65536 * 2 + 5, torch.float64),
    ],
)
def test_any_word_changes_the_hash(count, dtype):
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for place in {0, count // 2, count - 1} if count else ():
        other = tensor.clone()
        other[place] = 1 - other[place].int()
        assert fingerprint(other) != before


def test_the_order_of_words_changes_the_hash():
    words = torch.arange(65536 * 3, dtype=torch.int64).view(3, -1)
    assert (
        len(
            {
                fingerprint(words[list(order)])
                for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1))
            }
        )
        == 4
    )
    swapped = words.clone().view(-1)
    swapped[1], swapped[65536] = words.view(-1)[65536], words.view(-1)[1]
    assert fingerprint(swapped) != fingerprint(words)
