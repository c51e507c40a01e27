"""The sizes in the `config.json` of published models, under the names that each file has for them, and what is published."""

from __future__ import annotations

from typing import Any

from moesaic.planner.presets import CONFIGS

MIXTRAL, QWEN3_30B = CONFIGS["mixtral-8x7b"], CONFIGS["qwen3-30b-a3b"]
DEEPSEEK_V3, GPT_OSS_120B = CONFIGS["deepseek-v3"], CONFIGS["gpt-oss-120b"]

PUBLISHED: dict[str, tuple[dict[str, Any], float, float, int]] = {
    "Mixtral-8x7B": (MIXTRAL, 46.7, 12.9, 2),
    "Mixtral-8x22B": (
        {**MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
         "vocab_size": 32768}, 141.0, 39.0, 2,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
         "vocab_size": 151936}, 14.3, 2.7, 2,
    ),
    "Qwen2-57B-A14B": (
        {"model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560,
         "shared_expert_intermediate_size": 20480, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
         "vocab_size": 151936}, 57.4, 14.0, 2,
    ),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5, 3.3, 2),
    "Qwen3-235B-A22B": (
        {**QWEN3_30B, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
         "num_hidden_layers": 94, "num_attention_heads": 64}, 235.0, 22.0, 2,
    ),
    "Qwen3-Next-80B-A3B": (
        {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
         "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
         "linear_num_value_heads": 32, "linear_value_head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "vocab_size": 151936}, 80.0, 3.0, 0,
    ),
    "OLMoE-1B-7B": (CONFIGS["olmoe-1b-7b"], 6.9, 1.3, 2),
    "DeepSeek-V2": (
        {**DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "num_hidden_layers": 60, "first_k_dense_replace": 1, "n_routed_experts": 160,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_group": 3, "vocab_size": 102400}, 236.0, 21.0, 2,
    ),
    "DeepSeek-V2-Lite": (
        {**DEEPSEEK_V3, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
         "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16,
         "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
         "topk_group": 1, "vocab_size": 102400}, 15.7, 2.4, 1,
    ),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0, 37.0, 2),
    "Kimi-K2": (
        {**DEEPSEEK_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "num_attention_heads": 64,
         "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "vocab_size": 163840}, 1000.0, 32.0, 2,
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
         "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
         "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
         "n_group": 1, "topk_group": 1, "vocab_size": 151552}, 106.0, 12.0, 0,
    ),
    "gpt-oss-120b": (GPT_OSS_120B, 116.8, 5.1, 1),
    "gpt-oss-20b": (
        {**GPT_OSS_120B, "num_hidden_layers": 24, "num_local_experts": 32,
         "layer_types": ["sliding_attention", "full_attention"] * 12}, 20.9, 3.6, 1,
    ),
    "granite-3.1-3b-a800m": (
        {"model_type": "granitemoe", "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32,
         "num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
         "vocab_size": 49155, "tie_word_embeddings": True}, 3.3, 0.8, 0,
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
         "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
         "num_experts_per_tok": 8, "shared_intermediate_size": 0, "vocab_size": 200064}, 230.0, 10.0, 0,
    ),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202048}},
        109.0, 17.0, 2,
    ),
}  # fmt: skip
"""Configuration; billions of parameters in all, and active, as the cards say; embeddings that are counted among the active."""
