"""Configuration files: reading, error messages, and writing them back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest

from helpers import refused
from moesaic.configfile import as_json, differing_fields, override, read_table
from moesaic.errors import InputError, suggestion
from moesaic.models.config import ModelConfig
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_round_trips_through_json(preset):
    config = PRESETS[preset]()
    assert override(TrainConfig(), json.loads(as_json(config)), source="here") == config


def test_toml_and_json_are_read_by_suffix(tmp_path):
    (tmp_path / "a.toml").write_text('steps = 3\n[model.moe]\nrouter = "sigmoid"\n')
    (tmp_path / "a.json").write_text('{"steps": 3, "model": {"moe": {"router": "sigmoid"}}}')
    table = read_table(tmp_path / "a.toml")
    assert (
        table
        == read_table(tmp_path / "a.json")
        == {"steps": 3, "model": {"moe": {"router": "sigmoid"}}}
    )
    config = override(TrainConfig(batch_size=5), table, source="a.toml")
    assert (config.steps, config.batch_size, config.model.moe.router) == (3, 5, "sigmoid")
    assert config == replace(
        TrainConfig(), steps=3, batch_size=5, model=replace(ModelConfig(), moe=config.model.moe)
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "steps: 3", "unknown kind of file, use .toml or .json"),
        ("a.toml", None, "no such file"),
        ("a.toml", "steps = = 3", r"does not parse \(.*line 1"),
        ("a.json", "{", r"does not parse \(.*line 1"),
        ("a.json", "[" * 100_000, r"does not parse \(maximum recursion depth"),
        ("a.toml", "a = " + "[" * 100_000, "does not parse"),
        ("a.json", "[1]", "must hold a table of fields, holds a list"),
        ("a.json", b"\xff\xfe", "cannot be read"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    caught = refused(read_table, tmp_path / name)
    assert re.search(message, caught)
    assert f"config {tmp_path / name}" in caught


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stepz": 3}, "here: unknown field stepz: did you mean steps?"),
        (
            {"model": {"moe": {"topk": 3}}},
            "here: unknown field model.moe.topk: did you mean top_k?",
        ),
        ({"xyz": 3}, "here: unknown field xyz: choose one of out, existing, "),
        ({"steps": "3"}, "here: steps must be a whole number, got '3'"),
        ({"steps": 3.0}, "here: steps must be a whole number, got 3.0"),
        ({"steps": True}, "here: steps must be a whole number, got True"),
        ({"steps": None}, "here: steps must be a whole number, got None"),
        ({"plan": {"fuse": 1}}, "here: plan.fuse must be true or false, got 1"),
        ({"out": 3}, "here: out must be text, got 3"),
        ({"optimizer": {"lr": "high"}}, "here: optimizer.lr must be a number, got 'high'"),
        ({"optimizer": {"lr": 10**400}}, "here: optimizer.lr is a number above 1.797"),
        ({"optimizer": {"lr": -(10**400)}}, "here: optimizer.lr is a number below -1.797"),
        ({"optimizer": {"lr": True}}, "here: optimizer.lr must be a number, got True"),
        ({"optimizer": 3}, "here: optimizer must be a table of lr, "),
        ({"data": {"path": ["a", 3]}}, "here: data.path[1] must be text, got 3"),
        (
            {"precision": "float16"},
            "here: precision='float16': choose one of auto, float32, bfloat16",
        ),
        (
            {"model": {"moe": {"router": "best"}}},
            "model.moe.router='best' is unknown: choose one of softmax, switch",
        ),
        ({"optimizer": {"betas": [0.9]}}, "here: optimizer.betas must be a list of 2, got [0.9]"),
        ({"optimizer": {"betas": ["a", 0.9]}}, "here: optimizer.betas must be a number, got 'a'"),
        (
            {"mesh": {"ranks_per_node": "two"}},
            "here: mesh.ranks_per_node must be a whole number, got 'two'",
        ),
    ],
)
def test_bad_tables_are_refused(table, message):
    assert message in refused(lambda: override(TrainConfig(), table, source="here"))


def test_values_become_the_fields_types():
    table = {"mesh": {"ranks_per_node": None}, "optimizer": {"lr": 1}, "data": {"path": ["a", "b"]}}
    config = override(TrainConfig(mesh=MeshConfig(ranks_per_node=3)), table, source="here")
    assert config.mesh.ranks_per_node is None
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.data.path == ("a", "b")
    assert (
        override(TrainConfig(), {"mesh": {"ranks_per_node": 2}}, source="here").mesh.ranks_per_node
        == 2
    )
    assert override(TrainConfig(), {"data": {"path": "a"}}, source="here").data.path == ("a",), (
        "a list of one"
    )


def test_the_dataclass_checks_itself_after_an_override():
    with pytest.raises(
        InputError, match=r"model.moe.top_k=20 does not fit model.moe.num_experts=16"
    ):
        override(TrainConfig(), {"model": {"moe": {"top_k": 20}}}, source="here")


def test_suggestions():
    assert suggestion("rooter", ["router", "experts"]) == ": did you mean router?"
    assert suggestion("zzz", ["router", "experts"]) == ": choose one of router, experts"
    assert suggestion("zzz", ["router"] * 99) == f": choose one of {'router, ' * 37}..."


def test_differing_fields_are_named_with_both_values():
    @dataclass(frozen=True)
    class Inner:
        a: int = 1

    @dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()
        b: str = "x"

    assert differing_fields(Outer(), Outer()) == []
    assert differing_fields(Outer(), Outer(Inner(2), "y"), "p.") == [
        "p.inner.a (1 and 2)",
        "p.b ('x' and 'y')",
    ]
