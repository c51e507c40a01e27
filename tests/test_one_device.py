"""All Gloo groups of a rank of the tests share one device."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from worlds import on_ranks


def loops_and_sum() -> tuple[int, float]:
    """Return how many threads serve the devices of four groups, and a sum by the last group."""
    groups = [dist.new_group() for _ in range(3)]
    one = torch.ones(1)
    dist.all_reduce(one, group=groups[-1])
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n"), one.item()


def test_groups_of_a_rank_share_one_device() -> None:
    assert on_ranks(2, loops_and_sum) == [(1, 2.0)] * 2
