"""Experts become NF4 as a checkpoint is read, quantized or not: values, what a rank allocates at
most, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import peft
import quantized_models
from lora_ranks import FAMILIES, SIZES, load, on_rank, stepped, with_adapters
from quantized_models import KINDS
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from allocated import Allocated
from moesaic.errors import InputError
from moesaic.transformers import adopt_adapters
from moesaic.weights import source
from moesaic.weights.load import load_model
from moesaic_lab.hf import as_launched, batch
from worlds import on_ranks

EXPERTS = {"intermediate_size": 64, "moe_intermediate_size": 256, "num_experts": 16}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in each quantization, and in the numbers that these mean."""
    folder = tmp_path_factory.mktemp("stored")
    quantized_models.write_all(folder)
    return folder


def parts(folder: str, names: list[str], ep: int) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of models with experts in NF4: this rank's part of experts, and all
    else whole."""
    if ep > 1:
        as_launched()
    found = []
    for name in names:
        model = load(f"{folder}/{name}", four_bit=True, ep=ep)
        found.append(
            {
                key: (each.to_local() if ".experts." in key else each.full_tensor())
                if isinstance(each, DTensor)
                else each
                for key, each in model.state_dict().items()
            }
        )
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.random)])
def test_quantized_checkpoints_become_the_nf4_of_the_numbers_they_mean(stored, world):
    wanted = parts(str(stored), [f"{kind}-plain" for kind in KINDS], 1)
    ranks = (
        [parts(str(stored), list(KINDS), 1)]
        if world == 1
        else on_ranks(world, parts, str(stored), list(KINDS), world)
    )
    for number, kind in enumerate(KINDS):
        for name, tensor in wanted[number].items():
            own = [each[number][name] for each in ranks]
            joined = torch.cat(own) if ".experts." in name else own[-1]
            assert (joined.dtype, torch.equal(joined, tensor)) == (tensor.dtype, True), (kind, name)


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "experts4bit"])
def test_experts_that_are_in_nf4_keep_their_bits(stored, kind):
    tensors = {
        key: each
        for path in (stored / kind).glob("*.safetensors")
        for key, each in load_file(path).items()
    }
    (found,) = parts(str(stored), [kind], 1)
    prefix = "model.layers.1.mlp.experts"
    lowest = 0.0
    for expert in range(4):
        if kind == "experts4bit":
            codes, scales = (
                tensors[f"{prefix}.gate_up_{ending}"][expert] for ending in ("proj", "absmax")
            )
        else:
            names = [f"{prefix}.{expert}.{name}_proj.weight" for name in ("gate", "up")]
            codes = torch.cat([tensors[name] for name in names])
            scales = torch.cat([scales_of(tensors, name) for name in names])
            lowest = min(lowest, float(scales.min()))
        assert torch.equal(found[f"{prefix}.gate_up_proj"][expert].flatten(), codes.flatten())
        assert torch.equal(found[f"{prefix}.gate_up_absmax"][expert].flatten(), scales)
    assert (lowest < 0) == (kind == "nf4-double")


def scales_of(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the scales that bitsandbytes stores for a weight."""
    scales = tensors[f"{name}.absmax"]
    if f"{name}.nested_absmax" not in tensors:
        return scales
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    groups = tensors[f"{name}.nested_absmax"].repeat_interleave(256)[: len(scales)]
    return tensors[f"{name}.nested_quant_map"][scales.long()] * groups + state["nested_offset"]


def test_quantized_models_train_adapters_like_the_dense_float64_model(stored):
    wanted = {}
    for kind in KINDS:
        dense = with_adapters(
            load(str(stored / f"{kind}-rounded"), four_bit=False, experts="eager")
        ).double()
        wanted[kind] = stepped(dense, batch(4))
    cases = [(kind, True, True) for kind in KINDS]
    results = on_ranks(2, on_rank, str(stored), cases)
    for number, (kind, (loss, adapters)) in enumerate(wanted.items()):
        alone = stepped(with_adapters(load(str(stored / kind), four_bit=True)), batch(4))
        mean = sum(each[number][0] for each in results) / 2
        for found_loss, found in (
            (alone[0], alone[1]),
            *((mean, each[number][1]) for each in results),
        ):
            assert found_loss == pytest.approx(loss, abs=1e-6), kind
            for name, tensor in adapters.items():
                torch.testing.assert_close(found[name].double(), tensor, rtol=1e-4, atol=1e-6)


MANY = {**SIZES, "num_hidden_layers": 3}
LARGE = {
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MANY, intermediate_size=64, moe_intermediate_size=64, num_experts=64)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **MANY, intermediate_size=64, num_local_experts=64, layer_types=["full_attention"] * 3
        )
    ),
}


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nf4-double"])
def test_a_quantized_checkpoint_needs_an_expert_besides_what_stays(tmp_path, kind):
    """Host and device are one here: the peak of both together is below the bounds of each."""
    quantized_models.write(tmp_path, kind, LARGE[KINDS[kind][0]](), files=4)
    largest_shard = max(path.stat().st_size for path in (tmp_path / kind).glob("*.safetensors"))
    alone = peak(str(tmp_path / kind), 1)
    ranks = on_ranks(2, peak, str(tmp_path / kind), 2)
    for most, stays in (alone, *ranks):
        assert most - stays <= 0.1 * alone[1]
        assert most - stays <= 1.2 * largest_shard
    assert all(stays < 0.6 * alone[1] for _, stays in ranks)


def test_nf4_whose_tensors_do_not_belong_together_is_refused(stored, tmp_path):
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    whole = {
        key: each
        for path in (stored / "nf4-double").glob("*.safetensors")
        for key, each in load_file(path).items()
    }
    state = f"{name}.quant_state.bitsandbytes__nf4"
    text = bytes(whole[state].tolist())
    for changes in (
        {f"{name}.absmax": None},
        {f"{name}.nested_quant_map": whole[f"{name}.nested_quant_map"][:9]},
        {f"{name}.nested_absmax": torch.ones(2)},
        {name: whole[name][:-32]},
        {state: torch.tensor(list(text.replace(b"64", b"32", 1)), dtype=torch.uint8)},
        {state: torch.tensor(list(text[:-1]), dtype=torch.uint8)},
        {state: torch.tensor(list(text.replace(b"256", b"0")), dtype=torch.uint8)},
        {
            state: torch.tensor(
                list(text.replace(b"nested_offset", b"nested_offzet")), dtype=torch.uint8
            )
        },
        {state: torch.tensor(list(text.replace(b'"nf4"', b'"fp4"')), dtype=torch.uint8)},
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        tensors = {key: each for key, each in (whole | changes).items() if each is not None}
        quantized_models.save(
            FAMILIES["qwen3"](), folder, tensors, 1, quantization_config=KINDS["nf4"][2]
        )
        with pytest.raises(
            InputError, match=f"{name} is not in NF4 with blocks of 64, as bitsandbytes saves it"
        ):
            load(str(folder), four_bit=True)


def test_a_checkpoint_of_the_hub_is_fetched_and_read_as_its_options_say(stored, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        source,
        "snapshot_download",
        lambda *names, **how: fetched.append((names, how)) or str(stored / "fp8"),
    )
    model = load_model("org/name", revision="v2", token="t", torch_dtype=torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    ((names, how),) = fetched
    assert (names, how["revision"], how["token"]) == (("org/name",), "v2", "t")
    model, found = load_model(stored / "fp8", dtype="auto", output_loading_info=True)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def write(folder: Path, **sizes: int) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 8}, **{**EXPERTS, **sizes})
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="5MB")


def peak(folder: str, ep: int) -> tuple[int, int]:
    """Return the most bytes that loading a model had at a time, and the bytes of its tensors on
    this rank."""
    if ep > 1:
        as_launched()
    with Allocated() as allocated:
        model = load(folder, four_bit=True, ep=ep)
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    return allocated.most, sum(getattr(each, "_local_tensor", each).nbytes for each in tensors)


def test_a_rank_reads_its_own_experts_and_one_weight_at_a_time(tmp_path):
    write(tmp_path)
    largest_shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    model = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    weight = 16 * 2 * 256 * 64 * 2  # the largest weight of experts, in 16 bits
    assert largest_shard < model / 2
    alone = peak(str(tmp_path), 1)
    ranks = on_ranks(2, peak, str(tmp_path), 2)
    for (most, stays), own in zip([alone, *ranks], (weight, weight // 2, weight // 2)):
        assert stays < 0.4 * model
        assert most - stays <= 4 * own, "transformers collects, stacks and joins one weight"
        assert most - stays <= 1.2 * largest_shard
    assert all(stays < 0.65 * alone[1] for _, stays in ranks)


def adapted(folder: str, ep: int, low: bool = True) -> tuple[int, int, float]:
    """Return the most bytes that adapters took as they were made, those that stay on this rank, and
    a sum over them."""
    as_launched()
    config = peft.LoraConfig(
        r=8,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    with Allocated() as allocated:
        model = load(folder, four_bit=True, ep=ep)
        torch.manual_seed(0)
        before = allocated.most = allocated.now
        whole = peft.get_peft_model(model, config, low_cpu_mem_usage=low)
        adopt_adapters(whole)
    parts = [
        getattr(each, "_local_tensor", each) for each in whole.parameters() if each.requires_grad
    ]
    of_experts = [
        part.detach().double().abs().sum().item() for part in parts if part.numel() > 8 * 64
    ]
    return allocated.most - before, sum(part.nbytes for part in parts), sum(of_experts)


def test_a_rank_never_has_the_adapters_of_all_experts(tmp_path):
    write(tmp_path)
    ((alone, whole, norm),) = on_ranks(1, adapted, str(tmp_path), 1)
    assert alone < 1.05 * whole
    assert norm == on_ranks(1, adapted, str(tmp_path), 1, False)[0][2], (
        "PEFT draws the same numbers"
    )
    ranks = on_ranks(2, adapted, str(tmp_path), 2)
    of_a_weight = 16 * 8 * (2 * 256 + 64) * 4
    for most, stays, _ in ranks:
        assert stays < 0.6 * whole
        assert most <= stays + 1.5 * of_a_weight < 0.8 * whole
    assert sum(each for _, _, each in ranks) == pytest.approx(norm)


def test_what_cannot_be_in_nf4_is_refused(tmp_path):
    write(tmp_path, moe_intermediate_size=96, num_experts=4)
    with pytest.raises(
        InputError, match="down_proj of Qwen3MoeExperts reads 96 inputs, no multiple of 64"
    ):
        load(str(tmp_path), four_bit=True)
