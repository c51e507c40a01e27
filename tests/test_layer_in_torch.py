"""The layer inside torch's tools, over two processes: FSDP2, DDP, `torch.compile`, copies,
averaging, checkpointing."""

from __future__ import annotations

import copy
import datetime
import io
import pickle
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moesaic import LoadBalance, Mesh, MoE, Plan, ZLoss, checkpoint, collect_losses, set_loss_scale
from moesaic.errors import InputError
from moesaic.testing.runner import leave
from worlds import start

DIM = 8


def layer_of(dtype: torch.dtype = torch.float64, **options: object) -> MoE:
    torch.manual_seed(1)
    options = {"losses": (ZLoss(0.1), LoadBalance(0.2)), **options}
    return MoE(DIM, 16, 4, 2, dtype=dtype, **options)


def tokens(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        6, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_once(layer: MoE) -> Tensor:
    """Return the router's gradient from the auxiliary losses of one call, at loss scale 1."""
    layer = copy.deepcopy(layer)
    layer.zero_grad()
    set_loss_scale(layer, 1.0)
    (layer(tokens()) * 0).sum().backward()
    assert layer.router.weight.grad is not None
    return layer.router.weight.grad


def weights_under(
    wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype = torch.float64, **how: Any
) -> list[float]:
    """Return the weight of the losses in the router's gradient after each of three steps of four
    micro-batches."""
    layer = layer_of()
    own = copy.deepcopy(layer)
    model = wrap(nn.Sequential(nn.Identity(), layer.to(dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if how.get("still") else 1e-6)
    found = []
    for _ in range(3):
        for micro in range(4):
            with how.get("context", lambda model, is_last: nullcontext())(model, micro == 3):
                loss = (model(tokens(dtype=dtype)) * 0).sum()
                if how.get("collects"):
                    loss = (loss + sum(collect_losses(model))) / 4
                loss.backward()
        gradient = gradient_once(own)
        ratio = whole(layer.router.weight.grad).double() / gradient
        found.append(float(ratio.median()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def sharded(model: nn.Module, **options: object) -> nn.Module:
    for block in model:
        if list(block.parameters()):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def last_only(model: Any, is_last: bool) -> nullcontext:
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


def wrappers() -> dict[str, Any]:
    ddp = nn.parallel.DistributedDataParallel
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    low = {"dtype": torch.float32}
    return {
        "ddp": weights_under(ddp),
        "ddp no_sync": weights_under(
            ddp, context=lambda m, last: nullcontext() if last else m.no_sync()
        ),
        "ddp collects": weights_under(ddp, collects=True),
        "fsdp": weights_under(sharded),
        "fsdp no_sync": weights_under(sharded, context=last_only),
        "fsdp mixed no_sync": weights_under(
            partial(sharded, mp_policy=mixed), context=last_only, **low
        ),
        "fsdp collects": weights_under(sharded, collects=True),
    }


def step(call: Callable[[Tensor], Tensor], layer: nn.Module, seed: int = 0) -> list[Tensor]:
    """Return the result and the gradients of a call, at loss scale 1."""
    layer.zero_grad()
    x = tokens(seed + dist.get_rank()).requires_grad_()
    y = call(x)
    y.sin().sum().backward()
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in layer.parameters()
    ]
    return [y.detach(), x.grad, *local]


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    assert len(some) == len(others)
    return max(float((one - other).detach().abs().max()) for one, other in zip(some, others))


def parallel(transport: str = "gloo", **options: object) -> MoE:
    layer = layer_of(**options)
    mesh = Mesh.create(ep=2, transport=transport)
    layer.parallelize(mesh, Plan(schedule="s1"))
    return layer


def compiled() -> dict[str, Any]:
    layer = parallel(shared_hidden=4)
    block = nn.Sequential(nn.Tanh(), layer, nn.Tanh())
    eager = step(block, layer)
    call = torch.compile(block, backend="aot_eager")
    found = {"difference": largest_difference(step(call, layer), eager)}
    found["again"] = largest_difference(step(call, layer, 2), step(block, layer, 2))
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        torch.compile(layer, backend="aot_eager", fullgraph=True)(tokens())
        found["fullgraph"] = ""
    except Exception as error:  # dynamo's own kind
        found["fullgraph"] = str(error)
    return found


def copies(transport: str = "gloo") -> dict[str, Any]:
    layer = parallel(transport)
    expected = step(layer, layer)
    other = copy.deepcopy(layer)
    found: dict[str, Any] = {"deepcopy": largest_difference(step(other, other), expected)}
    found["shares connections"] = other.on_mesh.transport is layer.on_mesh.transport
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    found["is its own"] = largest_difference(step(layer, layer), expected)
    found["counts"] = (int(layer.step_counts.sum()), int(other.step_counts.sum()))
    average = AveragedModel(layer, avg_fn=get_ema_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(layer)
    with torch.no_grad():
        found["average"] = float((average(tokens()) - layer(tokens())).abs().max())
        other.use_plan(Plan(schedule="s1", chunks=2))
        found["chunks"] = (other.on_mesh.compiled.plan.chunks, layer.on_mesh.compiled.plan.chunks)
    for name, write in (
        ("pickle", pickle.dumps),
        ("torch.save", lambda layer: torch.save(layer, io.BytesIO())),
    ):
        try:
            write(layer)
            found[name] = "it was written"
        except InputError as error:
            found[name] = str(error)
    return found


def selective(policy: CheckpointPolicy = CheckpointPolicy.MUST_SAVE) -> Any:
    chosen = (torch.ops.aten.mm.default, torch.ops.moesaic.expert_forward.default)

    def decide(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        return policy if op in chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def recomputed() -> dict[str, dict[str, Callable[[nn.Module, Tensor], Tensor]]]:
    return {
        "plain": lambda block, x: block(x),
        "non-reentrant": lambda block, x: torch_checkpoint(block, x, use_reentrant=False),
        "reentrant": lambda block, x: torch_checkpoint(block, x, use_reentrant=True),
        "selective": lambda block, x: torch_checkpoint(
            block, x, use_reentrant=False, context_fn=selective
        ),
        "wrapper": lambda block, x: checkpoint_wrapper(block)(x),
        "reentrant wrapper": lambda block, x: checkpoint_wrapper(
            block, checkpoint_impl=CheckpointImpl.REENTRANT
        )(x),
        "nested": lambda block, x: torch_checkpoint(
            lambda x: torch_checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
        ),
        "in ours": lambda block, x: torch_checkpoint(
            lambda x: checkpoint(block, x), x, use_reentrant=False
        ),
        "ours": checkpoint,
    }


def counted(make: Callable[..., MoE], router: str) -> dict[str, tuple[int, float]]:
    """For each kind of checkpoint, return the copies counted, and the error of its gradients
    against no checkpoint."""
    found = {}
    expected = None
    losses = (LoadBalance(0.3, level="global_batch"), ZLoss(0.1))
    for name, call in recomputed().items():
        layer = make(router=router, losses=losses)
        set_loss_scale(layer, 1.0)
        block = nn.Sequential(nn.Tanh(), layer, nn.Dropout(0.5))
        torch.manual_seed(3)
        # earlier counts, for the global batch
        (call(block, tokens(7).requires_grad_()).sum() * 0).backward()
        layer.zero_grad()
        x = tokens(dist.get_rank() if dist.is_initialized() else 0).requires_grad_()
        call(block, x).sin().sum().backward()
        total = int(layer.step_counts.sum())
        own = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in layer.parameters()
        ]
        expected = expected or [x.grad, *own]
        found[name] = (total, largest_difference([x.grad, *own], expected))
    return found


CASES: dict[str, Callable[[], Any]] = {
    "wrappers": wrappers,
    "compiled": compiled,
    "copies": copies,
    "counted": lambda: {router: counted(parallel, router) for router in ("softmax", "noisy")},
}


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120)
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except Exception:  # the test that reads it fails with this text
            found[name] = traceback.format_exc()
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    start(2, _process, 2, str(folder))
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def test_losses_weigh_one_under_ddp_and_fsdp2(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        weights = of_rank["wrappers"]
        assert isinstance(weights, dict), weights
        for name, steps in weights.items():
            assert steps == pytest.approx([1.0] * 3, rel=3e-2 if "mixed" in name else 1e-4), name


def test_a_layer_on_a_mesh_compiles_and_equals_eager(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        results = of_rank["compiled"]
        assert isinstance(results, dict), results
        assert results["difference"] < 1e-12
        assert results["again"] < 1e-12
        assert results["graphs"] <= 4, "what surrounds the layer is compiled, the layer is not"
        assert "a MoE layer on a mesh runs programs over connections" in results["fullgraph"]


def test_a_layer_on_a_mesh_can_be_copied_and_averaged(found: list[dict[str, Any]]) -> None:
    check_copies([of_rank["copies"] for of_rank in found])


def check_copies(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        assert isinstance(results, dict), results
        assert results["deepcopy"] == results["is its own"] == 0.0
        assert results["shares connections"]
        assert results["counts"] == (48, 48)
        assert results["average"] < 1e-12
        assert results["chunks"] == (2, 1)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_no_file_holds_connections(how: str, found: list[dict[str, Any]]) -> None:
    check_refusals(how, [of_rank["copies"] for of_rank in found])


def check_refusals(how: str, of_ranks: list[dict[str, Any]]) -> None:
    message = (
        "a layer on a mesh holds connections to other ranks, which no file or other process can "
        "take over: save its state_dict(), or copy it with copy.deepcopy"
    )
    assert [results[how] for results in of_ranks] == [message] * 2


@pytest.mark.parametrize("router", ["softmax", "noisy"])
def test_recomputation_counts_nothing_and_routes_alike_on_a_mesh(
    router: str, found: list[dict[str, Any]]
) -> None:
    for of_rank in found:
        assert isinstance(of_rank["counted"], dict), of_rank["counted"]
        for name, (total, difference) in of_rank["counted"][router].items():
            assert total == 2 * 2 * 6 * 2, name
            assert difference < 1e-12, name


@pytest.mark.parametrize("router", ["softmax", "noisy", "sigmoid"])
def test_recomputation_counts_nothing_and_routes_alike_in_one_process(router: str) -> None:
    for name, (total, difference) in counted(layer_of, router).items():
        assert total == 2 * 6 * 2, name
        assert difference < 1e-12, name


def test_a_compiled_layer_in_a_checkpoint_counts_once() -> None:
    torch._dynamo.reset()  # a test that compiles under global hooks leaves frames that dynamo skips
    layer = layer_of()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch_checkpoint(call, tokens().requires_grad_(), use_reentrant=False).sum().backward()
    assert int(layer.step_counts.sum()) == 6 * 2
