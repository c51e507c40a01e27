"""Draws a case's layer and every group's tokens, masks and cotangents. They are the same in every
process.

A group is the ranks that share their tokens (a data-parallel group). A cotangent is the gradient of
the loss with respect to an output: the loss of a test is sum(y * dy).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from moesaic.experts import ModuleExperts, PlainExperts
from moesaic.layer import MoE
from moesaic.testing.cases import DIM, Case, small_router

M = TypeVar("M", bound=nn.Module)

HIDDEN = 4
SHARED_HIDDEN = 3


@dataclass(frozen=True)
class GroupBatch:
    """One group's tokens in one micro-batch."""

    x: Tensor
    """(sequences, length, dim)."""
    dy: Tensor
    """Shape of x: the cotangent of the output, before it is multiplied by the micro-batch's
    share."""
    mask: Tensor | None
    """(sequences, length) bool."""
    ids: Tensor
    """(sequences, length) int64: the tokens' ids, by which hash routers route."""
    seed: int
    """Seed of the noise that the group's first rank draws."""


@dataclass(frozen=True)
class CaseData:
    """A case's layer and tokens."""

    layer: MoE
    """The complete layer, on no mesh; copy it before use."""
    batches: list[list[GroupBatch]]
    """By micro-batch, then by group."""
    shares: tuple[float, ...]
    """Each micro-batch's weight in the loss of the step."""

    def fresh_layer(self) -> MoE:
        """Return a copy of the layer, with parameters and buffers of its own."""
        return _cloned(self.layer)


def draw_workload(case: Case) -> CaseData:
    """Draw a case's layer and tokens from its seed."""
    dtype = torch.float64 if case.precision == "float64" else torch.float32
    generator = torch.Generator().manual_seed(case.seed)
    offset = torch.randn(DIM, generator=generator, dtype=torch.float64)  # common to all tokens
    layer = _build_layer(case).to(dtype)

    def batch(micro: int, group: int) -> GroupBatch:
        """Return the batch of a micro-batch and group, drawn from the case's generator."""
        shape = case.sequences, case.lengths[micro][group]
        x, dy = torch.randn(2, *shape, DIM, generator=generator, dtype=torch.float64)
        # about 0.7 of the tokens count, the others are padding
        mask = torch.rand(shape, generator=generator) < 0.7 if case.padding else None
        ids = torch.randint(0, 50, shape, generator=generator)
        return GroupBatch(
            (x + case.skew * offset).to(dtype),
            dy=dy.to(dtype),
            mask=mask,
            ids=ids,
            seed=case.seed + 100 * micro + group,  # another for each micro-batch and group
        )

    batches = []
    for micro in range(len(case.lengths)):
        batches.append([batch(micro, group) for group in range(case.grid.dp)])
    shares = (1.0,) if len(batches) == 1 else (0.25, 0.75)  # a case has one or two
    return CaseData(layer, batches, shares)


def _cloned(module: M) -> M:
    """Return a deep copy of `module`; faster than `copy.deepcopy`, which took a tenth of a case's
    time."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        # of hooks: those that are registered on the copy must not affect the original
        if isinstance(value, dict):
            setattr(twin, name, copy.copy(value))
        elif isinstance(value, Tensor):
            setattr(twin, name, value.clone())
    # torch keeps what a module has in these tables; an entry is None if it has none
    for name, parameter in module._parameters.items():
        if parameter is not None:
            twin._parameters[name] = nn.Parameter(parameter.detach().clone())
    for name, buffer in module._buffers.items():
        if buffer is not None:
            twin._buffers[name] = buffer.clone()
    for name, part in module._modules.items():
        if part is not None:
            twin._modules[name] = _cloned(part)
    return twin


def _build_layer(case: Case) -> MoE:
    """Build the layer, with selection biases away from zero and router scores far apart."""

    def modules(dim: int, hidden: int, count: int) -> ModuleExperts:
        """Return experts that are modules of torch."""
        return ModuleExperts(
            lambda: nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim)),
            dim,
            count,
        )

    experts = {
        "swiglu": "swiglu",
        "gelu": partial(PlainExperts, activation="gelu", bias=True),
        "modules": modules,
    }[case.experts]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        layer = MoE(
            DIM,
            hidden=HIDDEN,
            num_experts=case.num_experts,
            top_k=case.top_k,
            router=small_router(case.router, case.num_experts, case.top_k),
            experts=experts,  # type: ignore[arg-type]
            capacity=case.capacity,
            losses=case.losses,
            shared_hidden=SHARED_HIDDEN if case.shared else 0,
            apply_weight=case.apply_weight,
        )
        with torch.no_grad():
            for parameter in layer.router.parameters():
                if parameter.dim() > 1:  # matrices, whose values set the scores apart
                    parameter.normal_()
            for name, buffer in layer.router.named_buffers():
                if name.endswith("bias"):  # selection biases
                    buffer.uniform_(-0.2, 0.2)
    return layer
