"""Configurations refuse invalid values, with a message that names the field and a valid value."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from moesaic.balance import EXPERT_PLACERS
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.named import REPLICATION
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.train import config as config_module
from moesaic.train.config import (
    BalanceConfig,
    DataConfig,
    EvaluateConfig,
    MeshConfig,
    OptimizerConfig,
    SaveConfig,
    TrainConfig,
)

BAD = [
    (lambda: TrainConfig(steps=0), "steps=0: must be at least 1"),
    (lambda: TrainConfig(batch_size=-1), "batch_size=-1: must be at least 1"),
    (lambda: TrainConfig(accumulation=0), "accumulation=0: must be at least 1"),
    (lambda: TrainConfig(log_every=0), "log_every=0: must be at least 1"),
    (lambda: EvaluateConfig(every=0), "^evaluate.every=0: must be at least 1"),
    (lambda: EvaluateConfig(sequences=0), "^evaluate.sequences=0: must be at least 1"),
    (lambda: SaveConfig(every=0), "^save.every=0: must be at least 1"),
    (lambda: SaveConfig(keep=0), "^save.keep=0: must be at least 1"),
    (lambda: TrainConfig(patience=0.5), "^patience=0.5: must be from 1 to 1500 seconds"),
    (lambda: TrainConfig(start_patience=math.nan), "^start_patience=nan: must be from 1 to 1500 seconds"),
    (lambda: TrainConfig(threads=0), "^threads=0: must be at least 1"),
    (lambda: TrainConfig(nonfinite_steps=0), "^nonfinite_steps=0: must be at least 1"),
    (lambda: MeshConfig(pp=0), "^mesh.pp=0: must be at least 1"),
    (lambda: MeshConfig(pp=2, parts_per_stage=0), "^mesh.parts_per_stage=0: must be at least 1"),
    (lambda: TrainConfig(seed=-1), "seed=-1: choose 0 or more"),
    (lambda: ModelConfig(num_layers=10**18), "model.num_layers=1000000000000000000: must be at most 10000"),
    (lambda: ModelConfig(dim=2**31), "model.dim=2147483648: must be at most 2147483647"),
    (lambda: TrainConfig(seed=2**63), "choose 0 or more, below 2\\*\\*63"),
    *(
        (lambda bad=bad: DataConfig(val_share=bad), f"^data.val_share={bad}: must be above 0 and below 1")
        for bad in (0.0, 1.0, math.nan)
    ),
    (lambda: DataConfig(vocab_size=0), "data.vocab_size=0: must be at least 1"),
    (lambda: OptimizerConfig(lr=0.0), "optimizer.lr=0.0: must be above 0"),
    (lambda: OptimizerConfig(lr=math.inf), "optimizer.lr=inf: must be above 0 and finite"),
    (lambda: OptimizerConfig(lr=math.nan), "optimizer.lr=nan: must be above 0 and finite"),
    (lambda: OptimizerConfig(clip_norm=math.nan), "optimizer.clip_norm=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.nan), "optimizer.weight_decay=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.inf), "optimizer.weight_decay=inf: must be 0 or more and finite"),
    (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr=nan"),
    (lambda: OptimizerConfig(warmup_steps=-1), "optimizer.warmup_steps=-1: must be 0 or more"),
    (lambda: OptimizerConfig(final_share=1.5), "optimizer.final_share=1.5: must be from 0 to 1"),
    (lambda: OptimizerConfig(final_share=math.nan), "optimizer.final_share=nan: must be from 0 to 1"),
    (lambda: OptimizerConfig(expert_lr_scale=-1.0), "optimizer.expert_lr_scale=-1.0: must be 0 or more and finite"),
    (lambda: OptimizerConfig(router_lr_scale=math.inf), "optimizer.router_lr_scale=inf: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=-0.1), "weight_decay"),
    (lambda: OptimizerConfig(clip_norm=-1.0), "clip_norm"),
    (lambda: OptimizerConfig(betas=(1.0, 0.9)), r"optimizer.betas=\(1.0, 0.9\): both must be at least 0 and below 1"),
    (lambda: OptimizerConfig(betas=(0.9, -0.1)), r"optimizer.betas=\(0.9, -0.1\)"),
    (lambda: BalanceConfig(experts_every=0), "^balance.experts_every=0: must be at least 1"),
    (
        lambda: BalanceConfig(experts="best"),
        "^balance.experts='best' is unknown: choose one of none, balanced, smartmoe",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_values_are_refused_in_one_line(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_configurations_are_frozen_and_compare_by_value():
    assert TrainConfig() == TrainConfig()
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3


def test_tokens_per_step():
    config = TrainConfig(batch_size=3, accumulation=5, model=ModelConfig(seq_len=7))
    assert config.tokens_per_step == 3 * 5 * 7


@pytest.mark.parametrize("kind", [TrainConfig, DataConfig, OptimizerConfig, ModelConfig, MoEConfig])
def test_every_field_has_a_docstring(kind):
    trees = [ast.parse(inspect.getsource(each)).body[0] for each in kind.__mro__ if is_dataclass(each)]
    assert all(isinstance(tree, ast.ClassDef) for tree in trees)
    documented = {
        field.target.id
        for tree in trees
        for field, text in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(field.target, ast.Name)
    }
    assert documented == {field.name for field in fields(kind)}
    assert config_module.__doc__


FORMER = {
    "save must be a table of every, keep, background, got '250:keep=4'": {"save": "250:keep=4"},
    "evaluate must be a table of every, sequences, got [100, 128]": {"evaluate": [100, 128]},
    "optimizer.schedule='cosine:0.1': choose one of cosine, linear, wsd; what follows the colon has fields of its own": {
        "optimizer": {"schedule": "cosine:0.1"}
    },
    "unknown field optimizer.rates: choose one of lr, expert_lr_scale, router_lr_scale": {"optimizer": {"rates": []}},
    "balance.experts='balanced:100': choose one of none, balanced, smartmoe; what follows": {
        "balance": {"experts": "balanced:100"}
    },
    "mesh.pp must be a whole number, got [4, 2]": {"mesh": {"pp": [4, 2]}},
    "patience must be a number, got [300, 600]": {"patience": [300, 600]},
    "unknown field routing: did you mean replay_routing?": {"routing": ["record:counts"]},
    "model.ffn='moe:2': choose one of moe, dense; what follows": {"model": {"ffn": "moe:2"}},
    "model.moe.capacity='fixed:1.0:score': choose one of dropless, fixed, fitted, padded; what follows": {
        "model": {"moe": {"capacity": "fixed:1.0:score"}}
    },
    "model.moe.router='sigmoid:bias_rate=0.1' is unknown": {"model": {"moe": {"router": "sigmoid:bias_rate=0.1"}}},
    "unknown field model.moe.losses": {"model": {"moe": {"losses": []}}},
    "unknown field model.block.attention": {"model": {"block": {"attention": "plain:qk_norm"}}},
}


@pytest.mark.parametrize("message", FORMER)
def test_options_inside_a_text_are_refused(message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        override(TrainConfig(), FORMER[message], source="here")
    assert "\n" not in str(caught.value)


def test_fields_of_the_model_decide_its_layers() -> None:
    table = {"moe_every": 2, "dense_hidden": 96, "num_layers": 8, "block": {"kv_heads": 2}}
    model = override(ModelConfig(), table, source="here")
    assert (model.moe_every, model.active_hidden, model.is_sparse(7), model.is_sparse(6)) == (2, 96, True, False)
    assert (model.kv_heads, model.head_dim) == (2, 32)
    assert MeshConfig(pp=2, parts_per_stage=2).least_ranks == 2


def test_names_without_a_list_of_choices_are_all_explained():
    for kind, name, names in (
        (MoEConfig, "router", ROUTERS | ON_MESH), (BalanceConfig, "replication", REPLICATION),
        (BalanceConfig, "experts", EXPERT_PLACERS),
    ):  # fmt: skip
        source = inspect.getsource(kind)
        text = source[source.index(f"    {name}: ") :].split('"""')[1]
        assert [each for each in names if each not in re.findall(r"\w+", text)] == [], name
