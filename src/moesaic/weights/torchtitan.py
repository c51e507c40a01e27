"""torchtitan's checkpoints: the names of torchtitan 0.3, in files of torch.distributed.checkpoint.

For a model that torchtitan does not have, each part gets the name that such a part has in
torchtitan's other models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from moesaic.weights.layout import Readable, StoredBlock
from moesaic.weights.model_tensors import AbstractFormat, Architecture, Rules, by_rules
from moesaic.weights.tensor_files import read_dcp, write_dcp

OUTSIDE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
ATTENTION = {
    **{
        f"self_attn.{name}_proj.{kind}": f"attention.qkv_linear.w{name}.{kind}"
        for name in "qkv"
        for kind in ("weight", "bias")
    },
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.o_proj.bias": "attention.wo.bias",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.sinks": "attention.sinks",
}
LATENT_ATTENTION = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
}
EXPERTS = "moe.routed_experts.inner_experts."
COMMON = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "block_sparse_moe.router.weight": "moe.router.gate.weight",
    "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
    **{
        f"mlp.{experts}.{theirs}_proj.weight": f"moe.shared_experts.{ours}.weight"
        for experts in ("shared_expert", "shared_experts")
        for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
SWIGLU = {
    f"{moe}.experts.{theirs}": EXPERTS + ours
    for moe in ("mlp", "block_sparse_moe")
    for theirs, ours in (("gate", "w1_EFD"), ("up", "w3_EFD"), ("down", "w2_EDF"))
}
WITH_BIAS = {
    "mlp.experts.gate_up_proj": EXPERTS + "mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": EXPERTS + "mlp1_bias_EG",
    "mlp.experts.down_proj": EXPERTS + "mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": EXPERTS + "mlp2_bias_ED",
}
"""Names for experts with biases, as in gpt-oss, which interleaves the rows of gate and up
projection."""


class Torchtitan(AbstractFormat):
    """torchtitan's format. The model's names have no prefix; optimizer states are under
    `optimizer.state`."""

    title = "torchtitan"

    def recognises(self, folder: Path) -> bool:
        return (folder / ".metadata").exists() and "tok_embeddings.weight" in read_dcp(folder)[0]

    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        return read_dcp(folder)

    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        write_dcp(folder, tensors)

    def stored_name(self, stored: str, state: str | None) -> str | None:
        return stored if state is None else f"optimizer.state.{stored}.{state}"

    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield where each tensor lies in torchtitan's checkpoint."""
        has_latent_attention = any("kv_a_proj_with_mqa" in name for name in model.shapes)
        has_bias = any(module.has_bias for module in model.experts.values())
        rules: Rules = {
            **COMMON,
            **(LATENT_ATTENTION if has_latent_attention else ATTENTION),
            **(WITH_BIAS if has_bias else SWIGLU),
        }
        # the same rules for every layer
        return by_rules(model, OUTSIDE, lambda layer: rules, layer_prefix="layers.{}.")
