"""Ranks started with different settings: the same one-line error on every rank, and no deadlock."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from moesaic.comm.collectives import check_same
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError


def said(of_ranks: Sequence[Mapping[str, object]], seed: int = 0) -> list[str | None]:
    """Return the error of each rank, and check that every rank has read all messages."""

    def rank(transport: AbstractTransport) -> str | None:
        try:
            check_same(transport, of_ranks[transport.rank])
        except InputError as error:
            return str(error)
        return None

    return run_ranks(len(of_ranks), rank, seed=seed)


SAME = {"mesh.tp": 2, "plan.schedule": "s2", "lr": 1e-3, "note": None}


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        (
            [
                {**SAME, "mesh.ep": 2},
                {**SAME, "mesh.ep": 2},
                {**SAME, "mesh.ep": 2},
                {**SAME, "mesh.ep": 4},
            ],
            "mesh.ep differs: 2 on ranks 0-2, 4 on rank 3: start every rank with the same settings",
        ),
        (
            [
                {"a": 1, "b": 1},
                {"a": 1, "b": 2},
                {"a": 1, "b": 1},
                {"a": 1, "b": 1},
                {"a": 1, "b": 3},
            ],
            (
                "b differs: 1 on ranks 0 and 2-3, 2 on rank 1, 3 on rank 4: start every rank with "
                "the same settings"
            ),
        ),
        (
            [{"a": 1}, {"a": 1, "b": "long " * 99}],
            (
                f"b differs: nothing on rank 0, {('long ' * 99).strip()} on rank 1: start every "
                "rank with the same settings"
            ),
        ),
        (
            [{"a": 1}, {"b": 1}],
            "a differs: 1 on rank 0, nothing on rank 1: start every rank with the same settings",
        ),
        (
            [{"a": 1, "b": 2}, {"b": 3, "a": 9}],
            "a differs: 1 on rank 0, 9 on rank 1: start every rank with the same settings",
        ),
        (
            [{"a": "x\ny"}, {"a": "é"}],
            "a differs: x y on rank 0, é on rank 1: start every rank with the same settings",
        ),
    ],
)
def test_every_rank_raises_the_same_line(of_ranks, message):
    assert said(of_ranks) == [message] * len(of_ranks)


@pytest.mark.parametrize(
    "of_ranks",
    [[SAME], [SAME] * 5, [{}] * 3, [SAME, dict(reversed(SAME.items()))]],
    ids=["one rank", "five ranks", "no fields", "another order"],
)
def test_the_same_settings_pass(of_ranks):
    assert said(of_ranks) == [None] * len(of_ranks)


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_is_found_and_named(seed):
    rng = random.Random(seed)
    world = rng.randint(2, 7)
    names = [f"field{i}" for i in range(rng.randint(1, 9))]
    base = {name: rng.randint(0, 99) for name in names}
    of_ranks = [dict(base) for _ in range(world)]
    odd = rng.randrange(world)
    name = rng.choice(names)
    if rng.random() < 0.4:
        del of_ranks[odd][name]
        value = "nothing"
    else:
        of_ranks[odd][name] = 100
        value = "100"
    (message,) = set(said(of_ranks, seed))
    assert message.startswith(f"{name} differs: ")
    assert f"{value} on rank {odd}" in message
