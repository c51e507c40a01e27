"""Policies that rest after passes without moves: when they rest, that nothing is exchanged then,
and that results stay."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from meshes import make_layer, tokens_of
from torch import Tensor

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, Rest
from moesaic.balance.run.residual import Residual
from moesaic.balance.samples import (
    AbstractPlacer,
    Given,
    Homes,
    SampleLoad,
    TwoStage,
    Volume,
    Weighed,
)
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.policies.stay import Stay
from moesaic_lab.recorder import Recorder

FOUR = Grid(world=4, ep=4, ranks_per_node=2)
ELSEWHERE = Homes(np.array([[5, 0], [2, 7], [1, 3], [6, 4]]))


class Lazy(AbstractPlacer):
    """Moves samples in the calls with the given numbers (`moves`), and rests for three passes."""

    rest = 3

    def __init__(self, moves: set[int]) -> None:
        self.asked = 0
        self._moves = moves

    def decide(self, load: SampleLoad) -> Homes:
        self.asked += 1
        return ELSEWHERE if self.asked in self._moves else load.homes


def test_it_rests_after_two_passes_in_which_nobody_moved() -> None:
    rest = Rest()
    seen = []
    moved: list[bool | None] = []
    for _ in range(12):
        seen.append(rest.begins(3, moved))
        moved = [None] if seen[-1] else [False, None]
    assert seen == [False, False, True, True, True, False, True, True, True, False, True, True]


def test_one_move_is_enough_to_go_on() -> None:
    rest = Rest()
    assert not rest.begins(3, [])
    for moved in ([False, True], [False, False], [True, False], [False, False]):
        assert not rest.begins(3, moved)
    assert rest.begins(3, [False, False])
    assert not any(Rest().begins(0, [False]) for _ in range(5)), "a policy that does not rest"


def test_where_an_arbiter_asks_nobody_nothing_is_counted() -> None:
    rest = Rest()
    assert [rest.begins(3, moved) for moved in ([False], [None], [None, None], [False])] == [
        False,
        False,
        False,
        True,
    ]


def test_policies_that_decide_rest_and_others_do_not() -> None:
    assert [
        placer.rest for placer in (Stay(), Given([]), TwoStage(), Weighed(), TwoStage(rest=0))
    ] == [0, 0, 15, 15, 0]


@pytest.mark.parametrize("moves", [set(), {3, 4}], ids=["nobody moves", "some move later"])
def test_passes_that_rest_tell_nothing_and_compute_the_same(moves: set[int]) -> None:
    layers = [make_layer(seed=seed) for seed in range(3)]

    def forward(mine: list, x: Tensor, relocator: Relocator | None) -> Tensor:
        trip = (
            None
            if relocator is None
            else relocator.start([Following(layer.router, 2) for layer in mine], 2, 3)
        )
        for layer in mine:
            x = (
                layer(x) + x
                if trip is None
                else MovingMoE(layer)(x, move=trip.next(), residual=Residual(x))
            )
        return x

    def rank(transport: AbstractTransport) -> tuple[list[float], list[int], int]:
        recorder = Recorder(transport)
        mesh = Mesh(FOUR, recorder)
        mine = copy.deepcopy(layers)
        for layer in mine:
            layer.parallelize(mesh, Plan())
        placer = Lazy(moves)
        relocator = Relocator(mesh, placer)
        errors = []
        messages = []
        for number in range(7):
            x = tokens_of(transport.rank, seed=number).view(2, 3, -1)
            expected = forward(mine, x, None)
            recorder.ranges.clear()
            found = forward(mine, x, relocator)
            messages.append(sum(len(held.messages) for held in recorder.ranges))
            errors.append(float((found - expected).detach().abs().max()))
        return errors, messages, placer.asked

    for errors, messages, asked in run_ranks(4, rank):
        assert max(errors) < 1e-12
        # asked twice in a pass of three layers: still, moved, still, still, then it rests
        if moves:
            assert asked == 8
            assert max(messages[4:]) < min(messages[:4])
        else:
            assert asked == 6
            assert max(messages[2:5]) < min(*messages[:2], messages[5])
            assert messages[6] < messages[5]


def test_gradients_in_a_pass_that_rests_are_those_of_the_plain_layer() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport) -> float:
        mesh = Mesh(FOUR, transport)
        gradients = []
        relocator = Relocator(mesh, Lazy(set()))
        for moving in (False, True):
            layer = copy.deepcopy(whole)
            layer.parallelize(mesh, Plan())
            for number in range(3):
                x = tokens_of(transport.rank, seed=number).view(2, 3, -1).requires_grad_()
                following = [Following(layer.router, 2)] * 2
                move = relocator.start(following, 2, 3).next() if moving else None
                MovingMoE(layer)(x, move=move).square().sum().backward()
                assert x.grad is not None
            assert move is None or (move.rests and move.volumes() == (Volume(0, 0), Volume(0, 0)))
            gradients.append((x.grad, layer.router.weight.grad))
        return max(float((a - b).abs().max()) for a, b in zip(*gradients))

    assert max(run_ranks(4, rank)) < 1e-12
