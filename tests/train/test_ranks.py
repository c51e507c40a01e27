"""A world of one rank agrees with itself, and meshes that need more ranks are refused."""

from __future__ import annotations

import pytest
import torch

from helpers import refused
from moesaic.configfile import override
from moesaic.errors import InputError, TrainingError
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.ranks import Ranks


def test_one_process_agrees_with_itself():
    ranks = Ranks()
    value = torch.tensor([1.0, -2.0])
    assert (ranks.rank, ranks.world, ranks.dp, ranks.dp_index, ranks.is_first) == (0, 1, 1, 0, True)
    for reduce in (ranks.total, ranks.mean, ranks.largest):
        assert torch.equal(reduce(value), value)
    assert ranks.gathered("x") == ["x"]
    assert ranks.from_first(3) == 3
    assert ranks.agree([]) == (None, False)
    assert ranks.agree(["SIGTERM", "SIGINT"], is_busy=True) == ("SIGTERM", True)
    ranks.require_same("anything", object(), "nothing")


def test_errors_pass_through_a_stretch_taken_together():
    for kind in (InputError, TrainingError, ZeroDivisionError):
        with pytest.raises(kind, match="as it was"), Ranks().together():
            raise kind("as it was")


@pytest.mark.parametrize(
    ("mesh", "needed"), [({"tp": 2}, 2), ({"ep": 2, "etp": 3}, 6), ({"tp": 4, "ep": 6}, 12)]
)
def test_a_mesh_of_several_ranks_needs_torchrun(mesh, needed):
    model = {"num_heads": 4, "dim": 32, "moe": {"num_experts": 12, "hidden": 12}}
    config = override(TrainConfig(), {"mesh": mesh, "model": model}, source="test")
    assert f"start with torchrun --nproc-per-node {needed} -m moesaic train" in refused(
        Ranks.of, config, "cpu"
    )


BAD_MESHES = {
    r"mesh.tp=3 does not divide model.num_heads=4": {"mesh": {"tp": 3}},
    r"mesh.ep=3 does not divide model.moe.num_experts=16": {"mesh": {"ep": 3}},
    r"mesh.etp=3 does not divide model.moe.hidden=256": {"mesh": {"etp": 3}},
    r"mesh.tp=2 does not divide the dense layers' inner width=33": {
        "mesh": {"tp": 2},
        "model": {"ffn": "dense", "dense_hidden": 33},
    },
    r"mesh.tp=2 does not divide the positions of a sequence \(for mesh.sequence_parallel\)=15": {
        "mesh": {"tp": 2, "sequence_parallel": True},
        "model": {"seq_len": 15},
    },
    r"plan.chunks=0: must be at least 1": {"plan": {"chunks": 0}},
}


@pytest.mark.parametrize("message", BAD_MESHES)
def test_meshes_that_do_not_fit_the_model_are_refused(message):
    with pytest.raises(InputError, match=message):
        override(TrainConfig(), BAD_MESHES[message], source="test")


def test_a_dense_model_asks_nothing_of_its_experts():
    table = {"mesh": {"ep": 3, "etp": 5}, "model": {"ffn": "dense"}}
    assert override(TrainConfig(), table, source="test").mesh == MeshConfig(ep=3, etp=5)
