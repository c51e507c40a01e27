"""torchtitan with the override of examples/recipes/with_torchtitan.py, against torchtitan as it is
(`make test-peers`).

torchtitan's experts round to bfloat16. For these comparisons they keep the dtype, and a loop stands
for the grouped product.
"""

from __future__ import annotations

import itertools
import sys
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import refused

pytest.importorskip("torchtitan", reason='pip install "torchtitan==0.3.0"')

sys.path.append(str(Path(__file__).parents[2] / "examples" / "recipes"))

from torchtitan.config import ConfigManager, OverrideConfig, apply_overrides
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    HybridEPTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from moesaic.planner.emit import SYSTEMS, TORCH_SCHEDULES
from moesaic.planner.other_systems import OthersLayout
from moesaic.planner.presets import read_job

DIM = 16
HIDDEN = 24
EXPERTS = 8
OVERRIDE = "with_torchtitan.moesaic_experts"
MODELS = {
    "qwen3": "qwen3_configs",
    "qwen3_5": "qwen3_5_configs",
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
    "kimi_k2_7": "kimi_k2_5_configs",
}
"""torchtitan's models with experts, and the names of their configurations."""


def linear(out: int, inner: int = DIM, *, bias: bool = False) -> Linear.Config:
    return Linear.Config(in_features=inner, out_features=out, bias=bias)


def layer(
    *,
    shared: str = "",
    gpt_oss: bool = False,
    bias: bool = False,
    coeff: float | None = 1e-3,
    **router: Any,
) -> MoE.Config:
    """Return the configuration of a layer of torchtitan; the keywords are options of its router."""
    kind = GptOssGroupedExperts if gpt_oss else GroupedExperts
    top_k = router.setdefault("top_k", 2)
    routed = RoutedExperts.Config(
        inner_experts=kind.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=top_k),
    )
    parts = {"w1": linear(40), "w2": linear(DIM, 40), "w3": linear(40)}
    of_shared = {
        "": None,
        "plain": FeedForward.Config(**parts),
        "gated": SigmoidGatedFeedForward.Config(**parts, gate=linear(1)),
    }
    gate = TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS, gate=linear(EXPERTS, bias=bias), **router
    )
    return MoE.Config(
        num_experts=EXPERTS,
        routed_experts=routed,
        router=gate,
        shared_experts=of_shared[shared],
        load_balance_coeff=coeff,
    )


def overridden(config: Any) -> Any:
    """Return a copy of a configuration under the override."""
    copied = deepcopy(config)
    apply_overrides(OverrideConfig(imports=[OVERRIDE]), copied)
    return copied


def grouped(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    starts = [0, *offs.tolist()]
    return torch.cat(
        [
            A[first:last] @ B_t[expert]
            for expert, (first, last) in enumerate(itertools.pairwise(starts))
        ]
    )


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped)


def results(moe: nn.Module) -> dict[str, Tensor]:
    x = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = moe(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return {"y": y, "x": x.grad, "counts": moe.tokens_per_expert_E, **gradients}


LAYERS = [
    {},
    {"score_func": "softmax"},
    {"route_norm": True},
    {"score_func": "softmax", "route_norm": True, "route_scale": 2.5},
    {"top_k": 1},
    {"top_k": 8, "route_scale": 0.5},
    {"num_expert_groups": 4, "num_limited_groups": 2},
    {"bias": True},
    {"coeff": None},
    {"shared": "plain"},
    {"shared": "gated", "score_func": "softmax"},
    {"gpt_oss": True, "bias": True},
    {"_debug_force_load_balance": True},
]


@pytest.mark.parametrize(
    "options", LAYERS, ids=lambda options: "-".join(map(str, options)) or "default"
)
def test_a_layer_computes_what_torchtitans_does(options: dict[str, Any], in_float32: None) -> None:
    config = layer(**options)
    torch.manual_seed(0)
    theirs = config.build()
    ours = overridden(config).build()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
        if theirs.expert_bias_E is not None:
            theirs.expert_bias_E.normal_(std=0.2)
    ours.load_state_dict(theirs.state_dict())
    assert type(ours.routed_experts).__name__ == "MoesaicExperts"
    expected = results(theirs)
    found = results(ours)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert all(
        torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items()
    )


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "token_dispatcher",
            (
                "token_dispatcher=HybridEPTokenDispatcher.Config: Moesaic knows "
                "LocalTokenDispatcher.Config and"
            ),
        ),
        (
            "inner_experts",
            (
                "inner_experts=Quantised.Config: Moesaic knows GroupedExperts.Config and "
                "GptOssGroupedExperts.Config"
            ),
        ),
    ],
)
def test_what_moesaic_cannot_run_is_refused_by_name(field: str, words: str) -> None:
    class Quantised(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            """Another kind of experts."""

    Quantised.Config.__qualname__ = "Quantised.Config"
    config = layer()
    if field == "inner_experts":
        config.routed_experts.inner_experts = Quantised.Config(
            dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS
        )
    else:
        config.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(
            num_experts=EXPERTS, top_k=2
        )
    assert words in refused(overridden, config)


def configurations() -> list[Any]:
    """Return torchtitan's models with experts: family and flavour."""
    found = []
    for family, name in MODELS.items():
        try:
            flavours = getattr(import_module(f"torchtitan.models.{family}"), name)
        except ModuleNotFoundError as error:
            found.append(
                pytest.param(None, id=family, marks=pytest.mark.skip(reason=f"{family}: {error}"))
            )
            continue
        for flavour, make in flavours.items():
            if "moe_comm_backend" in make.__code__.co_varnames:
                found.append(pytest.param(make, id=f"{family}-{flavour}"))
    return found


@pytest.mark.parametrize("make", configurations())
def test_every_model_of_torchtitan_keeps_its_parameters_and_is_initialised(make: Any) -> None:
    config = make(attn_backend="flex", moe_comm_backend="standard")
    ours = overridden(config)
    with torch.device("meta"):
        theirs = config.build()
        model = ours.build()
    model.verify_module_protocol()
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    routed = [module for module in model.modules() if type(module).__name__ == "MoesaicExperts"]
    assert len(routed) == sum(type(module) is RoutedExperts for module in theirs.modules()) > 0
    if sum(parameter.numel() for parameter in model.parameters()) > 2e8:
        return  # too large for memory; the smallest flavour of each family goes on
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(123.0)
        model.init_weights(buffer_device=None)
    assert [name for name, parameter in model.named_parameters() if (parameter == 123).any()] == []


@pytest.mark.parametrize(
    "layout",
    [
        *(
            OthersLayout(pp=2, ep=8, schedule=name, global_batch=64)
            for name in sorted({schedule for schedule, _ in TORCH_SCHEDULES.values()})
        ),
        OthersLayout(tp=2, ep=4, cp=2, replicas=2),
        *(OthersLayout(ep=2, recompute=parts) for parts in ((), ("block",), ("layernorm", "moe"))),
    ],
    ids=str,
)
def test_torchtitans_parser_accepts_what_is_printed(layout: OthersLayout) -> None:
    lines = SYSTEMS["torchtitan"].flags("torchtitan", read_job("mixtral-8x7b"), layout)
    words = [word for line in lines for word in line.split(" ")]
    config = ConfigManager().parse_args(
        ["--module", "qwen3", "--config", "qwen3_moe_debug", *words]
    )
    assert config.parallelism.expert_parallel_degree == layout.ep
    assert config.parallelism.tensor_parallel_degree == layout.tp
    assert config.parallelism.pipeline_parallel_degree == layout.pp
    assert (config.activation_checkpoint is None) == (layout.recompute == ())
