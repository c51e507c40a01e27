"""The experts backend: a tiny model of every transformers family with the experts interface,
against the family's own loop."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

import transformers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import MoEParamShard

import moesaic.transformers
from moesaic.errors import InputError
from moesaic.transformers import experts_backend as experts_module
from moesaic.transformers.experts_backend import Gate, gate_of, refusal
from moesaic_lab.families import Family, build, families, text
from moesaic_lab.hf import family_errors, outcome, tolerance_of
from stand_in import DEVICE, StandIn, pretending, to_device, values

MOST_USED = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
    "glm4_moe",
    "granitemoe",
)
EVERY = [
    pytest.param(f, id=f.name, marks=() if f.name in MOST_USED else pytest.mark.slow)
    for f in families()
]


def compare(model: nn.Module) -> None:
    """Compare the model on the backend with the model's own loop."""
    logits, worst = family_errors(model)
    assert logits <= tolerance_of(model)
    assert worst <= 10 * tolerance_of(model)


@pytest.mark.parametrize("family", EVERY)
def test_logits_and_all_gradients_equal_the_familys_own_loop(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        model = build(family)
    except LookupError as reason:
        pytest.skip(f"no tiny model: {reason}")
    seen: list[Any] = []
    run = moesaic.transformers.experts_backend.run_tokens
    monkeypatch.setattr(
        moesaic.transformers.experts_backend,
        "run_tokens",
        lambda *given: seen.append(given[0]) or run(*given),
    )
    compare(model)
    assert {type(module).__name__ for module in seen} <= set(family.experts)
    assert {described(gate_of(module), module.has_gate) for module in seen} == {
        documented().get(family.name, "a family that the page does not list")
    }


PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def documented() -> dict[str, str]:
    """Return the gate of each family, as listed on the documentation page."""
    rows = re.findall(
        r"^\| ([^|`]+) \| (`[^|]+`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: words for words, names in rows for name in re.findall(r"`(\w+)`", names)}


def described(gate: Gate | None, has_gate: bool) -> str:
    """Return a gate as the documentation page describes it."""
    if gate is None:
        return "its own"
    if gate.clamp is not None:
        return "clamped SwiGLU"
    words = {
        ("silu", True): "SwiGLU",
        ("gelu_tanh", True): "GeGLU, by tanh",
        ("relu2", False): "relu squared",
    }
    return words[gate.activation, has_gate]


def test_the_page_names_every_family() -> None:
    names = {family.name for family in families()}
    of_page = re.findall(r"families of transformers (\d+\.\d+)", PAGE.read_text(encoding="utf-8"))
    ours, of_page = (
        tuple(map(int, version.split(".")[:2])) for version in (transformers.__version__, *of_page)
    )
    if ours <= of_page:  # earlier ones have fewer
        assert names <= set(documented())
    if ours >= of_page:  # later ones have more
        assert set(documented()) <= names
    total = re.findall(r"all (\d+) families of transformers", PAGE.read_text(encoding="utf-8"))
    assert total == [str(len(documented()))]


def test_the_list_of_families_is_the_packages() -> None:
    names = {family.name for family in families()}
    assert len(names) > 50
    assert set(MOST_USED) <= names


def tiny(**fields: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, **fields})).double()


def experts_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("relu2", "relu2"),
    ],
)
def test_activations_are_recognised_by_what_they_compute(hidden_act: str, activation: str) -> None:
    model = tiny(hidden_act=hidden_act)
    assert gate_of(experts_of(model)) == Gate(activation)
    compare(model)


@pytest.mark.parametrize("hidden_act", ["tanh", "sigmoid", "mish"])
def test_a_gate_that_moesaic_does_not_have_runs_between_its_products(hidden_act: str) -> None:
    model = tiny(hidden_act=hidden_act)
    assert gate_of(experts_of(model)) is None
    compare(model)


def test_a_gate_whose_numbers_stand_elsewhere_is_not_taken_for_another() -> None:
    model = tiny()
    experts = experts_of(model)
    experts._apply_gate = lambda pre: (
        torch.nn.functional.silu(pre.chunk(2, -1)[0].clamp(max=5.0)) * pre.chunk(2, -1)[1]
    )
    assert gate_of(experts) is None


def test_experts_that_cannot_be_taken_are_named_and_run_as_before() -> None:
    model = tiny()
    expected, _ = outcome(model, "eager")
    for module in model.modules():
        if type(module).__name__ == "MixtralExperts":
            del module.has_post_expert_norm
    with pytest.warns(
        UserWarning, match="MixtralExperts has no has_post_expert_norm.*transformers' own loop"
    ):
        actual, _ = outcome(model, "moesaic")
    assert torch.equal(actual, expected)


def test_quantized_weights_are_refused() -> None:
    experts = experts_of(tiny())
    assert refusal(experts) is None
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert "float8_e4m3fn" in str(refusal(experts))


def test_a_copy_of_a_model_has_its_own_weights() -> None:
    model = tiny()
    outcome(model, "moesaic")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    compare(other)


def test_routes_to_experts_elsewhere_count_nothing() -> None:
    experts = experts_of(tiny())
    x = torch.randn(5, 16, dtype=torch.float64)
    index = torch.tensor([[0, 1], [4, 2], [3, 4], [4, 4], [1, 0]])
    weight = torch.rand(5, 2, dtype=torch.float64)
    run = moesaic.transformers.experts_forward
    experts._is_expert_parallel = True
    found = run(experts, x, index, weight)
    experts._is_expert_parallel = False
    expected = run(experts, x, index.clamp(max=3), weight.masked_fill(index == 4, 0))
    torch.testing.assert_close(found, expected)
    assert not found[3].any()


@pytest.mark.parametrize("is_known", [True, False])
def test_on_a_gpu_nobody_waits_for_the_number_of_routes_elsewhere(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows hold NaN, and neither results nor gradients do."""
    if not is_known:
        monkeypatch.setattr(experts_module, "gate_of", lambda _: None)
    experts = experts_of(tiny()).bfloat16()
    experts._is_expert_parallel = True
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    index = torch.tensor([[0, 1], [4, 2], [3, 4], [4, 4], [1, 0]])
    weight = torch.rand(5, 2)

    def step(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
        x, index, weight = inputs
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = moesaic.transformers.experts_forward(module, leaves[0], index, leaves[1])
        return [y, *torch.autograd.grad((y * y).sum(), [*leaves, *module.parameters()])]

    expected = step(experts, x, index, weight)
    empty = torch.Tensor.new_empty

    def nan(of: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(of, *sizes, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pretending(), StandIn() as stand_in:
        there = to_device(copy.deepcopy(experts))
        inputs = [each.to(DEVICE) for each in (x, index, weight)]
        stand_in.record.clear()
        monkeypatch.setattr(torch.Tensor, "new_empty", nan)
        found = [values(each) for each in step(there, *inputs)]
    assert stand_in.record.waits == []
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), true.float(), atol=5e-2, rtol=5e-2)


def test_the_gate_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(num_hidden_layers=1)
    asked: list[int] = []
    ask = experts_module._recognised
    monkeypatch.setattr(
        experts_module, "_recognised", lambda module: asked.append(1) or ask(module)
    )
    outcome(model, "moesaic")
    outcome(model, "moesaic")
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_equals_eager_to_its_rounding(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    (y, _) = outcome(model, "moesaic")
    (expected, _) = outcome(model, "eager")
    assert y.dtype == dtype
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def test_a_model_that_was_called_once_compiles_in_one_graph() -> None:
    model = tiny(num_hidden_layers=1).float()
    model.set_experts_implementation("moesaic")
    expected = model(input_ids=text(model), use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=text(model), use_cache=False).logits, expected)


@pytest.mark.parametrize(
    "seam", ["transformers.distributed.expert_parallel", "transformers.integrations.moe"]
)
def test_a_transformers_without_a_seam_is_refused_in_one_line(
    seam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, seam, None)
    with pytest.raises(
        InputError, match=r'needs transformers 5\.23 or later .*, pip install "\.\[transformers\]"$'
    ) as said:
        importlib.reload(moesaic.transformers)
    assert "\n" not in str(said.value)


def test_importing_patches_nothing_of_transformers() -> None:
    own = str(Path(moesaic.__file__).parent)
    loading = (PreTrainedModel.from_pretrained, PreTrainedModel.set_experts_implementation)
    for method in (DistributedConfig._resolve_parallelism, MoEParamShard.shard_param, *loading):
        assert not method.__code__.co_filename.startswith(own), method


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(InputError, match=r"a plan is a moesaic\.Plan, not str"):
        moesaic.transformers.register_plan("of-words", "in two chunks")  # type: ignore[arg-type]
