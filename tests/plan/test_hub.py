"""Models of the hub: parameter counts beside published ones, dense layers, windows, group limits, and what is refused."""

from __future__ import annotations

import json
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest

from moesaic.cost.call_sizes import node_tokens_per_node
from moesaic.cost.cluster import read_cluster
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.hub import HubShape, read_shape
from moesaic.plan.presets import read_job
from plan.hub_configs import DEEPSEEK_V3, GPT_OSS_120B, MIXTRAL, PUBLISHED, QWEN3_30B


def shape(table: dict[str, Any], seq_len: int = 4096) -> HubShape:
    return read_shape(table, "model config.json", seq_len=seq_len)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_cards_say(name: str) -> None:
    table, total, active, embeddings = PUBLISHED[name]
    model = shape(table)
    left_out = (1 if model.tied else 2) - embeddings
    found = model.parameters(model.moe.top_k) - max(left_out, 0) * model.vocab * model.dim
    # Cards round: 1T, 3B, 800M.
    assert model.parameters() / 1e9 == pytest.approx(total, rel=0.03)
    assert found / 1e9 == pytest.approx(active, rel=0.09)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_step_counts_the_parameters_of_the_model(name: str) -> None:
    model = shape(PUBLISHED[name][0])
    job = read_job_of(PUBLISHED[name][0])
    step = job.step_model(read_cluster("dgx-h100"), 8)
    shared = step.moe_layers * step.layer.matrices * step.layer.dim * step.shared_hidden
    assert step.dense_parameters + shared + step.expert_parameters == pytest.approx(model.parameters())


def read_job_of(table: dict[str, Any], world: int = 8) -> Any:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(table, file)
        file.flush()
        return read_job(file.name, world=world)


def test_a_file_of_the_hub_trains_one_sequence_per_rank_and_about_four_million_tokens_a_step() -> None:
    job = read_job_of(MIXTRAL, world=64)
    assert (job.batch_size, job.accumulation, job.model.seq_len) == (64, 16, 4096)
    assert job.data.vocab_size == 32000


def test_dense_layers_follow_each_way_to_say_so() -> None:
    assert shape(DEEPSEEK_V3).dense_layers == (0, 1, 2)
    assert shape(QWEN3_30B | {"mlp_only_layers": [4, 7]}).dense_layers == (4, 7)
    assert shape(QWEN3_30B | {"num_hidden_layers": 4, "decoder_sparse_step": 2}).dense_layers == (0, 2)
    assert shape(DEEPSEEK_V3 | {"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}).dense_layers == (0,)
    assert shape(MIXTRAL | {"num_hidden_layers": 4, "moe_layers": [1, 3]}).dense_layers == (0, 2)


def test_scores_take_the_widths_of_the_heads_and_see_only_a_window() -> None:
    whole = shape(MIXTRAL)
    assert whole.around["score_operations"] == 2 * 2 * 4096 * 4096 / 2
    latent = shape(DEEPSEEK_V3).around["score_operations"]
    assert latent == 2 * 128 * (128 + 64 + 128) * 4096 / 2
    # Half of the layers see 128 keys each but for the first 128 tokens, half of them on the mean 2,048.
    width = 2 * 64 * 64
    assert shape(GPT_OSS_120B).score_width == pytest.approx(width * (0.5 + 0.5 * (128 - 128**2 / 8192) / 2048))


def expected_by_hand(groups: int, top_groups: int, nodes: int, experts: int, top_k: int) -> float:
    """Return the share of tokens with an expert on the first node, over every choice of groups and experts."""
    size, hits, ways = experts // groups, 0, 0
    for chosen in combinations(range(groups), top_groups):
        reachable = [expert for group in chosen for expert in range(group * size, (group + 1) * size)]
        for picked in combinations(reachable, top_k):
            hits += any(expert < experts // nodes for expert in picked)
            ways += 1
    assert ways == comb(groups, top_groups) * comb(size * top_groups, top_k)
    return hits / ways


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_a_group_limit_keeps_tokens_from_nodes(nodes: int) -> None:
    limited = Workload(tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8, groups=4, top_groups=2)
    assert node_tokens_per_node(limited, nodes, 1) == pytest.approx(1000 * expected_by_hand(4, 2, nodes, 16, 3))
    whole = Workload(tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8, groups=4, top_groups=4)
    plain = Workload(tokens=1000, num_experts=16, top_k=3, dim=8, hidden=8)
    assert node_tokens_per_node(whole, nodes, 1) == pytest.approx(node_tokens_per_node(plain, nodes, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": None}, "so the model has no experts to plan for"),
        ({"hidden_size": None}, "has none of hidden_size, d_model, n_embd, so the model is of an unknown architecture"),
        (
            {"vocab_size": None},
            "add one, for example vocab_size = 32000 as in Mixtral 8x7B, or write the sizes as [model]",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be at least 1"),
        ({"hidden_size": 10**400}, "a size is larger than that of any model"),
        ({"num_experts_per_tok": 9}, "model.moe.top_k=9 does not fit model.moe.num_experts=8"),
        ({"mamba_d_state": 16}, "mamba_d_state belongs to layers that planning cannot predict"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL | change))
    with pytest.raises(InputError) as refusal:
        read_job(str(path))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim=None: low-rank attention needs a whole number of at least 1: add it"),
        ({"v_head_dim": "128"}, "v_head_dim='128': low-rank attention needs a whole number"),
        ({"qk_rope_head_dim": -64}, "qk_rope_head_dim=-64: low-rank attention needs"),
        ({"q_lora_rank": "1536"}, "q_lora_rank='1536': low-rank attention needs"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: must be at most 10000"),
        ({"first_k_dense_replace": 61}, "no block has an MoE layer"),
        ({"moe_layers": []}, "no block has an MoE layer"),
        ({"kv_lora_rank": None, "head_dim": -8}, "head_dim=-8: must be at least 1"),
        ({"kv_lora_rank": None, "num_key_value_heads": 0}, "num_key_value_heads=0: must be at least 1"),
        ({"n_shared_experts": -1}, "n_shared_experts=-1: must be at least 0"),
        ({"kv_lora_rank": None, "sliding_window": "all"}, "is of an unknown architecture"),
        ({"kv_lora_rank": None, "layer_types": 3}, "is of an unknown architecture"),
        ({"kv_lora_rank": None, "full_attention_interval": -4}, "full_attention_interval=-4: must be at least 0"),
        ({"mlp_only_layers": 3}, "is of an unknown architecture"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refusal:
        shape(DEEPSEEK_V3 | change)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_kinds_of_layers_behind_the_last_one_count_nothing() -> None:
    more = GPT_OSS_120B | {"layer_types": ["sliding_attention", "full_attention"] * 18 + ["sliding_attention"] * 30}
    assert shape(more) == shape(GPT_OSS_120B)
