"""Megatron-Core's checkpoints in its format torch_dist: its names, in files of torch.distributed.checkpoint.

Where all layers are alike, Megatron keeps each kind of tensor for all of them in one, the layer first; otherwise each layer's
names have its number. Gate and up projection are one tensor, one above the other; queries, keys and values are one, by groups.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from moesaic.weights.files import Stored, read_dcp, write_dcp
from moesaic.weights.format import AbstractFormat, Rules, by_rules, grouped, half
from moesaic.weights.layout import Block, Readable
from moesaic.weights.model import LAYER, Architecture

OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
ATTENTION: Rules = {
    **{
        f"self_attn.{name}_proj.{kind}": (f"self_attention.linear_qkv.{kind}", grouped(name))
        for name in "qkv"
        for kind in ("weight", "bias")
    },
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
}
LATENT_ATTENTION: Rules = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
}
DENSE: Rules = {
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", half(0)),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight", half(1)),
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
SPARSE: Rules = {
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "block_sparse_moe.router.weight": "mlp.router.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    **{
        f"mlp.{shared}.{name}_proj.weight": ("mlp.shared_experts.linear_fc1.weight", half(number))
        for shared in ("shared_expert", "shared_experts")
        for number, name in enumerate(("gate", "up"))
    },
    **{
        f"mlp.{shared}.down_proj.weight": "mlp.shared_experts.linear_fc2.weight"
        for shared in ("shared_expert", "shared_experts")
    },
    **{
        f"{moe}.experts.{name}{ending}": (f"mlp.experts.experts.linear_fc1.{kind}", half(number))
        for moe in ("mlp", "block_sparse_moe")
        for ending, kind in (("", "weight"), ("_bias", "bias"))
        for number, name in enumerate(("gate", "up"))
    },
    **{
        f"{moe}.experts.down{ending}": f"mlp.experts.experts.linear_fc2.{kind}"
        for moe in ("mlp", "block_sparse_moe")
        for ending, kind in (("", "weight"), ("_bias", "bias"))
    },
}


class Megatron(AbstractFormat):
    """The newest iteration's folder below the checkpoint's, or that folder itself."""

    title = "Megatron-Core"
    folder = "release"
    """Where a checkpoint is that no iteration wrote."""

    def _inside(self, folder: Path) -> Path:
        mark = folder / "latest_checkpointed_iteration.txt"
        if not mark.exists():
            return folder
        which = mark.read_text(encoding="utf-8").strip()
        return folder / (f"iter_{int(which):07}" if which.isdigit() else self.folder)

    def finds(self, folder: Path) -> bool:
        inside = self._inside(folder)
        return (inside / ".metadata").exists() and OUTSIDE["model.embed_tokens.weight"] in read_dcp(inside)[0]

    def read(self, folder: Path) -> tuple[dict[str, Stored], list[str]]:
        tensors, others = read_dcp(self._inside(folder))
        return {name.removeprefix("chained_0."): tensor for name, tensor in tensors.items()}, others

    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        inside = folder / self.folder
        write_dcp(inside, tensors)
        kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
        text = json.dumps(kind | {"common_backend_version": 1})
        (inside / "metadata.json").write_text(text, encoding="utf-8")
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, inside / "common.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")

    def called(self, stored: str, state: str | None) -> str | None:
        if state == "step":
            return None  # it is one number for all, in another file
        return stored if state is None else f"optimizer.state.{state}.{stored}"

    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[Block]:
        layers: dict[int, set[str]] = {}
        for name in model.shapes:
            if found := LAYER.fullmatch(name):
                layers.setdefault(int(found[1]), set()).add(found[2])
        alike = len({frozenset(held) for held in layers.values()}) == 1
        if names:
            alike = not any(name.startswith("decoder.layers.0.") for name in names)
        latent = any("kv_a_proj_with_mqa" in name for name in model.shapes)
        sparse = {int(name.split(".")[2]) for name in model.experts}

        def rules(layer: int) -> Rules:
            attention: Rules = LATENT_ATTENTION if latent else ATTENTION
            return {**attention, **(SPARSE if layer in sparse else DENSE)}

        return by_rules(model, OUTSIDE, rules, "decoder.layers." if alike else "decoder.layers.{}.", stacked=alike)
