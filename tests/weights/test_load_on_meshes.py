"""A converted checkpoint in models that are spread over ranks: each rank loads its own part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from checkpoints import assert_bitwise, build, tensors_of
from mesh_ranks import differing, save_spread

import moesaic
from moesaic_lab.hf import RankCase
from worlds import on_ranks


@pytest.mark.parametrize(("world", "ep"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_rank_loads_its_own_part(world: int, ep: int, tmp_path: Path) -> None:
    build("Mixtral").to(torch.float32).save_pretrained(tmp_path / "hub")
    moesaic.convert(tmp_path / "hub", tmp_path / "out", to="moesaic", logits=False)
    for spread, wrong in on_ranks(
        world, differing, RankCase(str(tmp_path / "hub"), ep=ep), str(tmp_path / "out")
    ):
        assert spread > 10
        assert wrong == []


def test_what_several_ranks_wrote_is_read(tmp_path: Path) -> None:
    build("Mixtral").to(torch.float32).save_pretrained(tmp_path / "hub")
    on_ranks(2, save_spread, RankCase(str(tmp_path / "hub"), ep=2), str(tmp_path / "spread"))
    assert len(list((tmp_path / "spread").rglob("*.safetensors"))) == 2
    moesaic.convert(
        tmp_path / "spread", tmp_path / "out", to="hf", config=tmp_path / "hub", logits=False
    )
    assert_bitwise(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hub"))
