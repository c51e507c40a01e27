"""The optimizer updates shards as plain tensors, with the bits of an update of DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from moesaic.train.config import OptimizerConfig
from moesaic.train.optimizer import make_optimizer
from worlds import on_ranks

PLACEMENTS = {
    "even": (4, [Shard(0)], [Shard(0)]),
    "uneven": (3, [Shard(0)], [Shard(0)]),
    "on one rank": (1, [Shard(0)], [Shard(0)]),
    "whole": (4, [Replicate()], [Replicate()]),
    "part of a sum": (4, [Replicate()], [Partial()]),
    "sum in shards": (4, [Shard(0)], [Partial()]),
}
"""Rows of a parameter, where it is, and where its gradient is."""


class Model(nn.Module):
    """Parameters with every placement, and one that is no DTensor."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        draw = torch.Generator().manual_seed(0)
        self.plain = nn.Parameter(torch.randn(3, 5, generator=draw))
        for name, (rows, placements, _) in PLACEMENTS.items():
            whole = torch.randn(rows, 5, generator=draw)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, placements)))

    def set_gradients(self, step: int) -> None:
        """Give each parameter a gradient, placed as the table says."""
        draw = torch.Generator().manual_seed(1 + step)
        self.plain.grad = torch.randn(3, 5, generator=draw)
        for name, (rows, _, placements) in PLACEMENTS.items():
            whole = torch.randn(rows, 5, generator=draw)
            parameter = self.get_parameter(name)
            mesh = parameter.device_mesh
            if isinstance(placements[0], Partial):
                parameter.grad = DTensor.from_local(whole, mesh, placements, run_check=False)
            else:
                parameter.grad = distribute_tensor(whole, mesh, placements)


def whole_values(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and states as whole tensors."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"value": parameter.detach(), **optimizer.state[parameter]}.items():
            is_dtensor = isinstance(value, DTensor)
            found[f"{name} {key}"] = value.full_tensor() if is_dtensor else value.clone()
    return found


def trained(of_ours: bool, seen: list[type]) -> dict[str, Tensor]:
    """Return what three steps leave, of our optimizer or of torch's."""
    model = Model()
    ours = make_optimizer(model, OptimizerConfig(), torch.device("cpu"))
    optimizer: torch.optim.Optimizer = ours
    if not of_ours:
        groups = [{**group} for group in ours.param_groups]
        optimizer = torch.optim.AdamW(groups, fused=True)
    plain = torch._fused_adamw_

    def noted(parameters: list[Tensor], *others: Any, **options: Any) -> None:
        seen.extend(type(each) for each in parameters)
        plain(parameters, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", noted)
        for step in range(3):
            model.set_gradients(step)
            optimizer.step()
    return whole_values(optimizer, model)


def both() -> tuple[dict[str, Tensor], dict[str, Tensor], bool, bool]:
    """Return what both optimizers leave, and whether each updated DTensors."""
    ours: list[type] = []
    theirs: list[type] = []
    left = trained(of_ours=True, seen=ours), trained(of_ours=False, seen=theirs)
    return (*left, DTensor in ours, DTensor in theirs)


def test_an_update_of_shards_has_the_bits_of_one_of_dtensors() -> None:
    of_ranks = on_ranks(2, both)
    for found, expected, of_dtensors, torch_does in of_ranks:
        assert not of_dtensors
        assert torch_does
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert float(found["even step"]) == 3
