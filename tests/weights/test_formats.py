"""Every family, converted from every format into every other, bit by bit; and the layouts that the
formats prescribe."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from checkpoints import FAMILIES, WITHOUT, assert_bitwise, build, save, tensors_of

import moesaic
from moesaic.errors import InputError
from moesaic.weights.checkpoint import FORMATS

QUICK = ("Mixtral", "DeepseekV3", "GptOss")
"""Families of which the quicker tests convert every pair of formats: equal and differing layers,
biases, interleaving."""
QUICK_FIRST = [
    pytest.param(
        name,
        marks=() if name == QUICK[1] else pytest.mark.random if name in QUICK else pytest.mark.slow,
    )
    for name in FAMILIES
]
"""All families: one for `make test`, the others of `QUICK` for `make test-random`, the rest
slow."""
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that maps a family and a format to a folder with its checkpoint, which was
    converted from the hub's."""
    root = tmp_path_factory.mktemp("formats")

    def write(family: str, name: str) -> Path:
        folder = root / family / name
        if not folder.exists():
            if name == "hf":
                save(family, folder)
            else:  # with the logits of both, if the model fits transformers unchanged
                receipt = moesaic.convert(
                    write(family, "hf"), folder, to=name, logits=name == "moesaic"
                )
                if name == "moesaic":
                    assert (
                        receipt["logits"]["largest_difference"]
                        == receipt["logits"]["not_finite"]
                        == 0
                    )
                    assert receipt["logits"]["largest"] > 0.01
        return folder

    return write


@pytest.mark.parametrize("family", QUICK_FIRST)
def test_any_format_becomes_any_other_bit_by_bit(family: str, written: Any, tmp_path: Path) -> None:
    names = [name for name in FORMATS if (family, name) not in WITHOUT]
    for source, to in permutations(names, 2):
        out = tmp_path / f"{source}-{to}"
        moesaic.convert(written(family, source), out, to=to, logits=False)
        assert_bitwise(tensors_of(out), tensors_of(written(family, to)))


@pytest.mark.parametrize("family", FAMILIES)
def test_moesaic_has_what_transformers_has_in_memory_and_logits_stay(
    family: str, written: Any, tmp_path: Path
) -> None:
    expected = {f"model.{name}": tensor for name, tensor in build(family).state_dict().items()}
    assert_bitwise(tensors_of(written(family, "moesaic")), expected)
    receipt = moesaic.convert(written(family, "moesaic"), tmp_path / "back", to="hf")
    assert receipt["logits"]["largest_difference"] == receipt["logits"]["not_finite"] == 0


@pytest.mark.parametrize(("family", "name"), sorted(WITHOUT))
def test_a_family_without_a_place_is_refused_by_name(
    family: str, name: str, written: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"has no place for model\.layers\.0\.linear_attn\.A_log, .* and \d+ more"
    ):
        moesaic.convert(written(family, "hf"), tmp_path / "out", to=name)
    assert not (tmp_path / "out").exists()


def stacked(hub: dict[str, Tensor], pattern: str) -> Tensor:
    """Return one matrix of all four experts."""
    return torch.stack([hub[pattern.format(expert)] for expert in range(4)])


def qkv(hub: dict[str, Tensor], layer: str, kind: str, heads: int = 4, groups: int = 2) -> Tensor:
    """Return queries, keys and values in Megatron's layout: for each group its queries, its key,
    its value."""
    q, k, v = (hub[f"{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv")
    rest = q.shape[1:]
    q = q.view(groups, heads // groups, -1, *rest)
    k = k.view(groups, 1, -1, *rest)
    v = v.view(groups, 1, -1, *rest)
    return torch.cat([q, k, v], 1).reshape(-1, *rest)


def test_torchtitans_layout_of_qwen3(written: Any) -> None:
    hub, titan = (tensors_of(written("Qwen3Moe", name)) for name in ("hf", "torchtitan"))
    experts = "layers.1.moe.routed_experts.inner_experts."
    for theirs, ours in (("gate", "w1_EFD"), ("up", "w3_EFD"), ("down", "w2_EDF")):
        wanted = stacked(hub, f"model.layers.1.mlp.experts.{{}}.{theirs}_proj.weight")
        assert torch.equal(titan[experts + ours], wanted)
    assert torch.equal(
        titan["layers.0.attention.qkv_linear.wk.weight"],
        hub["model.layers.0.self_attn.k_proj.weight"],
    )
    assert torch.equal(
        titan["layers.0.moe.router.gate.weight"], hub["model.layers.0.mlp.gate.weight"]
    )
    assert torch.equal(titan["tok_embeddings.weight"], hub["model.embed_tokens.weight"])


def test_torchtitans_layout_of_gpt_oss(written: Any) -> None:
    hub, titan = (tensors_of(written("GptOss", name)) for name in ("hf", "torchtitan"))
    experts = "layers.0.moe.routed_experts.inner_experts."
    assert torch.equal(
        titan[experts + "mlp1_weight_EGD"], hub["model.layers.0.mlp.experts.gate_up_proj"].mT
    )
    assert torch.equal(
        titan[experts + "mlp2_weight_EDF"], hub["model.layers.0.mlp.experts.down_proj"].mT
    )
    assert torch.equal(
        titan[experts + "mlp1_bias_EG"], hub["model.layers.0.mlp.experts.gate_up_proj_bias"]
    )


def test_megatrons_layout_where_layers_are_alike(written: Any) -> None:
    hub, mcore = (tensors_of(written("Mixtral", name)) for name in ("hf", "megatron"))
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        experts = prefix + ".block_sparse_moe.experts.{}."
        gate, up, down = (stacked(hub, f"{experts}w{number}.weight") for number in (1, 3, 2))
        assert torch.equal(
            mcore["decoder.layers.mlp.experts.experts.linear_fc1.weight"][layer],
            torch.cat([gate, up], 1),
        )
        assert torch.equal(
            mcore["decoder.layers.mlp.experts.experts.linear_fc2.weight"][layer], down
        )
        assert torch.equal(
            mcore["decoder.layers.self_attention.linear_qkv.weight"][layer],
            qkv(hub, prefix, "weight"),
        )
        norm = mcore["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(norm, hub[f"{prefix}.input_layernorm.weight"])
    assert not any(name.startswith("decoder.layers.0") for name in mcore)


def test_megatrons_layout_where_they_differ(written: Any) -> None:
    hub, mcore = (tensors_of(written("DeepseekV3", name)) for name in ("hf", "megatron"))
    dense = [hub[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    shared = [
        hub[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up")
    ]
    assert torch.equal(mcore["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(dense))
    assert torch.equal(
        mcore["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"], torch.cat(shared)
    )
    bias = hub["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(mcore["decoder.layers.1.mlp.router.expert_bias"], bias)
    norms = [hub[f"model.layers.{layer}.post_attention_layernorm.weight"] for layer in (0, 1)]
    assert torch.equal(mcore["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"], norms[0])
    assert torch.equal(mcore["decoder.layers.1.pre_mlp_layernorm.weight"], norms[1])


def test_megatrons_layout_of_gpt_oss(written: Any) -> None:
    hub, mcore = (tensors_of(written("GptOss", name)) for name in ("hf", "megatron"))
    both = hub["model.layers.1.mlp.experts.gate_up_proj"].mT
    wanted = torch.cat([both[:, 0::2], both[:, 1::2]], 1)
    assert torch.equal(mcore["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1], wanted)
    bias = hub["model.layers.1.mlp.experts.gate_up_proj_bias"]
    wanted = torch.cat([bias[:, 0::2], bias[:, 1::2]], 1)
    assert torch.equal(mcore["decoder.layers.mlp.experts.experts.linear_fc1.bias"][1], wanted)
    assert torch.equal(
        mcore["decoder.layers.self_attention.linear_qkv.bias"][1],
        qkv(hub, "model.layers.1", "bias"),
    )
    sinks = mcore["decoder.layers.self_attention.core_attention.softmax_offset"][1]
    assert torch.equal(sinks, hub["model.layers.1.self_attn.sinks"])


def test_megatrons_layout_of_linear_attention_and_gated_attention(
    written: Any, tmp_path: Path
) -> None:
    hub, mcore = (tensors_of(written("Qwen3Next", name)) for name in ("hf", "megatron"))
    linear = "model.layers.0.linear_attn."
    query, key, value, z = (
        hub[f"{linear}in_proj_qkvz.weight"].view(2, -1, 32).split([8, 8, 16, 16], 1)
    )  # two heads of keys
    beta, alpha = hub[f"{linear}in_proj_ba.weight"].view(2, -1, 32).split([2, 2], 1)
    parts = {"query": query, "key": key, "value": value, "z": z, "beta": beta, "alpha": alpha}
    for name, part in parts.items():
        assert torch.equal(
            mcore[f"decoder.layers.0.self_attention.in_proj.weight.{name}"], part.reshape(-1, 32)
        )
    for name, part in zip(
        ("query", "key", "value"), hub[f"{linear}conv1d.weight"].split([16, 16, 32])
    ):
        assert torch.equal(mcore[f"decoder.layers.0.self_attention.conv1d.weight.{name}"], part)
    assert torch.equal(
        mcore["decoder.layers.0.self_attention.out_norm.weight"], hub[f"{linear}norm.weight"] - 1
    )
    queries, gates = (
        hub["model.layers.1.self_attn.q_proj.weight"].view(2, 2, 2, 8, 32).unbind(2)
    )  # groups, heads of each
    keys, values = (
        hub[f"model.layers.1.self_attn.{name}_proj.weight"].view(2, 1, 8, 32) for name in "kv"
    )
    wanted = torch.cat([queries, gates, keys, values], 1).reshape(-1, 32)
    assert torch.equal(mcore["decoder.layers.1.self_attention.linear_qkv.weight"], wanted)


def test_a_norm_that_megatron_could_not_give_back_is_refused(tmp_path: Path) -> None:
    model = build("Qwen3Next")
    model.model.layers[0].linear_attn.norm.weight.data[3] = 0.01
    model.save_pretrained(tmp_path / "hub")
    with pytest.raises(
        InputError, match=r"out_norm\.weight is stored minus one, which torch\.bfloat16 cannot undo"
    ):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="megatron", logits=False)
