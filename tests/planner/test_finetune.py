"""Predictions of fine-tunes whose base models are frozen."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic.planner.finetune import FinetunePrediction, predict_finetune
from moesaic.planner.presets import read_job
from moesaic.shapes import ModelShape

QWEN = read_job("qwen3-30b-a3b").model
GIB = 2**30


def predict(shape: ModelShape = QWEN, **changed: Any) -> FinetunePrediction:
    sizes = {"ranks": 4, "memory_bytes": 24 * GIB, "tokens": 4096, "length": 4096, "method": "qlora", "rank": 8}
    return predict_finetune(shape, **{**sizes, **changed})


def test_frozen_experts_take_four_bits_and_are_spread() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    assert predict(ranks=1).parts["experts"] == experts * (0.5 + 4 / 64)
    assert predict(ranks=4).parts["experts"] == experts * (0.5 + 4 / 64) / 4
    assert predict(method="lora").parts["experts"] == experts * 2 / 4


def test_adapters_alone_have_gradients_and_states() -> None:
    of_expert = (2048 + 2 * 768) + (768 + 2048)
    of_attention = (2048 + 32 * 128) + (2048 + 4 * 128)
    adapters = 8 * 48 * (128 / 4 * of_expert + of_attention)
    parts = predict().parts
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (4 * adapters, 4 * adapters, 8 * adapters)


def test_a_large_vocabulary_is_the_peak_unless_logits_are_made_in_parts() -> None:
    assert predict().parts["logits and loss"] == 4096 * 151_936 * 12 + 151_936 * 2048 * 2
    assert "a block's activations" in predict(logits=256).parts
    assert predict(logits=256).bytes < predict().bytes - 5 * GIB


def test_what_fits_leaves_room_for_the_framework() -> None:
    needed = predict().bytes
    assert predict(memory_bytes=needed).fits is False
    assert predict(memory_bytes=1.05 * needed + GIB).fits
    assert predict(memory_bytes=None).fits is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 3}, "128 experts do not split over 3 ranks"),
        ({"tokens": 100}, "not whole sequences of length=4096"),
        ({"ranks": 0}, "ranks=0: must be at least 1"),
        ({"shape": ModelShape()}, "give the config.json of one"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        predict(**changed)
