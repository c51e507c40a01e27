"""Upcycling: the sparse model computes the same function as the dense one, with whole copies and
with virtual groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

import transformers
from checkpoints import tensors_of

import moesaic
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.weights.convert import verify
from moesaic.weights.upcycle import INTO, Upcycling

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def dense(folder: Path, kind: str, **sizes: Any) -> Path:
    """Save a random dense model in float64."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    model.save_pretrained(folder / kind)
    return folder / kind


def logits(folder: Path) -> torch.Tensor:
    """Load a hub checkpoint with transformers and return its logits, on a text whose tokens reach
    many experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")
    values: torch.Tensor = model(input_ids=torch.arange(48).view(2, 24) + 5).logits.detach()
    return values


@pytest.mark.parametrize(
    ("kind", "experts", "top_k", "granularity"),
    [
        ("llama", 4, 2, 1),
        ("mistral", 4, 1, 1),
        ("qwen3", 8, 4, 2),
        ("llama", 8, 4, 4),
        ("qwen3", 16, 8, 4),
    ],
)
def test_the_sparse_model_computes_what_the_dense_one_did(
    kind, experts, top_k, granularity, tmp_path
):
    source = dense(tmp_path, kind)
    how = Upcycling(num_experts=experts, top_k=top_k, granularity=granularity)
    receipt = moesaic.convert(source, tmp_path / "out", to="hf", upcycle=how)
    expected = logits(source)
    actual = logits(tmp_path / "out")
    assert float(expected.abs().max()) > 1
    # transformers takes the softmax in float32: weights of several copies sum to 1 up to its
    # rounding.
    tolerance = (1e-13 if top_k == granularity else 1e-6) * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    assert receipt["logits"]["largest_difference"] <= tolerance
    assert receipt["upcycled"] == vars(how)
    assert receipt["model"] == INTO[kind]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.model.layers[0].mlp.experts.down_proj.shape == (experts, 32, 48 // granularity)


def test_shards_are_those_of_the_dense_layer_and_groups_share_a_router_row(tmp_path: Path) -> None:
    source = dense(tmp_path, "mistral")
    moesaic.convert(
        source,
        tmp_path / "out",
        to="moesaic",
        upcycle=Upcycling(num_experts=8, top_k=4, granularity=4),
    )
    before = tensors_of(source)
    after = tensors_of(tmp_path / "out")
    mlp = "model.layers.1.mlp."
    up = after[f"model.{mlp}experts.gate_up_proj"]
    down = after[f"model.{mlp}experts.down_proj"]
    for expert in range(8):
        here = slice(12 * (expert % 4), 12 * (expert % 4) + 12)
        gate_and_up = torch.cat(
            [before[f"{mlp}{name}_proj.weight"][here] for name in ("gate", "up")]
        )
        assert torch.equal(up[expert], gate_and_up)
        assert torch.equal(down[expert], 4 * before[f"{mlp}down_proj.weight"][:, here])
    router = after[f"model.{mlp}gate.weight"]
    assert torch.equal(router, router[::4].repeat_interleave(4, 0))
    assert not torch.equal(router[0], router[4])
    assert 0.01 < float(router[::4].std()) < 0.03
    assert not torch.equal(router, after["model.model.layers.0.mlp.gate.weight"])
    assert verify(tmp_path / "out")["experts"] == 16


def test_whole_layers_without_normalised_weights_would_not_be_the_same(tmp_path: Path) -> None:
    """The function is preserved only because the chosen experts' weights sum to 1: otherwise,
    logits would differ."""
    moesaic.convert(
        dense(tmp_path, "qwen3"), tmp_path / "out", to="hf", upcycle=Upcycling(num_experts=4)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = False
    actual = model(input_ids=torch.arange(48).view(2, 24) + 5).logits.detach()
    assert float((actual - logits(tmp_path / "qwen3")).abs().max()) > 1e-3


def test_the_command_line_upcycles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(dense(tmp_path, "llama")), str(tmp_path / "out"), "--to", "torchtitan"]
    assert main([*words, "--experts", "4", "--top-k", "2", "--granularity", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mixtral: hf to torchtitan, ")
    assert "8 experts" in out


def test_what_cannot_be_upcycled_is_refused(tmp_path: Path) -> None:
    for settings, message in [
        ({"granularity": 3, "num_experts": 6, "top_k": 3}, "granularity=3: give a power of two"),
        ({"granularity": 2, "num_experts": 7}, "num_experts=7: give a multiple of granularity=2"),
        ({"granularity": 4, "top_k": 2}, "top_k=2: give a multiple of granularity=4"),
        ({"top_k": 9}, "top_k=9: give at most num_experts=8"),
    ]:
        with pytest.raises(InputError, match=message):
            Upcycling(**settings)
    source = dense(tmp_path, "llama", attention_bias=True)
    with pytest.raises(
        InputError, match="llama with biases in attention or mlp cannot be upcycled"
    ):
        moesaic.convert(source, tmp_path / "out", to="hf", upcycle=Upcycling())
    source = dense(tmp_path, "mistral", intermediate_size=44)
    with pytest.raises(InputError, match="granularity=8: must divide intermediate_size=44"):
        moesaic.convert(
            source, tmp_path / "out", to="hf", upcycle=Upcycling(granularity=8, top_k=8)
        )
    with pytest.raises(
        InputError,
        match="gpt2 cannot be upcycled: take a dense model of type llama, mistral, qwen3",
    ):
        moesaic.convert(dense(tmp_path, "gpt2"), tmp_path / "out", to="hf", upcycle=Upcycling())
