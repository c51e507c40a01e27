"""The sizes that planning reads, against the models that transformers builds, for every family of
it that has experts."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install "moesaic[transformers]"')

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from moesaic.errors import InputError
from moesaic.planner.cluster import read_cluster
from moesaic.planner.hub import HubShape, read_shape
from moesaic.planner.job import DataShape, Job

SIZES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_ocr2_text": {
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 12,
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 62,
    },
    "hunyuan_v1_moe": {
        "num_experts": 64,
        "moe_topk": 8,
        "intermediate_size": 3072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128167,
        "tie_word_embeddings": True,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
}
"""Sizes of families whose defaults transformers does not build."""
QUICK = (
    "afmoe",
    "dbrx",
    "deepseek_v32",
    "hunyuan_v1_moe",
    "kimi_linear",
    "minimax_m2",
    "qwen3_5_moe_text",
)
"""Families that `make test` compares."""


def has_experts(kind: type[PreTrainedConfig]) -> bool:
    """Return whether a configuration, or a part of it that is no model of its own, has a field
    about experts."""
    names = {
        *kind.attribute_map,
        *(name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})),
    }
    parts = [
        part
        for part in kind.sub_configs.values()
        if issubclass(part, PreTrainedConfig) and not part.model_type
    ]
    return any("expert" in name for name in names) or any(map(has_experts, parts))


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a configuration on the meta device, with its output matrix if it has a
    class with one."""
    code = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    classes = [
        kind
        for _, kind in inspect.getmembers(code, inspect.isclass)
        if issubclass(kind, PreTrainedModel)
        and kind.config_class is type(config)
        and kind.__module__ == code.__name__
    ]
    endings = ("ForCausalLM", "TextModel", "Model")
    kind = next(kind for end in endings for kind in classes if kind.__name__.endswith(end))
    with torch.device("meta"):
        return kind(config)


def compared(name: str) -> str:
    """Return the refusal of a family's configuration; empty if its parameters are those of the
    model, which is asserted."""
    config = CONFIG_MAPPING[name](**SIZES.get(name, {}))
    try:
        shape = read_shape(json.loads(config.to_json_string()), name, seq_len=4096)
    except InputError as error:
        return str(error)
    parameters = dict(built(config).named_parameters())
    true = sum(each.numel() for each in parameters.values())
    experts = sum(
        each.numel()
        for key, each in parameters.items()
        if re.search(r"(?<!shared)[._]experts[.]", key)
    )
    assert experts > true / 4
    total, active = planned(shape)
    if not any("lm_head" in key for key in parameters) and not shape.tied:
        total = total - shape.vocab * shape.dim
        active = active - shape.vocab * shape.dim
    assert total == pytest.approx(true, rel=1e-3), name
    used = true - experts * (1 - shape.moe.top_k / shape.moe.num_experts)
    assert active == pytest.approx(used, rel=3e-3), name
    return ""


def planned(shape: HubShape) -> tuple[float, float]:
    return Job(model=shape, data=DataShape(vocab_size=shape.vocab)).parameters(
        read_cluster("dgx-h100")
    )


@pytest.mark.parametrize("name", QUICK)
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    assert bool(compared(name)) == (name == "kimi_linear")


def families() -> Iterator[str]:
    return (name for name in sorted(CONFIG_MAPPING.keys()) if has_experts(CONFIG_MAPPING[name]))


@pytest.mark.random
def test_every_family_of_transformers_is_planned_with_its_parameters_or_refused() -> None:
    found = {name: compared(name) for name in families()}
    refused = {name: line for name, line in found.items() if line}
    assert len(found) > 60
    assert len(refused) < len(found) / 2, refused
    assert not any("\n" in line for line in refused.values())
    # A configuration that planning reads in part is named with what it does not read, not with what
    # it lacks.
    assert not [
        line for line in refused.values() if "so the model is of an unknown architecture" in line
    ]
