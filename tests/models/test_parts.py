"""Cutting a model into parts of even time and memory."""

from __future__ import annotations

from itertools import combinations
from random import Random

import torch

from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.models.parts import cut_model
from moesaic.program.stage_cuts import SLACK, cut


def test_equal_blocks_are_shared_out_evenly() -> None:
    assert cut([1.0] * 8, [1.0] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_the_part_with_the_output_matrix_gets_fewer_blocks() -> None:
    assert cut([1.0] * 8, [1.0] * 8, 2, (0, 2)) == [range(5), range(5, 8)]
    with torch.device("meta"):
        small = GPT(ModelConfig(num_layers=6), 256)
        large = GPT(ModelConfig(num_layers=6), 50_000)
    assert cut_model(small, 2) == [range(3), range(3, 6)]
    assert len(cut_model(large, 2)[1]) < 3


def test_among_equal_times_the_largest_part_is_smallest() -> None:
    assert cut([1, 1, 1], [5, 1, 1], 2) == [range(1), range(1, 3)]


def test_cuts_are_the_best_of_all() -> None:
    rng = Random(0)
    for _ in range(30):
        blocks = rng.randint(3, 7)
        count = rng.randint(1, 3)
        times = [rng.uniform(1, 5) for _ in range(blocks)]
        sizes = [rng.uniform(1, 5) for _ in range(blocks)]
        ends = (rng.uniform(0, 3), rng.uniform(0, 3))
        found = []
        for inner in combinations(range(1, blocks), count - 1):
            bounds = (0, *inner, blocks)
            parts = [range(a, b) for a, b in zip(bounds, bounds[1:])]  # noqa: RUF007
            slowest = max(
                sum(times[i] for i in part)
                + (ends[0] if part.start == 0 else 0)
                + (ends[1] if part.stop == blocks else 0)
                for part in parts
            )
            largest = max(sum(sizes[i] for i in part) for part in parts)
            found.append((slowest, largest, parts))
        fastest = min(slowest for slowest, _, _ in found)
        wanted = min(largest for slowest, largest, _ in found if slowest <= SLACK * fastest)
        chosen = cut(times, sizes, count, ends)
        slowest, largest = next(each[:2] for each in found if each[2] == chosen)
        assert slowest <= SLACK * fastest
        assert largest == wanted
