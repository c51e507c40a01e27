"""Configurations refuse what cannot work, naming the field and what would be right."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.train import config as config_module
from moesaic.train.config import DataConfig, OptimizerConfig, TrainConfig

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
    (lambda: TrainConfig(threads=0), "threads=0: must be at least 1"),
    (lambda: TrainConfig(seed=-1), "seed=-1: choose 0 or more"),
    (lambda: ModelConfig(num_layers=10**18), "model.num_layers=1000000000000000000: must be at most 10000"),
    (lambda: ModelConfig(dim=2**31), "model.dim=2147483648: must be at most 2147483647"),
    (lambda: TrainConfig(seed=2**63), "choose 0 or more, below 2\\*\\*63"),
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
