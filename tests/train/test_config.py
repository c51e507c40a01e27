"""Configurations refuse what cannot work, naming the field and what would be right."""

from __future__ import annotations

import ast
import inspect
import json
import math
from dataclasses import FrozenInstanceError, fields, is_dataclass
from functools import reduce

import pytest

from moesaic.configfile import as_json, override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.train import config as config_module
from moesaic.train.config import RENAMED, DataConfig, OptimizerConfig, TrainConfig, of_today

BAD = [
    (lambda: TrainConfig(steps=0), "steps=0: must be at least 1"),
    (lambda: TrainConfig(batch_size=-1), "batch_size=-1: must be at least 1"),
    (lambda: TrainConfig(accumulation=0), "accumulation=0: must be at least 1"),
    (lambda: TrainConfig(log_every=0), "log_every=0: must be at least 1"),
    (lambda: TrainConfig(eval_every=0), "eval_every=0: must be at least 1"),
    (lambda: TrainConfig(eval_sequences=0), "eval_sequences=0: must be at least 1"),
    (lambda: TrainConfig(save_every=0), "save_every=0: must be at least 1"),
    (lambda: TrainConfig(keep_last=0), "keep_last=0: must be at least 1"),
    (lambda: TrainConfig(patience=0.5), "^patience=0.5: choose from 1 to 1500 seconds"),
    (lambda: TrainConfig(start_patience=math.nan), "start_patience=nan: choose from 1 to 1500 seconds"),
    (lambda: TrainConfig(trackers=("wandb",)), "trackers: 'wandb' is unknown: write tensorboard, or wandb:PROJECT"),
    (lambda: TrainConfig(trackers=("mlflow:x",)), "trackers: 'mlflow:x' is unknown"),
    (lambda: TrainConfig(threads=0), "threads=0: must be at least 1"),
    (lambda: TrainConfig(seed=-1), "seed=-1: choose 0 or more"),
    (lambda: ModelConfig(num_layers=10**18), "model.num_layers=1000000000000000000: must be at most 10000"),
    (lambda: ModelConfig(dim=2**31), "model.dim=2147483648: must be at most 2147483647"),
    (lambda: TrainConfig(seed=2**63), "choose 0 or more, below 2\\*\\*63"),
    (
        lambda: of_today({"data": {"bin_dtype": "uint8"}}, "here"),
        "^here: data.bin_dtype is now the dtype in the .json file",
    ),
    (
        lambda: of_today({"model": {"moe": {"admit_by": "score"}}}, "here"),
        "^here: model.moe.admit_by is now model.moe.capacity",
    ),
    (lambda: DataConfig(val_share=0.0), "data.val_share=0.0: choose a share between 0 and 1"),
    (lambda: DataConfig(val_share=1.0), "data.val_share=1.0"),
    (lambda: DataConfig(val_share=float("nan")), "data.val_share=nan"),
    (lambda: DataConfig(vocab_size=0), "data.vocab_size=0: must be at least 1"),
    (lambda: OptimizerConfig(lr=0.0), "optimizer.lr=0.0: must be above 0"),
    (lambda: OptimizerConfig(lr=math.inf), "optimizer.lr=inf: must be above 0 and finite"),
    (lambda: OptimizerConfig(lr=math.nan), "optimizer.lr=nan: must be above 0 and finite"),
    (lambda: OptimizerConfig(clip_norm=math.nan), "optimizer.clip_norm=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.nan), "optimizer.weight_decay=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.inf), "optimizer.weight_decay=inf: must be 0 or more and finite"),
    (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr=nan"),
    (lambda: OptimizerConfig(warmup_steps=-1), "warmup_steps"),
    (lambda: OptimizerConfig(weight_decay=-0.1), "weight_decay"),
    (lambda: OptimizerConfig(clip_norm=-1.0), "clip_norm"),
    (lambda: OptimizerConfig(betas=(1.0, 0.9)), r"optimizer.betas=\(1.0, 0.9\): both must be at least 0 and below 1"),
    (lambda: OptimizerConfig(betas=(0.9, -0.1)), r"optimizer.betas=\(0.9, -0.1\)"),
    (lambda: OptimizerConfig(final_share=1.5), "optimizer.final_share=1.5: choose a share from 0 to 1"),
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


def test_files_of_earlier_versions_say_the_same_under_todays_names():
    moe = {
        "capacity": "fitted", "capacity_factor": 2.0, "capacity_scope": "rank", "admit_by": "score", "balance_loss": 0.02,
        "balance_level": "sequence", "importance_loss": 0.0, "z_loss": 0.001, "router": "sigmoid", "bias_rate": 0.1,
    }  # fmt: skip
    table = {
        "tensorboard": False, "wandb": "mine", "model": {"dim": 32, "moe": moe},
        "data": {"bin_dtype": "uint16"}, "planner": {"plan": "auto", "cluster": "", "profile": "p.json"},
    }  # fmt: skip
    kept = {name: dict(value) for name, value in table.items() if isinstance(value, dict)}
    found = override(TrainConfig(), of_today(table, "here"), source="here")
    assert found.trackers == ("wandb:mine",)
    assert (found.model.dim, found.planner.cluster) == (32, "p.json")
    assert found.model.moe == MoEConfig(
        capacity="fitted:2.0:rank:score", losses=("load_balance_sequence:0.02", "importance:0.0", "z_loss:0.001"),
        router="sigmoid", router_options={"bias_rate": 0.1},
    )  # fmt: skip
    assert {name: table[name] for name in kept} == kept, "the table of the caller stays as it was"
    assert of_today(json.loads(as_json(TrainConfig())), "here") == json.loads(as_json(TrainConfig()))


def test_what_was_renamed_is_a_field_no_more():
    for path in RENAMED:
        *outer, name = path.split(".")
        assert not hasattr(reduce(getattr, outer, TrainConfig()), name), path
