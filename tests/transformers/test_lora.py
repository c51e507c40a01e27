"""Adapters of experts in NF4 and of experts on several ranks, against PEFT's own over the same
numbers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

from ep_ranks import supervised
from lora_ranks import (
    FAMILIES,
    load,
    merged_logits,
    on_rank,
    stepped,
    trainer_losses,
    with_adapters,
    write_models,
)
from safetensors.torch import load_file

import moesaic.transformers
from moesaic.errors import InputError
from moesaic.finetune.targets import Targets
from moesaic.testing.certify import certify_named
from moesaic.transformers.nf4 import dequantized
from moesaic_lab.hf import batch
from worlds import on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, each also with the numbers that NF4 makes of its experts."""
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """Loss, and adapters after a step, of each model's own loop with PEFT's own adapters."""
    models = [name for family in FAMILIES for name in (family, f"{family}-rounded")]
    return {
        name: stepped(
            with_adapters(load(str(folder / name), four_bit=False, experts="eager")), batch(4)
        )
        for name in models
    }


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_nf4_train_adapters_like_peft(folder, expected, family):
    model = with_adapters(load(str(folder / family), four_bit=True))
    loss, adapters = stepped(model, batch(4))
    assert loss == pytest.approx(expected[f"{family}-rounded"][0], abs=1e-6)
    assert loss != pytest.approx(expected[family][0], abs=1e-6)
    close(adapters, expected[f"{family}-rounded"][1])


def test_experts_in_nf4_with_adapters_are_certified():
    found = on_ranks(2, certify_named, "moesaic_lab.four_bit:FourBitAdapters")[0]
    assert [str(each) for each in found if not each.holds()] == []
    assert len(found) > 30


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.random)])
def test_experts_whose_scales_have_eight_bits_train_like_the_numbers_they_stand_for(folder, world):
    wanted = {}
    for family in FAMILIES:
        model = load(str(folder / family), four_bit=True, double=True)
        dense = load(str(folder / family), four_bit=False, experts="eager")
        with torch.no_grad():
            for path, module in Targets.experts(dense).items():
                for name in Targets.weights(module):
                    numbers = dequantized(model.get_submodule(path), name)
                    distance = (numbers - getattr(module, name)).norm() / getattr(
                        module, name
                    ).norm()
                    assert 0.05 < distance < 0.15
                    getattr(module, name).copy_(numbers)
        wanted[family] = stepped(with_adapters(dense).double(), batch(4))
        if world == 1:
            results = [[stepped(with_adapters(model), batch(4))]]
            same(results, 0, wanted[family])
    if world > 1:
        results = on_ranks(
            world, on_rank, str(folder), [(family, True, True) for family in FAMILIES], True
        )
        for number, family in enumerate(FAMILIES):
            same(results, number, wanted[family])


def same(
    results: list[list[Any]], number: int, wanted: tuple[float, dict[str, torch.Tensor]]
) -> None:
    """Assert that the ranks' mean loss, and their adapters after a step, are as wanted."""
    assert sum(each[number][0] for each in results) / len(results) == pytest.approx(
        wanted[0], abs=1e-6
    )
    for each in results:
        for name, tensor in wanted[1].items():
            torch.testing.assert_close(each[number][1][name].double(), tensor, rtol=1e-4, atol=1e-6)


def test_scales_in_eight_bits_take_a_quarter(folder):
    sizes = []
    for double in (False, True):
        model = load(str(folder / "qwen3"), four_bit=True, double=double)
        experts = Targets.experts(model).values()
        sizes.append(
            sum(parameter.nbytes for module in experts for parameter in module.parameters())
        )
    weights = 2 * 4 * 3 * 64 * 64
    groups = 2 * 4 * (2 + 2) * 4  # a mean, and a number for each 256 of 128 and of 64 scales
    assert sizes == [weights // 2 + weights // 64 * 4, weights // 2 + weights // 64 + groups]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.random)])
def test_ranks_train_adapters_like_one_process(folder, expected, world):
    cases = [("qwen3", False, False), ("qwen3", True, True), ("gpt_oss", True, False)]
    results = on_ranks(world, on_rank, str(folder), cases)
    for number, (name, four_bit, _) in enumerate(cases):
        loss, adapters = expected[f"{name}-rounded" if four_bit else name]
        assert sum(each[number][0] for each in results) / world == pytest.approx(loss, abs=1e-6)
        for each in results:
            close(each[number][1], adapters)


def test_the_trainer_trains_and_saves_adapters_on_two_ranks_like_one(folder, tmp_path):
    """With accumulation, clipping, and PEFT's own format on the disk, which PEFT merges in one
    process."""
    peft = pytest.importorskip("peft")
    wanted = trainer_losses(str(folder / "qwen3-rounded"), str(tmp_path / "one"), False, 1)
    for found in on_ranks(2, trainer_losses, str(folder / "qwen3"), str(tmp_path / "two"), True, 2):
        assert found == pytest.approx(wanted, abs=1e-5)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Adam divides by small gradients
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=2e-4)
    base = load(str(folder / "qwen3-rounded"), four_bit=False, experts="eager")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "two").eval()
    ids = batch(2)
    before = adapted(input_ids=ids).logits
    merged = adapted.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, before, rtol=1e-4, atol=1e-5)
    four_bit = peft.PeftModel.from_pretrained(
        load(str(folder / "qwen3"), four_bit=True), tmp_path / "two"
    ).eval()
    torch.testing.assert_close(four_bit(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)


def test_merging_experts_on_ranks_equals_merging_in_one_process(folder):
    """PEFT itself cannot merge adapters of attention into weights that FSDP2 shards."""
    alone = with_adapters(
        load(str(folder / "gpt_oss"), four_bit=False, experts="eager"), attention=False
    ).eval()
    wanted = alone(input_ids=batch(2)).logits
    for found in on_ranks(2, merged_logits, str(folder / "gpt_oss")):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_nf4_refuses_to_merge_and_says_what_to_do(folder):
    model = with_adapters(load(str(folder / "qwen3"), four_bit=True))
    model(input_ids=batch(1))
    with pytest.raises(
        InputError, match="experts in NF4 would round the adapters away: save the adapters"
    ):
        model.merge_and_unload()


def test_disabled_adapters_leave_the_experts_as_they_were(folder):
    base = load(str(folder / "qwen3"), four_bit=True).eval()
    plain = base(input_ids=batch(2)).logits
    model = with_adapters(base)
    moesaic.transformers.adopt_adapters(model)
    assert not torch.allclose(model(input_ids=batch(2)).logits, plain, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(model(input_ids=batch(2)).logits, plain)


def test_supervised_fine_tuning_runs_over_experts_in_nf4(folder, tmp_path):
    cases = (("qwen3", True, "moesaic"), ("qwen3-rounded", False, "eager"))
    models = (
        with_adapters(load(str(folder / name), four_bit=nf4, experts=how))
        for name, nf4, how in cases
    )
    found = supervised(models, str(tmp_path))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
