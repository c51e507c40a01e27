"""The learning rate over the steps."""

from __future__ import annotations

import math

import pytest

from moesaic.train.config import OptimizerConfig
from moesaic.train.optimizer import learning_rate
from runs import lines, run_quietly, tiny


def test_learning_rate_endpoints():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(step, 20, config) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[19] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(11, 20, config) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 15))
    )
    assert learning_rate(40, 20, config) == pytest.approx(0.1)
    assert learning_rate(0, 1, OptimizerConfig(lr=1.0, warmup_steps=0)) == 1.0


def test_the_rate_of_the_metrics_is_the_schedules(tmp_path):
    config = tiny(tmp_path)
    run_quietly(config)
    expected = [learning_rate(step, 4, config.optimizer) for step in range(4)]
    assert [line["lr"] for line in lines(tmp_path / "run", "train")] == expected


def test_a_line_and_a_stable_rate_with_a_line_at_the_end():
    line = OptimizerConfig(lr=1.0, schedule="linear", final_share=0.0, warmup_steps=0)
    assert [learning_rate(step, 5, line) for step in range(5)] == pytest.approx(
        [1.0, 0.75, 0.5, 0.25, 0.0]
    )
    stable = OptimizerConfig(lr=1.0, schedule="wsd", final_share=0.5, warmup_steps=2)
    rates = [learning_rate(step, 53, stable) for step in range(53)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:43] == pytest.approx([1.0] * 41)
    assert rates[47] == pytest.approx(0.75)
    assert rates[52] == pytest.approx(0.5)
