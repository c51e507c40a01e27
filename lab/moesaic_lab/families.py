"""Tiny random models of every model family in transformers whose experts support its interface for
expert implementations.

A family is one modeling file of transformers. Its configuration classes name the same size in
different ways, so a tiny model sets those fields of `SIZES` that its class has.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "router_aux_loss_coef": 0.0,
    "output_router_logits": False,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_intermediate_size": 24,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "moe_latent_size": None,
    "moe_shared_intermediate_size": 24,
    "top_k_experts": 2,
    "expert_intermediate_size": 24,
    "moe_top_k": 2,
    "enable_moe_block": True,
    "chunk_size": 8,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
"""Tiny values for the fields of a configuration, each used if the configuration has the field."""
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts": 16},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "glm4v_moe_text": {"head_dim": 128},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0},
    "hy_v4_vl_text": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "mistral4": {"head_dim": 16, "qk_rope_head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional fields that single kinds of configuration need, by `model_type`."""


@dataclass(frozen=True)
class Family:
    """A model family: a modeling file with classes decorated by `use_experts_implementation`."""

    name: str
    experts: tuple[str, ...]
    """Names of the decorated classes."""

    @property
    def module(self) -> Any:
        """The modeling file, imported."""
        return importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")


def families() -> list[Family]:
    """Return all families in the order of their names, without importing any."""
    listed = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        classes = re.findall(
            r"^@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)", text, re.MULTILINE
        )
        if classes:
            listed.append(Family(path.stem.removeprefix("modeling_"), tuple(classes)))
    return listed


def shrunk(kind: type) -> Any:
    """Return a configuration with tiny sizes, nested ones included; fields derived from sizes are
    derived again.

    Args:
        kind: a configuration class of transformers.
    """
    default = kind()
    table = default.to_dict()
    nested = getattr(kind, "sub_configs", {})
    fields: dict[str, Any] = {
        key: value for key, value in SIZES.items() if key in table and key not in nested
    }
    if "kv_lora_rank" in table:  # latent attention has no grouped heads
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for key in nested:
        inner = getattr(default, key, None)
        if inner is not None:
            fields[key] = shrunk(type(inner))
    fields |= OWN.get(getattr(kind, "model_type", ""), {})

    # Lists with an entry per layer become as short as the tiny model, which has four layers. Some
    # classes derive them from the sizes, others demand them, and others keep the long default.
    layers = table.get("num_hidden_layers")
    per_layer = {
        key: value[:4]
        for key, value in table.items()
        if isinstance(value, list) and len(value) == layers and key not in nested
    }
    try:
        config = kind(**fields)
    except Exception:
        config = kind(**{**per_layer, **fields})
    for key, value in per_layer.items():
        if len(getattr(config, key) or ()) == layers:
            setattr(config, key, value)
    return config


def models_of(family: Family) -> list[Any]:
    """Return the classes of a family that may be language models, the likeliest first."""
    classes: dict[str, Any] = dict(inspect.getmembers(family.module, inspect.isclass))
    models = []
    for cls in classes.values():
        is_own = cls.__module__ == family.module.__name__
        has_config = getattr(cls, "config_class", None) is not None
        if is_own and has_config and not cls.__name__.endswith("PreTrainedModel"):
            models.append(cls)

    # The shortest name with an ending comes first. A class may be listed twice.
    listed: list[Any] = []
    for ending in ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration"):
        matching = [cls for cls in models if cls.__name__.endswith(ending)]
        listed += sorted(matching, key=lambda cls: (len(cls.__name__), cls.__name__))
    return listed


def build(family: Family) -> Any:
    """Return a tiny random model of a family, checked to run its experts on text.

    Raises:
        LookupError: if no class of the family works; the message has the reasons.
    """
    reasons = []
    for cls in models_of(family):
        for dtype in (torch.float64, torch.float32):  # some families compute only in float32
            try:
                torch.manual_seed(0)
                model = cls(shrunk(cls.config_class)).to(dtype).train()
                model.set_experts_implementation("eager")
                ran = _experts_that_ran(model, family)
            except Exception as error:
                message = " ".join(str(error).split())[:200]
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {message}")
                continue
            if ran:
                return model
            reasons.append(f"{cls.__name__}: no experts ran")
    raise LookupError("; ".join(dict.fromkeys(reasons)))  # each reason once


def text(model: Any) -> Tensor:
    """Return random token ids of shape (2, 7)."""
    return torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))


def _experts_that_ran(model: Any, family: Family) -> bool:
    """Return whether the family's experts ran in a forward pass."""
    seen: list[str] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        for module in model.modules()
        if type(module).__name__ in family.experts
    ]
    model(input_ids=text(model), use_cache=False)
    for hook in hooks:
        hook.remove()
    return bool(seen)
