"""Configurations refuse invalid values, with a message that names the field and a valid value."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from moesaic.balance import EXPERT_PLACERS, REPLICATION_POLICIES
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.train import config as config_module
from moesaic.train.config import (
    DECAYS,
    BalanceConfig,
    DataConfig,
    OptimizerConfig,
    Saves,
    TrainConfig,
)

BAD = [
    (lambda: TrainConfig(steps=0), "steps=0: must be at least 1"),
    (lambda: TrainConfig(batch_size=-1), "batch_size=-1: must be at least 1"),
    (lambda: TrainConfig(accumulation=0), "accumulation=0: must be at least 1"),
    (lambda: TrainConfig(log_every=0), "log_every=0: must be at least 1"),
    (lambda: TrainConfig(evaluate=(0, 4)), r"^evaluate=\(0, 4\): both numbers must be at least 1"),
    (lambda: TrainConfig(evaluate=(4, 0)), r"^evaluate=\(4, 0\): both"),
    *(
        (lambda bad=bad: TrainConfig(save=bad), f"^save='{bad}': write the steps between checkpoints, at least 1")
        for bad in ("", "0", "-1", "x", "2:keep=0", "2:keep", "2:background:keep=3", "2:later")
    ),
    (lambda: TrainConfig(patience=(300.0, 0.5)), r"^patience=\(300.0, 0.5\): choose both from 1 to 1500 seconds"),
    (lambda: TrainConfig(patience=(math.nan, 600.0)), r"^patience=\(nan, 600.0\): choose both from 1 to 1500 seconds"),
    (lambda: TrainConfig(trackers=("wandb",)), "trackers: 'wandb' is unknown: write tensorboard, or wandb:PROJECT"),
    (lambda: TrainConfig(trackers=("mlflow:x",)), "trackers: 'mlflow:x' is unknown"),
    (lambda: TrainConfig(device="cpu:0"), "device=cpu:0: write a number of CPU threads"),
    (lambda: TrainConfig(seed=-1), "seed=-1: choose 0 or more"),
    (lambda: ModelConfig(num_layers=10**18), "model.num_layers=1000000000000000000: must be at most 10000"),
    (lambda: ModelConfig(dim=2**31), "model.dim=2147483648: must be at most 2147483647"),
    (lambda: TrainConfig(seed=2**63), "choose 0 or more, below 2\\*\\*63"),
    *(
        (
            lambda bad=bad: DataConfig(val=bad),
            f"^data.val={' '.join(bad)}: name files, or write a share between 0 and 1 alone",
        )
        for bad in ((), ("share:0",), ("share:1.0",), ("share:nan",), ("share:x",), ("share:0.1", "a.txt"))
    ),
    (lambda: DataConfig(vocab_size=0), "data.vocab_size=0: must be at least 1"),
    (lambda: OptimizerConfig(lr=0.0), "optimizer.lr=0.0: must be above 0"),
    (lambda: OptimizerConfig(lr=math.inf), "optimizer.lr=inf: must be above 0 and finite"),
    (lambda: OptimizerConfig(lr=math.nan), "optimizer.lr=nan: must be above 0 and finite"),
    (lambda: OptimizerConfig(clip_norm=math.nan), "optimizer.clip_norm=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.nan), "optimizer.weight_decay=nan: must be 0 or more and finite"),
    (lambda: OptimizerConfig(weight_decay=math.inf), "optimizer.weight_decay=inf: must be 0 or more and finite"),
    (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr=nan"),
    (
        lambda: OptimizerConfig(schedule="cosine:0.1:warmup=-1"),
        "optimizer.schedule='cosine:0.1:warmup=-1': write one of",
    ),
    (lambda: TrainConfig(routing=("record:all",)), "routing=record:all: write record:counts or record:tokens once"),
    (lambda: TrainConfig(routing=("replay:a", "replay:b")), "routing=replay:a replay:b: write"),
    (lambda: TrainConfig(routing=("a",)), "routing=a: write"),
    (lambda: OptimizerConfig(weight_decay=-0.1), "weight_decay"),
    (lambda: OptimizerConfig(clip_norm=-1.0), "clip_norm"),
    (lambda: OptimizerConfig(betas=(1.0, 0.9)), r"optimizer.betas=\(1.0, 0.9\): both must be at least 0 and below 1"),
    (lambda: OptimizerConfig(betas=(0.9, -0.1)), r"optimizer.betas=\(0.9, -0.1\)"),
    *(
        (
            lambda bad=bad: OptimizerConfig(schedule=bad),
            f"^optimizer.schedule='{bad}': write one of cosine, linear, wsd",
        )
        for bad in ("cosine:1.5", "cosine:", "linear:x", "step", "")
    ),
    *(
        (
            lambda bad=bad: OptimizerConfig(rates=bad),
            f"^optimizer.rates={' '.join(bad)}: write experts and routers once",
        )
        for bad in (("experts",), ("experts:-1",), ("routers:inf",), ("norms:1",), ("routers:1", "routers:2"))
    ),
    *(
        (lambda bad=bad: BalanceConfig(**bad), message)
        for bad, message in (
            ({"replication": "spill:counts"}, "^balance.replication='spill:counts': only arbiter takes a suffix"),
            ({"experts": "none:50"}, "^balance.experts='none:50': write the steps between decisions"),
            ({"experts": "balanced:"}, "^balance.experts='balanced:': write the steps between decisions"),
            ({"experts": "best"}, "^balance.experts='best' is unknown: choose one of none, balanced, smartmoe"),
        )
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


def test_words_of_fields_say_what_they_stand_for():
    table = {
        "patience": [30.0, 60.0], "evaluate": [7, 3], "save": "5:keep=4:background", "device": "cpu:2",
        "numbers": [5, "rollback"], "data": {"val": "share:0.07"}, "mesh": {"pp": [2, 2]},
        "optimizer": {"schedule": "wsd:0.3:warmup=7", "rates": ["experts:0.5"]}, "accumulation": 2,
        "model": {
            "ffn": "moe:2:96", "num_layers": 8,
            "block": {"positions": "rotary:500.0:2.0", "attention": "plain:kv_heads=2:qk_norm"},
            "moe": {"router": "group_limited:num_groups=4:normalize=False:scale=2.5"},
        },
    }  # fmt: skip
    found = override(TrainConfig(), table, source="here")
    recorded = override(TrainConfig(), {"routing": "record:tokens"}, source="here")
    assert found.saving() == Saves(every=5, keep=4, in_background=True)
    assert (found.data.val_share, found.data.val_path) == (0.07, ())
    assert override(DataConfig(), {"val": "a.txt"}, source="here").val_path == ("a.txt",)
    optimizer, model = found.optimizer, found.model
    assert (optimizer.decay, optimizer.final_share, optimizer.warmup_steps) == ("wsd", 0.3, 7)
    assert (optimizer.rate_of("experts"), optimizer.rate_of("routers")) == (0.5, 1.0)
    assert (model.moe_every, model.active_hidden, model.is_sparse(7), model.is_sparse(6)) == (2, 96, True, False)
    assert (model.block.rope, model.kv_heads, model.head_dim) == ((500.0, 2.0), 2, 32)
    assert (found.threads, found.rolls_back) == (2, True)
    assert (found.record_routing, recorded.record_routing, recorded.replay_routing) == ("none", "tokens", None)
    assert model.moe.router_name == "group_limited"
    assert model.moe.router_options == {"num_groups": 4, "normalize": False, "scale": 2.5}
    assert (found.mesh.stages, found.mesh.parts_per_stage, found.mesh.least_ranks) == (2, 2, 2)
    balance = BalanceConfig(replication="arbiter:counts", experts="smartmoe:9")
    assert (balance.policy, balance.learns, balance.expert_policy, balance.experts_every) == (
        "arbiter",
        False,
        "smartmoe",
        9,
    )


def test_what_is_written_in_words_is_explained_with_all_its_names():
    """No list of choices stands in the help of a field whose words take options."""
    for kind, name, names in (
        (MoEConfig, "router", ROUTERS | ON_MESH), (BalanceConfig, "replication", REPLICATION_POLICIES),
        (BalanceConfig, "experts", EXPERT_PLACERS), (OptimizerConfig, "schedule", DECAYS),
    ):  # fmt: skip
        source = inspect.getsource(kind)
        text = source[source.index(f"    {name}: str") :].split('"""')[1]
        assert [each for each in names if each not in re.findall(r"\w+", text)] == [], name
