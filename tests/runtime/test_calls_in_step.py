"""Ranks that fall out of step: one calls a layer more, or runs no backward pass. Both are told, in
one line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moesaic import Mesh, MoE, Plan, average_gradients, clip_grad_norm_, in_flight
from moesaic.comm import waits
from worlds import on_ranks, refusal

SECONDS = 6
"""The timeout of the ranks' process group."""


def pair_of_layers() -> tuple[Mesh, MoE, MoE]:
    """Return two equal layers on two ranks, whose messages have a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    mesh = Mesh.create(ep=2, group=group)
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = MoE(dim=4, hidden=8, num_experts=4, top_k=2).double()
        layer.parallelize(mesh, Plan())
        pair.append(layer)
    return mesh, pair[0], pair[1]


def one_layer_more(odd: bool) -> None:
    """One rank calls a second layer while the other is in its backward pass."""
    _, first, second = pair_of_layers()
    y = first(torch.randn(6, 4, dtype=torch.float64))
    (second(y) if odd else y).sum().backward()


def no_backward(odd: bool) -> None:
    """One rank runs no backward pass, and goes on with the next step."""
    _, first, _ = pair_of_layers()
    for _ in range(2):
        y = first(torch.randn(6, 4, dtype=torch.float64))
        if not odd:
            y.sum().backward()


def backward_of_another(odd: bool) -> None:
    """Ranks run the backward passes of two layers in another order."""
    _, first, second = pair_of_layers()
    x = torch.randn(6, 4, dtype=torch.float64)
    results = [first(x), second(x)]
    for y in reversed(results) if odd else results:
        y.sum().backward()


def no_backward_but_averages(odd: bool) -> None:
    """One rank skips the backward pass, and averages gradients at once."""
    mesh, first, _ = pair_of_layers()
    y = first(torch.randn(6, 4, dtype=torch.float64))
    if not odd:
        y.sum().backward()
    average_gradients(first, mesh)


def one_more_on_the_mesh(odd: bool) -> None:
    """One rank spreads a second layer while the other calls the first."""
    mesh, first, _ = pair_of_layers()
    if odd:
        MoE(dim=4, hidden=8, num_experts=4, top_k=2).double().parallelize(mesh, Plan())
    first(torch.randn(6, 4, dtype=torch.float64))


def refused_alone(odd: bool) -> None:
    """One rank may not spread a layer, whose settings the other compares."""
    mesh, _, _ = pair_of_layers()
    MoE(dim=4, hidden=8, num_experts=4, top_k=1 if odd else 2).parallelize(mesh)


def one_micro_batch_more(odd: bool) -> None:
    """One rank runs a micro-batch more before it averages gradients."""
    mesh, first, _ = pair_of_layers()
    for _ in range(3 if odd else 2):
        first(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    average_gradients(first, mesh)


def two_more_in_flight(odd: bool) -> None:
    """The same with two micro-batches in flight."""
    mesh, first, _ = pair_of_layers()
    tokens = [torch.randn(6, 4, dtype=torch.float64) for _ in range(4 if odd else 2)]
    for losses in in_flight(lambda x: first(x).sum(), tokens):
        torch.stack(losses).sum().backward()
    average_gradients(first, mesh)


def one_micro_batch_more_before_clipping(odd: bool) -> None:
    """One rank clips while the other runs a micro-batch more."""
    mesh, first, _ = pair_of_layers()
    for _ in range(3 if odd else 2):
        first(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    clip_grad_norm_(first, 1.0, mesh=mesh)


def frozen_later(odd: bool) -> None:
    """One rank freezes dense parameters after the first step."""
    mesh, first, _ = pair_of_layers()
    model = nn.Sequential(nn.Linear(4, 4).double(), first)
    for frozen in (False, odd):
        model[0].requires_grad_(not frozen)
        model(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
        average_gradients(model, mesh)


def leaves(odd: bool) -> None:
    """One rank runs no backward pass, and calls nothing more while the other waits."""
    _, first, _ = pair_of_layers()
    y = first(torch.randn(6, 4, dtype=torch.float64))
    if not odd:
        y.sum().backward()


CASES: dict[str, tuple[Callable[[bool], None], str]] = {
    "one layer more": (
        one_layer_more,
        "rank 0 waits in the backward pass of layer 0; rank 1 waits in the forward pass of layer 1",
    ),
    "no backward": (
        no_backward,
        "rank 0 waits in the backward pass of layer 0; rank 1 waits in the forward pass of layer 0",
    ),
    "backward of another": (
        backward_of_another,
        "rank 0 waits in the backward pass of layer 0; rank 1 waits in the backward pass of layer "
        "1",
    ),
    "no backward but averages": (
        no_backward_but_averages,
        "rank 0 waits in the backward pass of layer 0; rank 1 waits in average_gradients",
    ),
    "one more on the mesh": (
        one_more_on_the_mesh,
        "rank 0 waits in the forward pass of layer 0; rank 1 waits in parallelize",
    ),
    "one micro-batch more": (
        one_micro_batch_more,
        "rank 0 waits in average_gradients; rank 1 waits in the forward pass of layer 0",
    ),
    "two more in flight": (
        two_more_in_flight,
        "rank 0 waits in average_gradients; rank 1 waits in the forward pass of layer 0 in "
        "micro-batch 2",
    ),
    "one more before clipping": (
        one_micro_batch_more_before_clipping,
        "rank 0 waits in the norm of all gradients; rank 1 waits in the forward pass of layer 0",
    ),
    "frozen later": (
        frozen_later,
        "rank 0 waits in average_gradients of 36 values of torch.float64; rank 1 waits in "
        "average_gradients of 16 values of torch.float64",
    ),
}


def refusals() -> dict[str, str]:
    odd = dist.get_rank() == 1
    found = {name: refusal(case, odd) for name, (case, _) in CASES.items()}
    for case in (leaves, refused_alone):  # in which one rank waits alone
        found[case.__name__] = refusal(case, odd)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    return on_ranks(2, refusals)


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_say_in_one_line_where_each_waits(
    results: list[dict[str, str]], name: str
) -> None:
    line = f"InputError: {CASES[name][1]}: {waits.ADVICE}"
    assert [of_rank[name] for of_rank in results] == [line, line]


def test_a_rank_that_is_left_alone_names_itself_and_the_other(
    results: list[dict[str, str]],
) -> None:
    assert results[1]["leaves"] == ""
    assert results[0]["leaves"] == (
        "LostMessageError: rank 0 waited in the backward pass of layer 0 for rank 1, which waits "
        f"in no call of a layer, or has ended: {waits.ADVICE}"
    )


def test_a_rank_whose_neighbour_may_not_spread_a_layer_names_it(
    results: list[dict[str, str]],
) -> None:
    assert results[1]["refused_alone"].startswith("InputError: top_k=1 with ")
    assert results[0]["refused_alone"].startswith(
        "LostMessageError: rank 0 waited in parallelize for rank 1, which waits in no call"
    )


def test_ranks_of_one_place_are_named_together() -> None:
    places = {0: "a", 2: "a", 1: "b"}
    assert waits.in_words(places) == "ranks 0, 2 wait in a; rank 1 waits in b"


def test_a_broken_connection_in_one_place_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Connection reset by peer")
    group = type("Group", (), {"rank": lambda self: 0})()
    monkeypatch.setattr(waits, "_others", lambda group, doing: {1: doing})
    assert waits.lost_message(group, 1, "the forward pass of layer 0", error) is error
    assert waits.lost_message(group, 1, "", error) is error


def averages_of_other_orders() -> list[float]:
    """Return a gradient of each of two parts, which one rank has the other way round."""
    mesh, _, _ = pair_of_layers()
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    for number, part in enumerate(parts.values()):
        part.weight.grad = torch.full((4, 4), float(number))
    order = reversed(parts) if dist.get_rank() else parts
    average_gradients(nn.ModuleDict({name: parts[name] for name in order}), mesh)
    return [
        float(part.weight.grad[0, 0]) for part in parts.values() if part.weight.grad is not None
    ]


def test_ranks_may_register_parameters_in_other_orders() -> None:
    assert on_ranks(2, averages_of_other_orders) == [[0.0, 1.0]] * 2


def words_after_calls() -> list[object]:
    """Return what this rank says that it does after each kind of call, and what it has left in the
    store after it told where it waits and went on."""
    mesh, first, _ = pair_of_layers()
    group = mesh.process_group
    store = dist.distributed_c10d._get_process_group_store(group)
    key = f"moesaic/waits/{group.rank()}"
    y = first(torch.randn(6, 4, dtype=torch.float64))
    found: list[object] = [mesh.transport.doing]
    y.sum().backward()
    found.append(mesh.transport.doing)
    average_gradients(first, mesh)
    found.append(mesh.transport.doing)
    mesh.transport.doing = "a test"
    mesh.transport._lost(None, RuntimeError())
    found.append(store.check([key]))
    dist.barrier()
    first(torch.randn(6, 4, dtype=torch.float64))
    found.append(store.check([key]))
    return found


def test_words_are_taken_back_when_a_rank_goes_on() -> None:
    assert on_ranks(2, words_after_calls) == [["", "", "", True, False]] * 2
