"""Runs Megatron-Core's own model on a CPU: it reads our checkpoint, computes logits, and writes a
checkpoint for us to read.

Megatron-Core 0.16.1 lacks some functions on CPU, which are patched while it runs: the device's
name, its synchronization, a random number generator for dropout (which is off), and a name that
only TransformerEngine defines. Its local layers name the norm before the experts like that of a
dense layer's first product. Layers of TransformerEngine, from which Megatron's checkpoints come,
call it `pre_mlp_layernorm`.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


def read_and_write(config: Any, source: str, target: str, ids: Tensor) -> Tensor:
    """Load a checkpoint into Megatron's model, write it again with Megatron's own code, and return
    the model's logits.

    Args:
        config: transformers' configuration of a Qwen3-MoE model.
        source: the folder to read.
        target: an existing folder to write into.
        ids: (1, tokens).
    """
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    model = _model(config)
    state = model.load_state_dict(dist_checkpointing.load(_sharded(model), source), strict=False)
    assert [name for name in state.missing_keys if "_extra_state" not in name] == []
    Path(target).mkdir()
    tokens = ids.shape[1]
    mask = torch.triu(torch.ones(1, 1, tokens, tokens, dtype=torch.bool), 1)
    random = SimpleNamespace(fork=lambda *_: nullcontext())
    with ExitStack() as lacking, torch.no_grad():
        lacking.enter_context(patch("torch.cuda.current_device", lambda: "cpu"))
        lacking.enter_context(patch("torch.cuda.synchronize", lambda *_: None))
        lacking.enter_context(
            patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda *_, **__: random)
        )
        lacking.enter_context(
            patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True)
        )
        dist_checkpointing.save(_sharded(model), target)
        logits: Tensor = model.eval()(ids, torch.arange(tokens).unsqueeze(0), mask)
    return logits


def _model(config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    described = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    layers = get_gpt_layer_local_spec(
        num_experts=config.num_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    return GPTModel(
        described,
        layers,
        vocab_size=config.vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def _sharded(model: Any) -> dict[str, Any]:
    """Return the sharded state that Megatron loads and saves, without TransformerEngine's extra
    states."""
    found = {
        name: entry
        for name, entry in model.sharded_state_dict().items()
        if "_extra_state" not in name
    }
    for entry in found.values():
        if entry.key == "decoder.layers.mlp.linear_fc1.layer_norm_weight":
            entry.key = "decoder.layers.pre_mlp_layernorm.weight"
    return found
