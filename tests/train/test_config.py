"""Configurations refuse what cannot work, naming the field and what would be right."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass
from functools import reduce

import pytest

from moesaic.balance.policies import EXPERT_PLACERS, REPLICATION_POLICIES
from moesaic.configfile import as_json, override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.train import config as config_module
from moesaic.train.config import (
    RENAMED,
    WAYS_DOWN,
    BalanceConfig,
    DataConfig,
    OptimizerConfig,
    Saves,
    TrainConfig,
    of_today,
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
    (
        lambda: of_today({"data": {"bin_dtype": "uint8"}}, "here"),
        "^here: data.bin_dtype is now the dtype in the .json file",
    ),
    (
        lambda: of_today({"model": {"moe": {"admit_by": "score"}}}, "here"),
        "^here: model.moe.admit_by is now model.moe.capacity",
    ),
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
            ({"replication": "spill:counts"}, "^balance.replication='spill:counts': only arbiter:counts takes a word"),
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
        router="sigmoid:bias_rate=0.1",
    )  # fmt: skip
    assert {name: table[name] for name in kept} == kept, "the table of the caller stays as it was"
    assert of_today({"device": "cuda", "threads": 2}, "here") == {"device": "cuda"}  # cuda:2 names a GPU
    assert of_today(json.loads(as_json(TrainConfig())), "here") == json.loads(as_json(TrainConfig()))


def test_what_was_renamed_is_a_field_no_more():
    for path in RENAMED:
        *outer, name = path.split(".")
        inside = reduce(getattr, outer, TrainConfig())
        assert not is_dataclass(inside) or name not in {each.name for each in fields(inside)}, path


def test_choices_that_had_fields_beside_them_are_read_with_these():
    """As runs wrote them: every field, what has no effect included."""
    table = {
        "patience": 60.0, "start_patience": 30.0, "eval_every": 7, "eval_sequences": 3, "save_every": 5, "keep_last": 4,
        "save_in_background": True, "data": {"val_path": [], "val_share": 0.07},
        "optimizer": {"schedule": "wsd", "final_share": 0.3, "warmup_steps": 7, "expert_rate": 0.5, "router_rate": 1.0},
        "balance": {"replication": "arbiter", "learn": False, "experts": "smartmoe", "experts_every": 9},
        "mesh": {"ep": 2}, "device": "cpu", "threads": 2,
        "record_routing": "tokens", "replay_routing": None, "numbers": {"most_skipped": 5, "spikes": "rollback"},
        "model": {
            "ffn": "moe", "dense_hidden": 96, "num_layers": 8,
            "block": {"positions": "rotary", "rope": [500.0, 2.0], "kv_heads": 2, "head_dim": None, "qk_norm": True},
            "moe": {
                "every": 2, "router": "group_limited", "router_options": {"num_groups": 4, "normalize": False, "scale": 2.5},
            },
        },
    }  # fmt: skip
    found = override(TrainConfig(), of_today(table, "here"), source="here")
    assert (found.patience, found.evaluate, found.save) == ((30.0, 60.0), (7, 3), "5:keep=4:background")
    assert found.saving() == Saves(every=5, keep=4, in_background=True)
    assert (found.data.val, found.data.val_share, found.data.val_path) == (("share:0.07",), 0.07, ())
    optimizer, balance, model = found.optimizer, found.balance, found.model
    assert (optimizer.schedule, optimizer.way_down) == ("wsd:0.3:warmup=7", "wsd")
    assert (optimizer.final_share, optimizer.warmup_steps) == (0.3, 7)
    assert (optimizer.rates, optimizer.rate_of("experts"), optimizer.rate_of("routers")) == (("experts:0.5",), 0.5, 1.0)
    assert (balance.replication, balance.policy, balance.learns) == ("arbiter:counts", "arbiter", False)
    assert (balance.experts, balance.expert_policy, balance.experts_every) == ("smartmoe:9", "smartmoe", 9)
    assert (model.ffn, model.block.positions, model.block.rope) == ("moe:2:96", "rotary:500.0:2.0", (500.0, 2.0))
    assert (model.moe_every, model.active_hidden, model.is_sparse(7), model.is_sparse(6)) == (2, 96, True, False)
    assert (model.block.attention, model.kv_heads, model.head_dim) == ("plain:kv_heads=2:qk_norm", 2, 32)
    assert (found.device, found.threads, found.numbers, found.goes_back) == ("cpu:2", 2, (5, "rollback"), True)
    assert (found.routing, found.record_routing, found.replay_routing) == (("record:tokens",), "tokens", None)
    assert model.moe.router_name == "group_limited"
    assert model.moe.router_options == {"num_groups": 4, "normalize": False, "scale": 2.5}

    plain = {
        "device": "auto", "threads": None,  "record_routing": "none", "replay_routing": None, "accumulation": 2,
        "mesh": {"pp": 2, "vpp": 2},
        "optimizer": {"schedule": "cosine:0.1", "warmup_steps": 40},
        "data": {"val_path": ["a.txt"], "val_share": 0.05}, "balance": {"replication": "none", "learn": False},
        "model": {
            "ffn": "dense", "dense_hidden": 64, "block": {"positions": "learned", "rope": [10000.0, 1.0]}, "moe": {"every": 3},
        },
    }  # fmt: skip
    found = override(TrainConfig(), of_today(plain, "here"), source="here")
    assert (found.data.val_path, found.balance.replication) == (("a.txt",), "none")
    assert (found.model.ffn, found.model.active_hidden, found.model.block.rope) == ("dense:64", 64, None)
    assert (found.device, found.routing, found.mesh.pp) == ("auto", (), (2, 2))
    assert (found.mesh.stages, found.mesh.parts_per_stage, found.mesh.least_ranks) == (2, 2, 2)
    assert found.optimizer.schedule == "cosine:0.1"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"start_patience": 30.0}, "start_patience is now the first number of patience, as --patience 300 600"),
        ({"eval_every": 7}, "eval_every is now evaluate, with eval_sequences"),
        ({"keep_last": 7}, "keep_last is now save, as --save 250:keep=2"),
        ({"optimizer": {"final_share": 0.2}}, "optimizer.final_share is now optimizer.schedule, as cosine:0.1"),
        ({"balance": {"learn": False}}, "balance.learn is now balance.replication, as arbiter:counts"),
        ({"balance": {"experts_every": 7}}, "balance.experts_every is now balance.experts, as balanced:50"),
        ({"model": {"block": {"rope": [1.0, 1.0]}}}, "model.block.rope is now model.block.positions"),
        ({"model": {"dense_hidden": 64}}, "model.dense_hidden is now model.ffn, as moe:2:512 or dense:512"),
        ({"optimizer": {"warmup_steps": 7}}, "optimizer.warmup_steps is now optimizer.schedule, as cosine:0.1:warmup=500"),
        ({"mesh": {"vpp": 2}}, "mesh.vpp is now the second number of mesh.pp, as --mesh.pp 4 2"),
        ({"threads": 2}, "threads is now device, as cpu:2"),
        ({"numbers": {"spikes": "rollback"}}, "numbers.spikes is now the second of numbers, as --numbers 3 rollback"),
        ({"model": {"moe": {"every": 2}}}, "model.moe.every is now model.ffn, as moe:2"),
        ({"model": {"moe": {"router_options": {"scale": 2.0}}}}, "model.moe.router_options is now model.moe.router, as sig"),
    ],
)  # fmt: skip
def test_a_part_of_an_earlier_choice_is_refused(table, message):
    with pytest.raises(InputError, match=f"^here: {message}"):
        of_today(table, "here")


def test_what_is_written_in_words_is_explained_with_all_its_names():
    """No list of choices stands in the help of a field whose words take options."""
    for kind, name, names in (
        (MoEConfig, "router", ROUTERS | ON_MESH), (BalanceConfig, "replication", REPLICATION_POLICIES),
        (BalanceConfig, "experts", EXPERT_PLACERS), (OptimizerConfig, "schedule", WAYS_DOWN),
    ):  # fmt: skip
        source = inspect.getsource(kind)
        text = source[source.index(f"    {name}: str") :].split('"""')[1]
        assert [each for each in names if each not in re.findall(r"\w+", text)] == [], name
