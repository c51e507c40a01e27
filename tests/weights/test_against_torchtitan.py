"""Comparison with torchtitan: its own adapters convert our torchtitan checkpoints into the hub's
tensors, bit by bit.

Skipped unless torchtitan can be imported: `pip install --no-deps "torchtitan>=0.3" spmd_types`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("spmd_types", reason="torchtitan needs it")
pytest.importorskip("torchtitan", reason="pip install --no-deps torchtitan")

from checkpoints import assert_bitwise, build, tensors_of

import moesaic

ADAPTERS = {
    "Qwen3Moe": ("qwen3", "Qwen3StateDictAdapter"),
    "DeepseekV3": ("deepseek_v3", "DeepSeekV3StateDictAdapter"),
}
"""Families for which torchtitan has models. Its adapter of gpt-oss (0.3.0) expects other names than
its model has."""


@pytest.mark.parametrize("family", ADAPTERS)
def test_torchtitans_adapter_gives_back_the_hubs_tensors(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "hub")
    moesaic.convert(tmp_path / "hub", tmp_path / "titan", to="torchtitan")
    package, name = ADAPTERS[family]
    config = model.config
    experts = SimpleNamespace(
        num_experts=getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", 0)
    )
    layer = SimpleNamespace(
        moe=experts, attention=SimpleNamespace(q_lora_rank=getattr(config, "q_lora_rank", None))
    )
    described = SimpleNamespace(
        layers=[layer] * config.num_hidden_layers, enable_weight_tying=False
    )
    adapter = getattr(import_module(f"torchtitan.models.{package}.state_dict_adapter"), name)(
        described, None
    )
    assert_bitwise(adapter.to_hf(tensors_of(tmp_path / "titan")), tensors_of(tmp_path / "hub"))
