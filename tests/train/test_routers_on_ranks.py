"""Every registered router trains on two and on four ranks, with FSDP2 over dp and edp, as in one
process.

The one process takes the ranks' parts of a batch as micro-batches, since some routers choose among
all tokens of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import TOP_K
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import ROUTERS
from moesaic.train.config import TrainConfig
from runs import lines, parameters, run_quietly, tiny
from train.worlds import Outcome, difference, train_on

SEQUENCES = 4


def even_noise(put: Callable[[type, str, object], None] = setattr) -> None:
    """Make every router draw the same noise for all tokens, so that it does not depend on which
    rank has a token."""
    for kind in subclasses(AbstractRouter):
        if "draw" in vars(kind):
            put(kind, "draw", evened(kind.draw))


def evened(draw: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def draw_evenly(router: AbstractRouter, num_tokens: int, device: torch.device) -> Tensor | None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            noise = draw(router, 1, device)
        return None if noise is None else noise.expand(num_tokens, -1)

    return draw_evenly


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def config_of(folder: Path, router: str, world: int) -> TrainConfig:
    """Return two steps with a router, on one process or on several ranks with two copies of the
    experts and more."""
    moe = {"router": router, "top_k": TOP_K.get(router, 2), "load_balance": 0.0, "num_experts": 8}
    if router in ("sigmoid", "group_limited"):
        moe["router_options"] = {"bias_rate": 0.05}
    config = tiny(folder, steps=2, precision="float64", batch_size=SEQUENCES, model={"moe": moe})
    return replace(config, out=str(folder / f"{router}-{world}"))


def alone(folder: Path, router: str, world: int) -> TrainConfig:
    config = config_of(folder, router, world)
    return replace(
        config, batch_size=SEQUENCES // world, accumulation=world, out=f"{config.out}-alone"
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(request, tmp_path_factory) -> tuple[Path, int, dict[str, list[Outcome]]]:
    folder = tmp_path_factory.mktemp("routers")
    world = request.param
    with pytest.MonkeyPatch.context() as patch:
        even_noise(patch.setattr)
        for router in ROUTERS:
            run_quietly(alone(folder, router, world))
    runs = [
        replace(config, mesh=replace(config.mesh, ep=world // 2))
        for config in (config_of(folder, router, world) for router in ROUTERS)
    ]
    outcomes = train_on(world, runs, prepare=even_noise)
    return folder, world, dict(zip(ROUTERS, outcomes))


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_trains_on_ranks_as_alone(world, router):
    folder, ranks, outcomes = world
    assert [outcome.refusal for outcome in outcomes[router]] == [""] * ranks
    here = Path(config_of(folder, router, ranks).out)
    there = Path(alone(folder, router, ranks).out)
    for a, b in zip(lines(here, "train"), lines(there, "train"), strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), abs=1e-9)
    assert len(lines(here, "train")) == 2
    assert difference(parameters(here), parameters(there)) < 1e-9
