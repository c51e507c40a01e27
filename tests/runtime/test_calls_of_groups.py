"""What ranks say that call a layer with different tokens, settings or states, where no message has
another length: in a tensor-parallel group, of losses, and of what a router adapts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic import LoadBalance, Mesh, MoE, Plan, finish_step, in_flight, set_loss_scale
from moesaic.routing.peers import batch_in_numbers, in_words, is_same_batch
from moesaic.runtime.expert_parallel import CHECKED_CALLS
from moesaic.runtime.routing_cache import checkpoint
from worlds import on_ranks, refusal

SECONDS = 6
"""The timeout of the ranks' process group."""
DIM = 4


def layer_on(on: dict[str, Any], **options: object) -> MoE:
    """Return a layer on two ranks, whose messages have a short timeout; `on` has the sizes of the
    mesh, and the schedule if it is not the default one."""
    sizes = dict(on)
    schedule = sizes.pop("schedule", None)
    plan = Plan() if schedule is None else Plan(schedule=schedule)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    torch.manual_seed(0)
    layer = MoE(DIM, 8, 4, top_k=2, **options).double()
    layer.parallelize(Mesh.create(group=group, **sizes), plan)
    return layer


def tokens(number: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, DIM, dtype=torch.float64, generator=generator)


def train(layer: MoE, x: Tensor, **options: Tensor) -> None:
    layer(x, **options).sum().backward()


def other_tokens(odd: bool, sizes: dict[str, Any]) -> None:
    train(layer_on(sizes), tokens(seed=int(odd)))


def other_tokens_later(odd: bool, sizes: dict[str, Any]) -> None:
    layer = layer_on(sizes)
    train(layer, tokens())
    train(layer, tokens(seed=int(odd)))


def more_tokens(odd: bool, sizes: dict[str, Any]) -> None:
    train(layer_on(sizes), tokens(8 if odd else 6))


def mask_on_one(odd: bool, sizes: dict[str, Any]) -> None:
    mask = torch.tensor([True] * 4 + [False] * 2)
    train(layer_on(sizes), tokens(), **({"mask": mask} if odd else {}))


def other_ids(odd: bool, sizes: dict[str, Any]) -> None:
    train(layer_on(sizes, router="hash"), tokens(), token_ids=torch.arange(6) + int(odd))


def rounded(odd: bool, sizes: dict[str, Any]) -> None:
    """Ranks that add in another order have other last bits, which is no other batch."""
    train(layer_on(sizes), tokens() + 1e-9 * int(odd))


OF_A_GROUP: dict[str, tuple[Callable[[bool, dict[str, Any]], None], str]] = {
    "other tokens": (other_tokens, "6 tokens of sum "),
    "other tokens later": (other_tokens_later, "6 tokens of sum "),
    "more tokens": (more_tokens, "8 tokens of sum "),
    "mask on one": (mask_on_one, "6 tokens (2 of padding) of sum "),
    "other ids": (other_ids, "6 tokens of sum "),
}
WHOLE_BATCH_CASES = [name for name in OF_A_GROUP if name != "other tokens later"]
MESHES = {"experts whole": {"tp": 2, "ep": 2}, "experts in shards": {"tp": 2, "etp": 2}}
WHOLE_BATCHES = {
    "baseline": {"tp": 2, "ep": 2, "schedule": "baseline"},
    "baseline, in shards": {"tp": 2, "etp": 2, "schedule": "baseline"},
    "ted": {"tp": 2, "etp": 2, "schedule": "ted"},
    "s2": {"tp": 2, "ep": 2, "schedule": "s2"},
    "s3, in shards": {"tp": 2, "etp": 2, "schedule": "s3"},
    "s2, in shards": {"tp": 2, "etp": 2, "schedule": "s2"},
}
"""Plans under which each rank of a group routes the whole batch, which they compare in the first of
so many calls."""


def other_tokens_in_a_later_comparison(odd: bool, sizes: dict[str, Any]) -> None:
    layer = layer_on(sizes)
    for _ in range(CHECKED_CALLS):
        layer(tokens())
    train(layer, tokens(seed=int(odd)))


def gradients_on_one(odd: bool, sizes: dict[str, Any]) -> None:
    with torch.set_grad_enabled(not odd):
        layer_on(sizes)(tokens())


def more_experts_on_one(odd: bool, sizes: dict[str, Any]) -> None:
    layer_on(sizes)(tokens(), top_k=1 + int(odd))


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
    for plan, sizes in WHOLE_BATCHES.items():
        for name in WHOLE_BATCH_CASES:
            found[f"{name}, {plan}"] = refusal(OF_A_GROUP[name][0], odd, sizes)
        found[f"later, {plan}"] = refusal(other_tokens_in_a_later_comparison, odd, sizes)
        found[f"gradients, {plan}"] = refusal(gradients_on_one, odd, sizes)
        found[f"top_k, {plan}"] = refusal(more_experts_on_one, odd, sizes)
        found[f"rounded, {plan}"] = refusal(rounded, odd, sizes)
    return found | {name: refusal(case, odd) for name, (case, _) in OF_ALL.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return on_ranks(2, refusals)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_that_does_not_share_its_tokens_is_told_by_both_ranks(
    found: list[dict[str, str]], name: str, mesh: str
) -> None:
    check_tokens_differ([rank[f"{name}, {mesh}"] for rank in found], OF_A_GROUP[name][1])


def check_tokens_differ(lines: list[str], batch: str) -> None:
    """Check what both ranks say, one of whose batches is `batch` in words."""
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        "InputError: ranks 0 and 1 of a tensor-parallel group call a layer with different tokens: "
        "6 tokens of sum "
    )
    assert batch in lines[0]
    assert lines[0].endswith(
        "on rank 1: give all ranks of the group the same x, mask and token_ids"
    )


@pytest.mark.parametrize("plan", WHOLE_BATCHES)
@pytest.mark.parametrize("name", [*WHOLE_BATCH_CASES, "later"])
def test_ranks_that_each_route_the_whole_batch_compare_it_in_the_first_of_many_calls(
    found: list[dict[str, str]], name: str, plan: str
) -> None:
    batch = OF_A_GROUP.get(name, OF_A_GROUP["other tokens"])[1]
    check_tokens_differ([rank[f"{name}, {plan}"] for rank in found], batch)


@pytest.mark.parametrize("plan", WHOLE_BATCHES)
@pytest.mark.parametrize("name", ["gradients", "top_k"])
def test_they_compare_how_they_call_as_well(
    found: list[dict[str, str]], name: str, plan: str
) -> None:
    lines = [rank[f"{name}, {plan}"] for rank in found]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"InputError: call.{name} differs: ")


@pytest.mark.parametrize("mesh", [*MESHES, *WHOLE_BATCHES])
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
