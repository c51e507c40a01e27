"""Models of the hub: parameter counts beside published ones, dense layers, windows, group limits,
and what is refused."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest

from helpers import refused
from moesaic.planner.call_sizes import node_tokens_per_node
from moesaic.planner.cluster import read_cluster
from moesaic.planner.hub import HubShape, read_shape
from moesaic.planner.presets import read_job
from moesaic.planner.workload import Workload
from planner.hub_configs import DEEPSEEK_V3, GPT_OSS_120B, MIXTRAL, PUBLISHED, QWEN3_30B


def shape(table: dict[str, Any], seq_len: int = 4096) -> HubShape:
    return read_shape(table, "model config.json", seq_len=seq_len)


def parameters(table: dict[str, Any]) -> tuple[float, float]:
    return read_job_of(table).parameters(read_cluster("dgx-h100"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_cards_say(name: str) -> None:
    table, total, active, embeddings = PUBLISHED[name]
    model = shape(table)
    left_out = max((1 if model.tied else 2) - embeddings, 0) * model.vocab * model.dim
    found = parameters(table)
    # Cards round: 1T, 3B, 800M.
    assert found[0] / 1e9 == pytest.approx(total, rel=0.03)
    assert (found[1] - left_out) / 1e9 == pytest.approx(active, rel=0.09)


def read_job_of(table: dict[str, Any], world: int = 8) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(table, file)
        file.flush()
        return read_job(file.name, world=world)


def test_a_file_of_the_hub_trains_one_sequence_per_rank_and_about_four_million_tokens_a_step() -> (
    None
):
    job = read_job_of(MIXTRAL, world=64)
    assert (job.batch_size, job.accumulation, job.model.seq_len) == (64, 16, 4096)
    assert job.data.vocab_size == 32000


def test_dense_layers_follow_each_way_to_say_so() -> None:
    assert shape(DEEPSEEK_V3).dense_layers == (0, 1, 2)
    assert shape(QWEN3_30B | {"mlp_only_layers": [4, 7]}).dense_layers == (4, 7)
    assert shape(QWEN3_30B | {"num_hidden_layers": 4, "decoder_sparse_step": 2}).dense_layers == (
        0,
        2,
    )
    assert shape(
        DEEPSEEK_V3 | {"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}
    ).dense_layers == (0,)
    four = MIXTRAL | {"num_hidden_layers": 4}
    assert shape(four | {"moe_layers": [1, 3]}).dense_layers == (0, 2)
    assert shape(four | {"num_dense_layers": 2}).dense_layers == (0, 1)
    assert shape(
        four | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
    ).dense_layers == (1,)
    assert shape(four | {"is_moe_layer": [False, True, True, False]}).dense_layers == (0, 3)
    assert shape(four | {"moe_layer_start_index": 1, "moe_layer_end_index": 2}).dense_layers == (
        0,
        3,
    )
    assert shape(four | {"moe_layer_end_index": -1}).dense_layers == ()


def test_scores_take_the_widths_of_the_heads_and_see_only_a_window() -> None:
    whole = shape(MIXTRAL)
    assert whole.around["score_operations"] == 2 * 2 * 4096 * 4096 / 2
    latent = shape(DEEPSEEK_V3).around["score_operations"]
    assert latent == 2 * 128 * (128 + 64 + 128) * 4096 / 2
    # Half of the layers see 128 keys each but for the first 128 tokens, half of them on the mean
    # 2,048.
    width = 2 * 64 * 64
    assert shape(GPT_OSS_120B).score_width == pytest.approx(
        width * (0.5 + 0.5 * (128 - 128**2 / 8192) / 2048)
    )


def expected_by_hand(groups: int, top_groups: int, nodes: int, experts: int, top_k: int) -> float:
    """Return the share of tokens with an expert on the first node, over every choice of groups and
    experts."""
    size = experts // groups
    hits = 0
    ways = 0
    for chosen in combinations(range(groups), top_groups):
        reachable = [
            expert for group in chosen for expert in range(group * size, (group + 1) * size)
        ]
        for picked in combinations(reachable, top_k):
            hits += any(expert < experts // nodes for expert in picked)
            ways += 1
    assert ways == comb(groups, top_groups) * comb(size * top_groups, top_k)
    return hits / ways


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_a_group_limit_keeps_tokens_from_nodes(nodes: int) -> None:
    limited = Workload(
        tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8, groups=4, top_groups=2
    )
    assert node_tokens_per_node(limited, nodes, 1) == pytest.approx(
        1000 * expected_by_hand(4, 2, nodes, 16, 3)
    )
    whole = Workload(tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8, groups=4, top_groups=4)
    plain = Workload(tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8)
    assert node_tokens_per_node(whole, nodes, 1) == pytest.approx(
        node_tokens_per_node(plain, nodes, 1)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": None}, "so the model has no experts to plan for"),
        (
            {"hidden_size": None},
            "has none of hidden_size, d_model, n_embd, so the model is of an unknown architecture",
        ),
        (
            {"vocab_size": None},
            (
                "add one, for example vocab_size = 32000 as in Mixtral 8x7B, or write the sizes "
                "as [model]"
            ),
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be at least 1"),
        ({"hidden_size": 10**400}, "a size is larger than that of any model"),
        ({"num_experts_per_tok": 9}, "model.moe.top_k=9 does not fit model.moe.num_experts=8"),
        (
            {"mamba_d_state": 16},
            "planning does not read mamba_d_state=16, which may change the sizes of layers",
        ),
        ({"head_dim": -8}, "head_dim=-8: must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be at least 1"),
        ({"sliding_window": "all"}, "is of an unknown architecture"),
        ({"layer_types": 3}, "is of an unknown architecture"),
        ({"full_attention_interval": -4}, "full_attention_interval=-4: must be at least 0"),
        (
            {"layer_types": ["full_attention"] * 31},
            "layer_types has 31 entries for 32 layers: give one for each",
        ),
        (
            {"layer_types": ["linear_attention"] * 32},
            "linear_num_key_heads=None: linear attention needs a whole number",
        ),
        (
            {"layer_types": ["indexed_attention"] * 32},
            "index_n_heads=None: an indexer needs a whole number",
        ),
        (
            {"mlp_layer_types": ["sparse"] * 31 + ["moe"]},
            "mlp_layer_types has 'moe', but planning reads only sparse, dense",
        ),
        ({"attn_type_list": [0] + [1] * 31}, "attn_type_list has 0, but planning reads only 1"),
        (
            {"moe_intermediate_size": [512, 1024]},
            "moe_intermediate_size=[512, 1024]: planning reads a whole number, the same",
        ),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok='2': planning reads a whole number"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok=True: planning reads a whole number"),
        ({"model_type": ["x"], "num_experts_per_tok": 9}, "model.moe.top_k=9 does not fit"),
        (
            {"model_type": "jetmoe"},
            "model_type jetmoe has experts in its attention, which planning cannot predict",
        ),
        ({"v_head_dim": 128}, "planning does not read v_head_dim=128"),
        *(
            (
                {"layer_types": ["full_attention"] * 31 + [kind]},
                f"layer_types has '{kind}', but planning reads only full_",
            )
            for kind in ("nonsense", "mamba", "conv", "compressed_sparse_attention", "hybrid")
        ),
        *(
            (
                {name: value},
                f"planning does not read {name}={value}, which may change the sizes of layers",
            )
            for name, value in (
                ("zero_expert_num", 256),
                ("compress_ratios", [0, 4]),
                ("per_layer_config", {"3": {"head_dim": 512}}),
                ("is_encoder_decoder", True),
                ("dense_layer_ids", [0]),
                ("hybrid_override_pattern", "M-M*-"),
                ("hc_mult", 4),
                ("linear_attn_config", {"num_heads": 32}),
                ("output_lora_rank", 64),
                ("rope_head_dim", 64),
                ("n_extra", 1),
            )
        ),
        (
            {"num_local_experts": None, "output_gate_type": "swish"},
            "is dense, with none of num_experts, ",
        ),
        ({"num_local_experts": 0, "mamba_d_state": 16}, "so the model has no experts to plan for"),
        ({"index_topk_freq": "often"}, "is of an unknown architecture"),
        (
            {"sparse_attention_config": {"sparse_attention_freq": 3}},
            "is of an unknown architecture",
        ),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL | change))
    assert words in refused(lambda: read_job(str(path)))


@pytest.mark.parametrize(
    "table",
    [
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
        {"model_type": "mamba", "vocab_size": 50280, "state_size": 16, "num_hidden_layers": 32},
        {"model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    ],
    ids=lambda table: table["model_type"],
)
def test_a_dense_model_with_other_names_for_its_sizes_is_dense(
    table: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(table))
    assert "is dense, with none of num_experts, " in refused(lambda: read_job(str(path)))
    path.write_text(json.dumps(table | {"expert_branches": 8}))
    assert "is dense" not in refused(lambda: read_job(str(path)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"qk_nope_head_dim": None},
            "qk_nope_head_dim=None: low-rank attention needs a whole number of at least 1: add it",
        ),
        ({"v_head_dim": "128"}, "v_head_dim='128': low-rank attention needs a whole number"),
        ({"qk_rope_head_dim": -64}, "qk_rope_head_dim=-64: low-rank attention needs"),
        ({"q_lora_rank": "1536"}, "q_lora_rank='1536': low-rank attention needs"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: must be at most 10000"),
        ({"first_k_dense_replace": 61}, "no block has an MoE layer"),
        ({"moe_layers": []}, "no block has an MoE layer"),
        ({"n_shared_experts": -1}, "n_shared_experts=-1: must be at least 0"),
        ({"mlp_only_layers": 3}, "is of an unknown architecture"),
    ],
)
def test_fields_that_cannot_be_are_one_line(change: dict[str, Any], words: str) -> None:
    assert words in refused(shape, DEEPSEEK_V3 | change)


def test_kinds_of_layers_behind_the_last_one_count_nothing() -> None:
    more = GPT_OSS_120B | {
        "layer_types": ["sliding_attention", "full_attention"] * 18 + ["sliding_attention"] * 30
    }
    assert shape(more) == shape(GPT_OSS_120B)


def test_an_indexer_has_parameters_and_limits_the_keys_of_a_query() -> None:
    indexer = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    plain = shape(DEEPSEEK_V3, 131_072)
    indexed = shape(DEEPSEEK_V3 | indexer, 131_072)
    added = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64
    assert parameters(DEEPSEEK_V3 | indexer)[0] - parameters(DEEPSEEK_V3)[0] == pytest.approx(
        61 * added
    )
    # A query sees 2,048 keys of on the mean 65,536, and the indexer all of them.
    width = 128 * (128 + 64 + 128)
    assert plain.score_width == width
    assert indexed.score_width == pytest.approx(
        width * (2048 - 2048**2 / 262_144) / 65_536 + 64 * 128
    )
    shared = shape(DEEPSEEK_V3 | indexer | {"indexer_types": ["full"] + ["shared"] * 60}, 131_072)
    assert indexed.score_width - shared.score_width == pytest.approx(64 * 128 * 60 / 61)
    fewer = parameters(DEEPSEEK_V3 | indexer | {"indexer_types": ["full"] + ["shared"] * 60})
    assert fewer[0] - parameters(DEEPSEEK_V3)[0] == pytest.approx(added)


def test_a_pattern_of_windows_counts_as_its_layers() -> None:
    window = MIXTRAL | {"sliding_window": 1024}
    listed = window | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
    for name in ("sliding_window_pattern", "global_attn_every_n_layers"):
        assert shape(window | {name: 4}) == shape(listed) != shape(window)
        assert shape(listed | {name: 8}) == shape(listed), "layer_types says it"
    assert shape(listed | {"sliding_window_pattern": "LLLG"}) == shape(listed)


def test_sizes_in_lists_of_equal_numbers_and_in_nested_tables_are_read() -> None:
    hunyuan = {
        "model_type": "hunyuan_v1_moe",
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "num_experts": 64,
        "vocab_size": 128167,
        "tie_word_embeddings": True,
        "moe_topk": [8] * 32,
        "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32,
        "cla_share_factor": 2,
        "use_cla": False,
        "dense_list": [4096, 0],
        "use_mixed_mlp_moe": True,
        "n_group": False,
        "moe_layer_num_skipped": 0,
        "use_qk_norm": True,
        "eod_token_id": 3,
        "im_start_id": 4,
        "norm_type": "rms",
        "rope_scaling": {"type": "dynamic"},
        "pool_type": "last",
        "position_embedding_xdrope": False,
        "topk_group": False,
    }
    assert parameters(hunyuan)[0] / 1e9 == pytest.approx(80.4, abs=0.1)
    assert parameters(hunyuan)[1] / 1e9 == pytest.approx(12.7, abs=0.1)
    dbrx = {
        "model_type": "dbrx",
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "vocab_size": 100352,
        "max_seq_len": 32768,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
            "ffn_act_fn": {"name": "silu"},
            "moe_normalize_expert_weights": 1,
            "moe_jitter_eps": 0.01,
            "model_type": "",
        },
    }
    assert parameters(dbrx)[0] / 1e9 == pytest.approx(131.6, abs=0.1)
    assert parameters(dbrx)[1] / 1e9 == pytest.approx(36.5, abs=0.1)


HARMLESS: dict[str, Any] = {
    "architectures": ["XForCausalLM"],
    "auto_map": {"AutoConfig": "x.y"},
    "torch_dtype": "bfloat16",
    "ep_size": 1,
    "transformers_version": "4.57.0",
    "quantization_config": {"quant_method": "fp8"},
    "bos_token_id": 0,
    "image_token_index": 9,
    "eos_token_id": [1, 2],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40},
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pretraining_tp": 1,
    "attention_bias": True,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "router_aux_loss_coef": 0.9,
    "output_router_logits": True,
    "attn_type_list": [1] * 32,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "qk_norm_type": "per_layer",
    "rotary_dim": 64,
    "use_routing_bias": True,
    "shared_moe_mode": "sigmoid",
    "swiglu_limit": 7,
    "initial_context_length": 4096,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "use_rmsnorm": True,
    "router_dtype": "fp32",
    "partial_rotary_factor": 0.5,
    "moe_capacity": [64, 64],
    "moe_gate": "topk",
    "no_rope_layers": [1, 0],
    "attn_temperature_tuning": 4,
    "cache_implementation": "hybrid",
    "for_llm_compressor": False,
    "clip_qkv": 8,
    "original_max_position_embeddings": 4096,
    "mamba_ssm_dtype": "float32",
    "gating": "per-head",
    "some_new_factor": 2.5,
    "id2label": {"0": "A"},
    "_name_or_path": "x",
    "max_window_layers": 28,
    "use_sliding_window": True,
    "logits_scaling": 6,
}
"""Fields of published files that change no size of a matrix."""


def test_values_that_say_what_is_planned_anyway_are_harmless() -> None:
    fields = {
        "moe_expert_interval": 1,
        "num_experts_per_group": 1,
        "normalization_function": "rmsnorm",
    }
    assert shape(MIXTRAL | fields) == shape(MIXTRAL)
    for name in ("moe_expert_interval", "num_experts_per_group"):
        assert f"planning does not read {name}=2" in refused(shape, MIXTRAL | {name: 2})


def test_what_changes_no_size_is_no_reason_to_refuse() -> None:
    assert shape(MIXTRAL | HARMLESS) == shape(MIXTRAL)
    for name in HARMLESS:
        shape(MIXTRAL | {name: HARMLESS[name]})


def test_a_schedule_of_indexers_is_that_of_transformers() -> None:
    """GLM-5.2 publishes which layers choose keys as a frequency and an offset, or as letters."""
    transformers = pytest.importorskip("transformers")
    plain = DEEPSEEK_V3 | {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
    layers = plain["num_hidden_layers"]
    for published in (
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 5},
        {"index_topk_freq": 1},
        {"index_topk_pattern": "F" + "FSSS" * ((layers - 1) // 4)},
    ):
        config = transformers.GlmMoeDsaConfig(num_hidden_layers=layers, **published)
        spelt_out = plain | {"indexer_types": config.indexer_types}
        assert shape(plain | published, 65_536) == shape(spelt_out, 65_536)
    assert shape(plain | {"index_topk_freq": 4}, 65_536) != shape(plain, 65_536)


def test_indexers_of_blocks_are_read_as_published_and_as_transformers_writes_them() -> None:
    """MiniMax-M3 publishes its indexers in a table of their own."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl

    config = configuration_minimax_m3_vl.MiniMaxM3VLTextConfig
    published = {
        "sparse_attention_config": {
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_num_index_heads": 4,
            "sparse_index_dim": 128,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
            "sparse_local_block": 1,
        },
        "moe_layer_freq": [0] * 3 + [1] * 57,
    }
    written = config(**published).to_dict()
    fields = config().to_dict().items()
    plain = {
        name: value
        for name, value in fields
        if not name.startswith("index_") and not name.endswith("_types")
    }
    found = shape(plain | published, 65_536)
    assert found == shape(written, 65_536)
    assert found.dense_layers == (0, 1, 2)
    # 57 layers see 2,048 keys of a context; three see all of it.
    whole = shape(plain | {"moe_layer_freq": [0] * 3 + [1] * 57}, 65_536)
    assert found.score_width < whole.score_width / 7
