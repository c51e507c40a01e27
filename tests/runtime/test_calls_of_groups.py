"""What ranks say that call a layer with different tokens, settings or states, where no message has
another length: in a tensor-parallel group, of losses, and of what a router adapts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic import LoadBalance, Mesh, MoE, Plan, finish_step, in_flight, set_loss_scale
from moesaic.routing.peers import batch_in_numbers, in_words, is_same_batch
from moesaic.runtime.routing_cache import checkpoint
from worlds import on_ranks, refusal

SECONDS = 6
"""The timeout of the ranks' process group."""
DIM = 4


def layer_on(sizes: dict[str, int], **options: object) -> MoE:
    """Return a layer on two ranks, whose messages have a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    torch.manual_seed(0)
    layer = MoE(DIM, 8, 4, top_k=2, **options).double()
    layer.parallelize(Mesh.create(group=group, **sizes), Plan())
    return layer


def tokens(number: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, DIM, dtype=torch.float64, generator=generator)


def train(layer: MoE, x: Tensor, **options: Tensor) -> None:
    layer(x, **options).sum().backward()


def other_tokens(odd: bool, sizes: dict[str, int]) -> None:
    train(layer_on(sizes), tokens(seed=int(odd)))


def other_tokens_later(odd: bool, sizes: dict[str, int]) -> None:
    layer = layer_on(sizes)
    train(layer, tokens())
    train(layer, tokens(seed=int(odd)))


def more_tokens(odd: bool, sizes: dict[str, int]) -> None:
    train(layer_on(sizes), tokens(8 if odd else 6))


def mask_on_one(odd: bool, sizes: dict[str, int]) -> None:
    mask = torch.tensor([True] * 4 + [False] * 2)
    train(layer_on(sizes), tokens(), **({"mask": mask} if odd else {}))


def other_ids(odd: bool, sizes: dict[str, int]) -> None:
    train(layer_on(sizes, router="hash"), tokens(), token_ids=torch.arange(6) + int(odd))


def rounded(odd: bool, sizes: dict[str, int]) -> None:
    """Ranks that add in another order have other last bits, which is no other batch."""
    train(layer_on(sizes), tokens() + 1e-9 * int(odd))


OF_A_GROUP: dict[str, tuple[Callable[[bool, dict[str, int]], None], str]] = {
    "other tokens": (other_tokens, "6 tokens of sum "),
    "other tokens later": (other_tokens_later, "6 tokens of sum "),
    "more tokens": (more_tokens, "8 tokens of sum "),
    "mask on one": (mask_on_one, "6 tokens (2 of padding) of sum "),
    "other ids": (other_ids, "6 tokens of sum "),
}
MESHES = {"experts whole": {"tp": 2, "ep": 2}, "experts in shards": {"tp": 2, "etp": 2}}


def scale_on_one(odd: bool) -> None:
    layer = layer_on({"ep": 2}, losses=(LoadBalance(0.1),))
    if odd:
        set_loss_scale(layer, 0.5)
    train(layer, tokens())


def step_finished_on_one(odd: bool) -> None:
    layer = layer_on({"ep": 2}, router="sigmoid")
    train(layer, tokens())
    if odd:
        finish_step(layer)
    train(layer, tokens())


def in_flight_on_one(odd: bool) -> None:
    layer = layer_on({"ep": 2})
    if not odd:
        train(layer, tokens())
        return
    for losses in in_flight(lambda x: layer(x).sum(), [tokens(), tokens()]):
        torch.stack(losses).sum().backward()


def scale_before_recomputing(odd: bool) -> None:
    """A recomputation runs as its first pass did, whatever was set since."""
    layer = layer_on({"ep": 2}, losses=(LoadBalance(0.1),))
    y = checkpoint(layer, tokens().requires_grad_())
    set_loss_scale(layer, 0.5)
    y.sum().backward()


CALL = "call the layer identically on every rank"
OF_ALL: dict[str, tuple[Callable[[bool], None], str]] = {
    "scale on one": (
        scale_on_one,
        f"call.set_loss_scale differs: nothing on rank 0, True on rank 1: {CALL}",
    ),
    "step finished on one": (step_finished_on_one, "router.bias differs: "),
    "in flight on one": (
        in_flight_on_one,
        f"call.micro_batch differs: nothing on rank 0, 0 on rank 1: {CALL}",
    ),
    "scale before recomputing": (scale_before_recomputing, ""),
}


def refusals() -> dict[str, str]:
    odd = dist.get_rank() == 1
    found = {}
    for mesh, sizes in MESHES.items():
        for name, (case, _) in OF_A_GROUP.items():
            found[f"{name}, {mesh}"] = refusal(case, odd, sizes)
        found[f"rounded, {mesh}"] = refusal(rounded, odd, sizes)
    return found | {name: refusal(case, odd) for name, (case, _) in OF_ALL.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return on_ranks(2, refusals)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_that_does_not_share_its_tokens_is_told_by_both_ranks(
    found: list[dict[str, str]], name: str, mesh: str
) -> None:
    lines = [rank[f"{name}, {mesh}"] for rank in found]
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        "InputError: ranks 0 and 1 of a tensor-parallel group call a layer with different tokens: "
        "6 tokens of sum "
    )
    assert OF_A_GROUP[name][1] in lines[0]
    assert lines[0].endswith(
        "on rank 1: give all ranks of the group the same x, mask and token_ids"
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_rounding_is_no_other_batch(found: list[dict[str, str]], mesh: str) -> None:
    assert [rank[f"rounded, {mesh}"] for rank in found] == ["", ""]


@pytest.mark.parametrize("name", OF_ALL)
def test_what_only_one_rank_does_is_told_by_both(found: list[dict[str, str]], name: str) -> None:
    lines = [rank[name] for rank in found]
    assert lines[0] == lines[1]
    right = OF_ALL[name][1]
    assert lines[0].startswith(f"InputError: {right}" if right else "")
    assert bool(lines[0]) == bool(right)


def test_a_batch_is_told_by_its_tokens_padding_ids_and_values() -> None:
    x = tokens(100)
    mask = torch.ones(100, dtype=torch.bool)
    ids = torch.arange(100)

    def numbers(x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> np.ndarray:
        return batch_in_numbers(x, mask, ids).numpy()

    one = numbers(x)
    assert is_same_batch(one, numbers(x, mask))
    assert is_same_batch(one, numbers(x * (1 + 1e-6)))
    moved = torch.zeros(100, dtype=torch.bool)
    moved[:99] = True
    other_end = moved.flip(0)
    assert not is_same_batch(numbers(x, moved), numbers(x, other_end))
    assert not is_same_batch(numbers(x, ids=ids), numbers(x, ids=ids.flip(0)))
    assert not is_same_batch(one, numbers(tokens(100, seed=1)))
    assert not is_same_batch(one, numbers(x[:99]))
    assert is_same_batch(numbers(x * torch.nan), one), "NaN tells nothing"
    assert is_same_batch(numbers(x[:0]), numbers(x[:0]))
    assert in_words(numbers(x, moved)).startswith("100 tokens (1 of padding) of sum ")
