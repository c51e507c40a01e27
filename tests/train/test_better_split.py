"""What a run says where its tokens cross a slow link between machines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.train import better_split, loop
from moesaic.train.better_split import BYTES, about_slow_link, outside_gbps
from moesaic.train.config import TrainConfig
from runs import tiny


def line(
    monkeypatch: pytest.MonkeyPatch, config: TrainConfig, gbps: float, rank: int = 0
) -> str | None:
    """Return the line of one of four ranks on two nodes whose link has a rate; negative for one
    that must not be timed."""

    def rate(*_: Any) -> float:
        assert gbps > 0, "no token crosses the link"
        return gbps

    monkeypatch.setattr(better_split, "outside_gbps", rate)
    monkeypatch.setattr(better_split, "open_transport", lambda name: None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return about_slow_link(config, world=4, per_node=2, most_stages=16)


def test_a_slow_link_that_tokens_cross_is_named_with_a_better_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    across = tiny(tmp_path, batch_size=8, accumulation=8, mesh={"ep": 4})
    said = line(monkeypatch, across, gbps=0.001)
    assert said is not None
    assert "carries 0.001 Gbit/s" in said
    assert "as fast as tp 1, ep 4, etp 1" in said
    assert "--planner.plan search" in said
    assert line(monkeypatch, across, gbps=0.001, rank=1) is None, "only the first rank searches"
    assert line(monkeypatch, across, gbps=100.0) is None, "the link is fast"
    inside = tiny(tmp_path, batch_size=8, accumulation=8, mesh={"ep": 2})
    assert line(monkeypatch, inside, gbps=-1.0) is None


def test_the_rate_is_that_of_all_ranks_of_a_node_together() -> None:
    def rank(transport: AbstractTransport) -> float:
        ticks = itertools.count()
        return outside_gbps(transport, 2, clock=lambda: 1e-3 * next(ticks))

    sent = 2 * BYTES / 2
    assert run_ranks(4, rank) == pytest.approx([8e-9 * sent / 1e-3] * 4)


@pytest.mark.parametrize(("plan", "is_named"), [("", True), ("search", False), ("p.toml", False)])
def test_a_run_that_was_planned_is_not_told_to_plan(
    plan: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[TrainConfig] = []

    def stop(*_: Any, **__: Any) -> None:
        raise KeyError("enough")

    def planned(config: TrainConfig, say: Any) -> TrainConfig:
        """Return a configuration as after planning, which empties `planner.plan`."""
        return replace(config, planner=replace(config.planner, plan=""))

    monkeypatch.setattr(loop, "with_planned", planned)
    monkeypatch.setattr(loop, "name_better_split", lambda config, say: named.append(config))
    monkeypatch.setattr(loop, "open_run", stop)
    with pytest.raises(KeyError, match="enough"):
        loop.train(tiny(tmp_path, planner={"plan": plan}))
    assert bool(named) is is_named
