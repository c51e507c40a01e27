"""Ranks that fall out of step: one calls a layer more, or runs no backward pass. Both are told, in
one line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moesaic import Mesh, MoE, Plan, average_gradients
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
}


def refusals() -> dict[str, str]:
    odd = dist.get_rank() == 1
    found = {name: refusal(case, odd) for name, (case, _) in CASES.items()}
    found["leaves"] = refusal(leaves, odd)
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


def test_ranks_of_one_place_are_named_together() -> None:
    places = {0: "a", 2: "a", 1: "b"}
    assert waits.in_words(places) == "ranks 0, 2 wait in a; rank 1 waits in b"


def test_a_broken_connection_in_one_place_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Connection reset by peer")
    group = type("Group", (), {"rank": lambda self: 0})()
    monkeypatch.setattr(waits, "_others", lambda group, doing: {1: doing})
    assert waits.lost_message(group, 1, "the forward pass of layer 0", error) is error
    assert waits.lost_message(group, 1, "", error) is error


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
