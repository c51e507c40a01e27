"""Whether samples move is decided by what moving saved last, compared with what the arbiter's other
options save."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from moesaic.balance.replication.policy import CallDecision, CallTraffic
from moesaic.balance.run.calls import AGAIN, MoveArbiter, saved_seconds
from moesaic.balance.samples import Homes, Volume
from moesaic.program.rates import Rates

COSTS = Rates(intra_gbps=8, inter_gbps=1, element_bytes=2)


@dataclass
class FakeMove:
    stay: Volume
    moved: Volume
    goal: Any = None
    before: Homes = field(default_factory=lambda: Homes.start(4, 2))

    def volumes(self) -> tuple[Volume, Volume]:
        return self.stay, self.moved


def saving(rows: int) -> Any:
    return FakeMove(Volume(0, 10_000), Volume(0, 10_000 - rows))


def verdict(alone: float, best: float) -> CallDecision:
    name = "alone" if best == alone else "spill"
    return CallDecision(
        option=name,
        program="alone" if name == "alone" else "replicated",
        seconds={"alone": alone, name: best},
        moved=lambda: (CallTraffic((5, 3), 900, 0), CallTraffic((4, 4), 500, 70)),
    )


def test_what_a_move_saves_by_hand() -> None:
    move: Any = FakeMove(Volume(1000, 5000), Volume(3000, 1000))
    bits = 8 * 16 * 2 * 2  # forward and backward
    assert saved_seconds(move, COSTS, dim=16) == pytest.approx(bits * (4000 / 1e9 - 2000 / 8e9) / 4)
    forward = replace(COSTS, element_bytes=2, backward=False)
    assert saved_seconds(move, forward, dim=16) == pytest.approx(
        saved_seconds(move, COSTS, dim=16) / 2
    )


def made() -> MoveArbiter:
    return MoveArbiter(COSTS)


def test_samples_move_first_and_go_on_while_that_gains_more() -> None:
    arbiter = made()
    each = saved_seconds(saving(1000), COSTS, 16)
    for _ in range(4):
        assert arbiter.prefers_moving()
        # half against three quarters
        arbiter.note_move(saving(1000), verdict(2 * each, 1.5 * each), 16)


def test_they_stay_where_replication_gains_more_and_try_again_now_and_then() -> None:
    arbiter = made()
    each = saved_seconds(saving(1000), COSTS, 16)
    assert arbiter.prefers_moving()
    arbiter.note_move(saving(1000), verdict(10 * each, 5 * each), 16)
    answers = []
    for _ in range(AGAIN + 3):
        answers.append(arbiter.prefers_moving())
        if answers[-1]:
            arbiter.note_move(saving(1000), verdict(10 * each, 5 * each), 16)
        else:
            arbiter.note_others(verdict(10 * each, 5 * each))
    assert answers == [False] * (AGAIN - 1) + [True] + [False] * 3


def test_the_margin_keeps_either_choice() -> None:
    each = saved_seconds(saving(1000), COSTS, 16)
    arbiter = made()
    arbiter.prefers_moving()
    # 0.5 moving, 0.48 replication
    arbiter.note_move(saving(1000), verdict(2 * each, 0.96 * each), 16)
    assert arbiter.prefers_moving()
    arbiter.note_move(saving(1000), verdict(2 * each, 0.8 * each), 16)
    assert not arbiter.prefers_moving()
    arbiter.note_others(verdict(2 * each, 1.02 * each))
    assert not arbiter.prefers_moving(), "0.5 against 0.51 is not better by a twentieth"
    arbiter.note_others(verdict(2 * each, 1.2 * each))
    assert arbiter.prefers_moving()


def test_a_move_that_saves_nothing_is_left() -> None:
    arbiter = made()
    arbiter.prefers_moving()
    arbiter.note_move(saving(0), verdict(1.0, 1.0), 16)
    assert not arbiter.prefers_moving()


def test_the_decision_that_is_kept_says_what_ran() -> None:
    found = made().note_move(saving(1000), verdict(1.0, 0.5), 16)
    assert (found.option, found.program, found.replicated) == ("relocate", "alone", None)
    assert found.moved() == (CallTraffic((5, 3), 900, 0),) * 2


def test_going_home_is_no_choice_and_teaches_nothing() -> None:
    arbiter = made()
    home = saving(0)
    home.goal = object()
    arbiter.prefers_moving()
    arbiter.note_move(home, verdict(1.0, 0.5), 16)
    assert arbiter.prefers_moving(), "still unknown what moving gains"
