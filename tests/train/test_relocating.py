"""Moving samples in a model that FSDP shards, on four Gloo processes, leaves the loss and gradients unchanged."""

from __future__ import annotations

import datetime
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.distributed.tensor import DTensor

from moesaic.balance.run.relocate import Relocator
from moesaic.balance.samples import Given, Homes, TwoStage
from moesaic.comm.mesh import Mesh
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.models.moving import MovingGPT
from moesaic.program.plan import Plan
from moesaic.testing.runner import leave
from moesaic.train.parallel import parallelize
from worlds import start

MESHES = {
    "ep 4": {"ep": 4},
    "two copies of the experts": {"ep": 2},
    "shards": {"ep": 2, "etp": 2},
    "tensor groups": {"tp": 2, "ep": 4},
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, float]]]:
    """Run every mesh on one start of the processes; per rank and mesh, what differs."""
    with tempfile.TemporaryDirectory() as folder:
        start(4, _process, folder)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_that_fsdp_splits_computes_the_same(found: list[dict[str, dict[str, float]]], mesh: str) -> None:
    for rank in found:
        assert rank[mesh]["gradients"] < 1e-10
        assert rank[mesh]["losses"] < 1e-10
        assert rank[mesh]["parameters"] > 20
    assert all(rank[mesh]["moved"] > 0 for rank in found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_no_block_returns_a_view(found: list[dict[str, dict[str, float]]], mesh: str) -> None:
    """FSDP warns of one: what changes it in place loses the hook that gathers the block's parameters again."""
    assert [rank[mesh]["views"] for rank in found] == [0, 0, 0, 0]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=datetime.timedelta(seconds=300))
    torch.save({name: _compare(rank, sizes) for name, sizes in MESHES.items()}, Path(folder) / f"{rank}.pt")
    leave()


def _compare(rank: int, sizes: dict[str, int]) -> dict[str, float]:
    """Train two steps with samples that move and two without; return what differs."""
    mesh = Mesh.create(**sizes, ranks_per_node=2)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    given = [_within(mesh, random) for _ in range(2)]
    results, views = [], 0
    for placer in (None, Given(given), TwoStage(least_gain=0.0)):
        torch.manual_seed(0)
        moe = MoEConfig(num_experts=4, top_k=2, hidden=8, z_loss=0.01)
        shape = ModelConfig(dim=8, num_layers=3, num_heads=2, seq_len=6, moe=moe, checkpoint_activations=True)
        model = MovingGPT(shape, 11)
        model.double()
        parallelize(model, mesh, Plan(chunks=2))
        relocator = None if placer is None else Relocator(mesh, placer)
        model.relocator = relocator
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            results.append(_train(mesh.grid.coordinate(rank, "dp"), mesh.grid.dp, model))
        views += sum("(FSDPMovingBlock) returned a view" in str(warning.message) for warning in seen)
    (plain, losses), *moved = results
    difference = max(
        float((each[name] - plain[name]).abs().max()) for each, _ in moved for name in plain if plain[name].numel()
    )
    of_losses = max(abs(a - b) for _, other in moved for a, b in zip(losses, other))
    return {
        "gradients": difference,
        "losses": of_losses,
        "parameters": len(plain),
        "views": views,
        "moved": Homes.start(4, 2).moved(given[0]),
    }


def _within(mesh: Mesh, random: np.random.Generator) -> Homes:
    rank = np.repeat(np.arange(4), 2)
    for replica in {mesh.grid.group(each, ("ep", "etp")) for each in range(4)}:
        members = np.flatnonzero(np.isin(rank, replica))
        rank[members] = random.permutation(rank[members])
    return Homes.of_ranks(rank, 4)


def _train(group: int, groups: int, model: GPT) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return this rank's part of every gradient after the second of two steps, and the losses."""
    mine = slice(8 // groups * group, 8 // groups * (group + 1))
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (8, 6), generator=generator)[mine]
        targets = torch.randint(0, 11, (8, 6), generator=generator)[mine]
        output = model(tokens, targets)
        assert output.loss is not None
        output.loss.backward()
        losses.append(float(output.loss.detach()))
        gradients = {name: _local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return gradients, losses


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local.detach().clone()
