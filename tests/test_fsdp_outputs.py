"""FSDP2 propagates through whatever a model returns, also with the lookup of torch 2.10 and 2.11,
or refuses the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from moesaic import Mesh, MoE, parallel
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.parallel import parallelize_model
from worlds import on_ranks

VOCAB = 11


@dataclass(frozen=True)
class Output:
    """What many models return."""

    logits: Tensor


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda y: {"logits": y},
    "dataclass": Output,
    "object": lambda y: SimpleNamespace(logits=y),
    "object, all in blocks": lambda y: SimpleNamespace(logits=y),
}
"""Name to the form in which a model returns its result."""


class Owned(nn.Module):
    """A model with an outermost parameter, or with none."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.scale = None if returns == "object, all in blocks" else nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Sequential(MoE(4, 6, 4, 2), nn.Tanh())])

    def forward(self, x: Tensor) -> Any:
        y = self.blocks[0](x)
        return RETURNS[self.returns](y if self.scale is None else y * self.scale)


def gpt() -> GPT:
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=4, top_k=2, hidden=16)
    return GPT(ModelConfig(dim=16, num_layers=2, num_heads=2, seq_len=12, moe=moe), VOCAB).double()


def owned(returns: str) -> Owned:
    torch.manual_seed(0)
    return Owned(returns).double()


def loss_of_gpt(model: nn.Module, part: int, parts: int) -> Tensor:
    tokens = torch.arange(4 * 13).view(4, 13).square() % VOCAB
    tokens = tokens[part * 4 // parts : (part + 1) * 4 // parts]
    return model(tokens[:, :-1], tokens[:, 1:]).loss


def loss_of_owned(model: nn.Module, part: int, parts: int) -> Tensor:
    x = torch.linspace(-1, 1, 6 * 4, dtype=torch.float64).view(6, 4).sin()
    output = model(x[part * 6 // parts : (part + 1) * 6 // parts])
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return logits.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int], Tensor]]] = {
    "gpt": (gpt, loss_of_gpt),
    **{name: (lambda name=name: owned(name), loss_of_owned) for name in RETURNS},  # type: ignore[misc]
}


def gradients(
    name: str, mesh: dict[str, int] | None, part: int = 0, parts: int = 1
) -> dict[str, Tensor] | str:
    """Return the gradients by parameter, whole; or the refusal."""
    make, loss = MODELS[name]
    model = make()
    if mesh is not None:
        parallelize_model(model, Mesh.create(**mesh), fsdp=True)
    try:
        loss(model, part, parts).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    grads = {
        key: parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        key: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for key, grad in grads.items()
    }


def all_gradients(
    *, looks_into_dataclasses: bool
) -> dict[tuple[str, int], dict[str, Tensor] | str]:
    with pytest.MonkeyPatch.context() as patch:
        if not looks_into_dataclasses:
            patch.setattr(parallel, "SEES_DATACLASSES", False)
            state = torch.distributed.fsdp._fully_shard._fsdp_state
            if hasattr(state, "collect_grad_tensors"):  # what torch 2.10 and 2.11 have in its place
                patch.setattr(
                    state,
                    "collect_grad_tensors",
                    lambda output: [
                        t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad
                    ],
                )
        rank = dist.get_rank()
        world = dist.get_world_size()
        return {
            (name, ep): gradients(name, {"ep": ep}, rank, world)
            for name in MODELS
            for ep in ((1, 2) if name == "gpt" else (2,))
        }


@pytest.mark.parametrize("looks_into_dataclasses", [False, parallel.SEES_DATACLASSES])
def test_gradients_are_those_of_one_process_or_the_output_is_refused(
    looks_into_dataclasses: bool,
) -> None:
    def refused(name: str) -> bool:
        return name == "object" or (name == "dataclass" and not looks_into_dataclasses)

    expected = {name: gradients(name, None) for name in MODELS}
    found = on_ranks(2, partial(all_gradients, looks_into_dataclasses=looks_into_dataclasses))
    for of_rank in found:
        for (name, ep), its in of_rank.items():
            if refused(name):
                kind = {"dataclass": "Output", "object": "SimpleNamespace"}[name]
                assert str(its).startswith(
                    f"InputError: Owned returns a {kind}, in which FSDP2 of torch"
                ), its
                continue
            assert isinstance(its, dict), (name, ep, its)
            assert its.keys() == expected[name].keys()
            for key, gradient in its.items():
                torch.testing.assert_close(
                    gradient, expected[name][key], msg=f"{name}, ep {ep}: {key}"
                )
