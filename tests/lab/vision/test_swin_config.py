"""Shapes of image models: what fits, what is refused and with which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.errors import InputError
from moesaic_lab.vision.config import PRESETS, SwinConfig

SMALL = PRESETS["swinv2-s"]
MOE = PRESETS["swinv2-moe-s"]

BAD: dict[str, tuple[SwinConfig, dict[str, object]]] = {
    "swin.image_size=200: must be a multiple of 32, which all stages can halve": (
        SMALL,
        {"image_size": 200},
    ),
    "swin.window=7: must be a divisor of the 48 tokens of a side in stage 0": (
        SMALL,
        {"window": 7},
    ),
    "swin.heads=(3, 6), swin.depths=(2, 2, 18, 2): must be one number per stage each": (
        SMALL,
        {"heads": (3, 6)},
    ),
    "swin.heads=(3, 5, 12, 24): must be a divisor of the width 192 in stage 1": (
        SMALL,
        {"heads": (3, 5, 12, 24)},
    ),
    "swin.heads=(0, 6, 12, 24): must be a divisor of the width 96": (
        SMALL,
        {"heads": (0, 6, 12, 24)},
    ),
    "swin.top_k=33, swin.num_experts=32: must be at most as many as experts": (MOE, {"top_k": 33}),
    "swin.depths=(): must be blocks of at least one stage": (SMALL, {"depths": ()}),
    "swin.depths=(2, 0, 18, 2): must be": (SMALL, {"depths": (2, 0, 18, 2)}),
    "swin.dim=0: must be at least 1": (SMALL, {"dim": 0}),
    "swin.balance_loss=-1: must be at least 0 and finite": (MOE, {"balance_loss": -1}),
    "swin.mlp_ratio=nan: must be above 0 and finite": (MOE, {"mlp_ratio": float("nan")}),
    "swin.dense_stages=-1: must be at least 0": (MOE, {"dense_stages": -1}),
    "swin.norm='middle': must be post or pre": (SMALL, {"norm": "middle"}),
    "swin.ffn='sparse': must be moe or dense": (SMALL, {"ffn": "sparse"}),
    "swin.router='hash': must be a router that reads no token ids": (MOE, {"router": "hash"}),
    "swin.router='linear': must be a router": (MOE, {"router": "linear"}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused_in_one_line(message: str) -> None:
    config, changes = BAD[message]
    with pytest.raises(InputError) as caught:
        replace(config, **changes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_dense_model_may_name_more_experts_per_token_than_there_are() -> None:
    assert replace(SMALL, num_experts=1, top_k=2).ffn == "dense"


def test_moe_layers_stand_in_every_other_block_behind_the_first_two_stages() -> None:
    places = [(stage, block) for stage, depth in enumerate(MOE.depths) for block in range(depth)]
    sparse = [place for place in places if MOE.is_sparse(*place)]
    assert sparse == [(2, block) for block in range(1, 18, 2)] + [(3, 1)]
    assert not any(SMALL.is_sparse(*place) for place in places)
    assert [place for place in places if replace(MOE, dense_stages=0).is_sparse(*place)][:2] == [
        (0, 1),
        (1, 1),
    ]


def test_stages_halve_the_image_and_double_the_width() -> None:
    stages = range(SMALL.num_stages)
    assert [SMALL.resolution(stage) for stage in stages] == [48, 24, 12, 6]
    assert [SMALL.width(stage) for stage in stages] == [96, 192, 384, 768]
    assert [SMALL.hidden(stage) for stage in stages] == [384, 768, 1536, 3072]
    assert [SMALL.window_of(stage) for stage in stages] == [12, 12, 12, 6]
    assert [SMALL.shift(stage, 0) for stage in stages] == [0, 0, 0, 0]
    # one window has nowhere to go
    assert [SMALL.shift(stage, 1) for stage in stages] == [6, 6, 0, 0]
