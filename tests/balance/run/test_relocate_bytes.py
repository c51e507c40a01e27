"""The bytes that moving samples saves on the wire, against the prediction of the decision."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, SampleTrip
from moesaic.balance.run.residual import Residual
from moesaic.balance.samples import AbstractPlacer, Given, Homes, TwoStage, Volume
from moesaic.comm.loopback import LoopbackTransport, run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.policies.stay import Stay

DIM = 64
EXPERTS = 8
SLOTS = 2
LENGTH = 16
GRID = Grid(world=4, ep=4, ranks_per_node=2)
ROW = DIM * 8


def layers() -> list[MoE]:
    """Two layers that route a token by its first entries and add nothing to it, so predictions come
    true."""
    made = [MoE(DIM, 8, EXPERTS, 2, losses=()).double() for _ in range(2)]
    for layer in made:
        with torch.no_grad():
            layer.router.weight.copy_(torch.eye(EXPERTS, DIM))  # type: ignore[operator, union-attr]
            layer.experts.w2.zero_()
    return made


def local_batch() -> torch.Tensor:
    """Samples with tokens that prefer two experts each, on another node than the sample."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(8, LENGTH, DIM)))
    for sample, row in enumerate(x):
        first = (2 * (sample // 2) + 4) % EXPERTS  # the experts of the rank two further on
        row[:, first : first + 2] += 6
    return x


def sent(
    placer: AbstractPlacer, *, rides: bool, backward: bool = False
) -> tuple[int, tuple[Volume, Volume]]:
    """Return the bytes between nodes of a pass through both layers, and the volumes that the first
    decision predicted."""
    found = passes(placer, rides=rides, backward=backward)
    return sum(crossed for crossed, _ in found), found[0][1].moves[0].volumes()


def passes(
    placer: AbstractPlacer, *, rides: bool, backward: bool = False
) -> list[tuple[int, SampleTrip]]:
    """Return the bytes that each rank sends to the other node, and its trip."""
    whole = layers()
    x = local_batch()

    def rank(transport: LoopbackTransport) -> tuple[int, SampleTrip]:
        mine = copy.deepcopy(whole)
        mesh = Mesh(GRID, transport)
        for layer in mine:
            layer.parallelize(mesh, Plan())
        trip = Relocator(mesh, placer).start(
            [Following(layer.router, 2) for layer in mine], SLOTS, LENGTH
        )
        h = x[SLOTS * transport.rank : SLOTS * transport.rank + SLOTS].clone().requires_grad_()
        for layer in mine:
            move = trip.next()
            y = MovingMoE(layer)(h, move=move, residual=Residual(h) if rides else None)
            h = y if rides else move.carry(h) + y
        if backward:
            h.sum().backward()
        crossed = sum(
            n
            for (a, b), n in transport.mailbox.bytes_sent.items()
            if a == transport.rank and a // 2 != b // 2
        )
        return crossed, trip

    return run_ranks(4, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rides", [True, False])
def test_the_bytes_that_are_saved_are_those_that_were_promised(rides: bool, backward: bool) -> None:
    """A separate residual is sent after both layers; the second time to the first homes, whatever
    was decided."""
    still, _ = sent(Stay(), rides=rides, backward=backward)
    moving, (before, after) = sent(TwoStage(least_gain=0.0), rides=rides, backward=backward)
    assert before.inter > 400
    assert after.inter < 0.7 * before.inter
    way_home = 0 if rides else 8 * LENGTH
    promised = (before.inter - after.inter - way_home) * ROW * (1 + backward)
    lanes = (before.inter + after.inter) * 16 * (1 + backward)
    assert abs(still - moving - promised) < lanes


def test_residuals_that_ride_cost_nothing() -> None:
    homes = Homes(np.array([[4, 5], [6, 7], [0, 1], [2, 3]]))
    (rides, _), (alone, _) = (sent(Given([homes]), rides=each) for each in (True, False))
    shares = 2 * 8 * LENGTH * 2 * 8
    saved = 2 * 8 * LENGTH * ROW - (alone - rides)
    assert 0 < saved <= shares, "eight samples there and back, but for a number with each copy"


def test_counts_are_of_samples_wherever_these_are() -> None:
    homes = Homes(np.array([[5, 4], [0, 7], [6, 1], [3, 2]]))
    for _, trip in passes(Given([homes]), rides=True):
        first, second = (move.load for move in trip.moves)
        assert second.homes is homes
        assert np.array_equal(first.copies, second.copies)
        assert np.array_equal(first.copies, first.following)
        assert not np.any(first.carried)
        assert second.following is None
