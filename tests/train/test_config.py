"""Configurations refuse invalid values, with a message that names the field and a valid value."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from helpers import refused
from moesaic.balance import EXPERT_PLACERS
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.policies import REPLICATION
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.shapes import MoEShape
from moesaic.train.config import (
    BalanceConfig,
    DataConfig,
    EvaluateConfig,
    MeshConfig,
    OptimizerConfig,
    SaveConfig,
    TrainConfig,
)

NAN = math.nan
INF = math.inf
BAD = [
    *(
        (kind, {name: value}, f"{prefix}{name}={value}: must be at least 1")
        for kind, prefix, names in (
            (
                TrainConfig,
                "^",
                ("steps", "batch_size", "accumulation", "log_every", "threads", "nonfinite_steps"),
            ),
            (EvaluateConfig, "^evaluate.", ("every", "sequences")),
            (SaveConfig, "^save.", ("every", "keep")),
            (MeshConfig, "^mesh.", ("pp", "tp", "ep", "etp", "ranks_per_node")),
            (DataConfig, "^data.", ("vocab_size",)),
            (BalanceConfig, "^balance.", ("experts_every",)),
        )
        for name, value in zip(names, itertools.cycle((0, -1)))
    ),
    *(
        (OptimizerConfig, {"lr": value}, f"optimizer.lr={value}: must be above 0 and finite")
        for value in (0.0, INF, NAN)
    ),
    *(
        (OptimizerConfig, {name: value}, f"optimizer.{name}={value}: must be 0 or more and finite")
        for name in (
            "clip_norm",
            "weight_decay",
            "warmup_steps",
            "expert_lr_scale",
            "router_lr_scale",
        )
        for value in (-1, NAN, INF)
    ),
    *((OptimizerConfig, {"final_share": value}, "must be from 0 to 1") for value in (1.5, NAN)),
    *(
        (OptimizerConfig, {"betas": value}, "both must be at least 0 and below 1")
        for value in ((1.0, 0.9), (0.9, -0.1))
    ),
    *(
        (DataConfig, {"val_share": value}, "^data.val_share=.*must be above 0 and below 1")
        for value in (0.0, 1.0, NAN)
    ),
    (TrainConfig, {"patience": 0.5}, "^patience=0.5: must be from 1 to 1500 seconds"),
    (TrainConfig, {"start_patience": NAN}, "^start_patience=nan: must be from 1 to 1500 seconds"),
    (TrainConfig, {"seed": -1}, "seed=-1: choose 0 or more"),
    (TrainConfig, {"seed": 2**63}, r"below 2\*\*63"),
    (MeshConfig, {"pp": 2, "parts_per_stage": 0}, "^mesh.parts_per_stage=0: must be at least 1"),
    (
        ModelConfig,
        {"num_layers": 10**18},
        "model.num_layers=1000000000000000000: must be at most 10000",
    ),
    (ModelConfig, {"dim": 2**31}, "model.dim=2147483648: must be at most 2147483647"),
    (
        BalanceConfig,
        {"experts": "best"},
        "^balance.experts='best' is unknown: choose one of none, balanced, smartmoe",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "message"), BAD)
def test_bad_values_are_refused_in_one_line(kind, fields, message):
    assert re.search(message, refused(kind, **fields))


def test_configurations_are_frozen_and_compare_by_value():
    assert TrainConfig() == TrainConfig()
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3


def test_tokens_per_step():
    config = TrainConfig(batch_size=3, accumulation=5, model=ModelConfig(seq_len=7))
    assert config.tokens_per_step == 3 * 5 * 7


@pytest.mark.parametrize("kind", [TrainConfig, DataConfig, OptimizerConfig, ModelConfig, MoEConfig])
def test_every_field_has_a_docstring(kind):
    sources = [inspect.getsource(each) for each in kind.__mro__ if is_dataclass(each)]
    documented = {
        name
        for text in sources
        for name in re.findall(r'^    (\w+): .*\n    """', text, re.MULTILINE)
    }
    assert documented >= {field.name for field in fields(kind)}


def test_options_inside_a_text_are_refused() -> None:
    words = (
        "optimizer.schedule='cosine:0.1': choose one of cosine, linear, wsd; what follows the "
        "colon has fields of its own"
    )
    with pytest.raises(InputError, match=words):
        override(TrainConfig(), {"optimizer": {"schedule": "cosine:0.1"}}, source="here")


def test_fields_of_the_model_decide_its_layers() -> None:
    table = {"moe_every": 2, "dense_hidden": 96, "num_layers": 8, "block": {"kv_heads": 2}}
    model = override(ModelConfig(), table, source="here")
    assert (model.moe_every, model.active_hidden, model.is_sparse(7), model.is_sparse(6)) == (
        2,
        96,
        True,
        False,
    )
    assert (model.kv_heads, model.head_dim) == (2, 32)
    assert MeshConfig(pp=2, parts_per_stage=2).least_ranks == 2


def test_names_without_a_list_of_choices_are_all_explained():
    for kind, name, names in (
        (MoEShape, "router", ROUTERS | ON_MESH),
        (BalanceConfig, "replication", REPLICATION),
        (BalanceConfig, "experts", EXPERT_PLACERS),
    ):
        source = inspect.getsource(kind)
        text = source[source.index(f"    {name}: ") :].split('"""')[1]
        assert [each for each in names if each not in re.findall(r"\w+", text)] == [], name
