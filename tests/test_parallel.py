"""Any model on a mesh, with FSDP2, DDP or neither: gradients and their norm equal those of one
process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers import pairwise
from moesaic import Mesh, ModuleExperts, MoE, Plan, average_gradients, clip_grad_norm_, finish_step
from moesaic.experts import GatedExperts
from moesaic.parallel import (
    clip,
    gradient_norm,
    num_copies,
    parallelize_model,
    prepare_ddp,
    shard_dim,
    shard_over_data,
)
from worlds import on_ranks, refusal

DIM = 4
HIDDEN = 6
EXPERTS = 8
TOKENS = 5
NORMS = (2.0, 3.0, math.inf)


def own_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM))


KINDS: dict[str, Any] = {
    "swiglu": "swiglu",
    "modules": lambda dim, hidden, count: ModuleExperts(own_expert, dim, count),
}


class Block(nn.Module):
    """A dense part and an MoE layer, in a module tree that the library does not know."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.sparse = nn.ModuleDict(
            {"ffn": MoE(DIM, HIDDEN, EXPERTS, 2, experts=KINDS[kind], shared_hidden=6)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sparse["ffn"](self.dense(x).tanh())


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(kind), nn.Sequential(Block(kind)), nn.Linear(DIM, 3)).double()


def batch(part: int) -> Tensor:
    generator = torch.Generator().manual_seed(part)
    return torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """The mesh and wrappers of a model."""

    kind: str
    mesh: str
    way: str
    micro: int = 2


MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {"edp 2": {}, "tp 2": {"tp": 2, "ep": 2}},
    4: {"ep 2, edp 2": {"ep": 2}, "ep 2, etp 2": {"ep": 2, "etp": 2}},
}


def by_hand(model: nn.Sequential, mesh: Mesh) -> nn.Module:
    return model


def by_fsdp(model: nn.Sequential, mesh: Mesh) -> nn.Module:
    shard_over_data(model, mesh, [model[0], model[1][0]])
    return model


def by_ddp(model: nn.Sequential, mesh: Mesh) -> nn.Module:
    prepare_ddp(model, mesh)
    return DistributedDataParallel(model)


WAYS: dict[str, Callable[[nn.Sequential, Mesh], nn.Module]] = {
    "hand": by_hand,
    "fsdp": by_fsdp,
    "ddp": by_ddp,
}


def cases(world: int, is_quick: bool) -> list[Case]:
    """Return the cases of `make test`, which cover every pair of values, or the other cases."""
    sizes = MESHES[world]
    drawn = pairwise(
        KINDS, sizes, WAYS, fits=lambda kind, mesh, _: kind != "modules" or "etp" not in sizes[mesh]
    )
    return [Case(*each.values) for each in drawn if is_quick != bool(each.marks)]


def backward(model: nn.Module, inputs: list[Tensor]) -> None:
    for x in inputs:
        (model(x).sin().mean() / len(inputs)).backward()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(case: Case) -> dict[str, Any]:
    """Return this rank's gradients by name, and the result of clipping."""
    world = dist.get_world_size()
    mesh = Mesh.create(**MESHES[world][case.mesh])
    model = make_model(case.kind)
    for module in model.modules():
        if isinstance(module, MoE):
            module.parallelize(mesh, Plan())
    wrapped = WAYS[case.way](model, mesh)
    group = mesh.grid.coordinate(mesh.rank, "dp")
    backward(wrapped, [batch(micro * mesh.grid.dp + group) for micro in range(case.micro)])
    if case.way == "hand":
        average_gradients(model, mesh)
    found: dict[str, Any] = {"dp": mesh.grid.dp}
    found["gradients"] = {
        name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }
    found["norms"] = [float(clip_grad_norm_(model.parameters(), math.inf, p)) for p in NORMS]
    found["of a copy"] = norm_of_copy(model) if case.way == "hand" else found["norms"][0]
    before = clip_grad_norm_(model, found["norms"][0] / 2)
    found["clipped"] = [float(before), float(clip_grad_norm_(model, math.inf))]
    next(model.parameters()).grad.mul_(math.nan)
    found["not finite"] = refusal(clip_grad_norm_, model, 1.0, error_if_nonfinite=True)
    return found


def norm_of_copy(model: nn.Module) -> float:
    """Return the gradient norm of a model, with copies of its experts in place of the originals."""
    copied = []
    for module in model.modules():
        if isinstance(module, MoE):
            again = copy.deepcopy(module.experts)
            for old, new in zip(module.experts.parameters(), again.parameters()):
                new.grad = old.grad
            copied += list(again.parameters())
    experts = {id(p) for m in model.modules() if isinstance(m, MoE) for p in m.experts.parameters()}
    return float(
        clip_grad_norm_(
            [*copied, *(p for p in model.parameters() if id(p) not in experts)], math.inf
        )
    )


def expected(case: Case, dp: int) -> tuple[dict[str, Tensor], list[float]]:
    model = make_model(case.kind)
    backward(
        model,
        [
            torch.cat([batch(micro * dp + group) for group in range(dp)])
            for micro in range(case.micro)
        ],
    )
    gradients = [p.grad for p in model.parameters()]
    norms = [float(nn.utils.get_total_norm(gradients, p)) for p in NORMS]
    return {name: p.grad for name, p in model.named_parameters()}, norms


def all_cases(is_quick: bool) -> list[dict[str, Any]]:
    return [spread(case) for case in cases(dist.get_world_size(), is_quick)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (world, is_quick), marks=() if is_quick else pytest.mark.random, id=f"{world}, {word}"
        )
        for world in MESHES
        for is_quick, word in ((True, "pairs"), (False, "others"))
    ],
)
def world(request) -> tuple[list[Case], list[list[dict[str, Any]]]]:
    return cases(*request.param), list(
        zip(*on_ranks(request.param[0], all_cases, request.param[1]))
    )


def test_gradients_and_norms_are_those_of_one_process(world):
    for case, of_ranks in zip(*world, strict=True):
        gradients, norms = expected(case, of_ranks[0]["dp"])
        for found in of_ranks:
            assert set(found["gradients"]) <= set(gradients)
            for name, gradient in found["gradients"].items():
                torch.testing.assert_close(
                    gradient, gradients[name], rtol=1e-9, atol=1e-12, msg=f"{case}: {name}"
                )
            assert found["norms"] == pytest.approx(norms, rel=1e-12), case
            assert found["of a copy"] == pytest.approx(norms[0], rel=1e-12), case
            assert found["clipped"] == pytest.approx([norms[0], norms[0] / 2], rel=1e-5), case
            assert (
                found["not finite"]
                == "RuntimeError: the gradient's norm is nan: nothing was clipped"
            )
        assert {name for found in of_ranks for name in found["gradients"]} == set(gradients), case
        assert len({tuple(found["norms"]) for found in of_ranks}) == 1


def without_preparation() -> dict[str, str]:
    found = {}
    for kind in KINDS:
        model = make_model(kind)
        mesh = Mesh.create(ep=2)
        for module in model.modules():
            if isinstance(module, MoE):
                module.parallelize(mesh, Plan())
        found[kind] = refusal(
            lambda model=model: DistributedDataParallel(model)(batch(dist.get_rank()))
        )
    return found


def refusals_of_ddp() -> tuple[dict[str, str], dict[str, str]]:
    return plainly_wrapped(), without_preparation()


@pytest.fixture(scope="module")
def refused() -> list[tuple[dict[str, str], dict[str, str]]]:
    return on_ranks(2, refusals_of_ddp)


def plainly_wrapped() -> dict[str, str]:
    mesh = Mesh.create(ep=2)
    model = make_model("swiglu")
    prepared = make_model("swiglu")
    for each in (model, prepared):
        parallelize_model(each, mesh)
    prepare_ddp(prepared, mesh)
    wrapped = {"model": model, "layer": model[0].sparse["ffn"], "prepared": prepared}
    return {name: refusal(DistributedDataParallel, module) for name, module in wrapped.items()}


def test_ddp_says_at_once_what_to_call_before(refused) -> None:
    said = (
        "InputError: DDP would give all ranks the first one's experts, which are spread over a "
        "mesh: call moesaic.prepare_ddp(model, mesh) before DDP wraps the model"
    )
    for found, _ in refused:
        assert found == {"model": said, "layer": said, "prepared": ""}


def test_ddp_over_experts_that_it_would_overwrite_is_refused(refused):
    for _, found in refused:
        assert found["modules"].startswith(
            "InputError: DDP would give all ranks the first one's experts"
        )
        assert "prepare_ddp(model, mesh)" in found["modules"]
        assert found["swiglu"] != ""  # torch refuses to put DTensors and tensors into one bucket


def test_without_a_mesh_clipping_is_torchs():
    model = make_model("swiglu")
    again = make_model("swiglu")
    for each in (model, again):
        backward(each, [batch(0)])
    norm = clip_grad_norm_(model, 0.1)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(again.parameters(), 0.1))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), again.parameters()))


def test_the_norm_of_one_process_is_torchs():
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        for shape in (3, 5)
    ]
    for scale, parameter in enumerate(parameters, start=1):
        parameter.grad = scale * parameter.detach()
    parameters.append(torch.nn.Parameter(torch.zeros(2)))
    before = [parameter.grad.clone() for parameter in parameters[:2]]
    norm = gradient_norm(parameters)
    assert torch.equal(norm, torch.nn.utils.get_total_norm(before))
    clip(parameters, norm, math.inf)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before))
    clip(parameters, norm, 0.5)
    assert float(gradient_norm(parameters)) == pytest.approx(0.5, rel=1e-4)
    assert num_copies(before[0], 4) == 4


def in_bfloat16(mesh_sizes: dict[str, int], *, told: bool) -> dict[str, Any]:
    """Return this rank's results of two micro-batches under bfloat16 autocast, and the experts'
    dtypes during them."""
    mesh = Mesh.create(**mesh_sizes)
    model = make_model("swiglu").float()
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.parallelize(mesh, Plan())
    shard_over_data(model, mesh, [model[0], model[1][0]], dtype=torch.bfloat16 if told else None)
    seen: set[torch.dtype] = set()
    layers[0].experts.register_forward_pre_hook(lambda experts, _: seen.add(experts.w1.dtype))
    if told:
        finish_step(model, None)
    results = []
    for micro in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch(micro * mesh.grid.dp + mesh.rank).float())
        y.float().sin().mean().backward()
        results.append(y.detach())
    kept = sum(each.cast is not None for layer in layers for each in layer.experts._casts.values())
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    return {"results": results, "gradients": gradients, "kept": kept, "seen": seen}


PRECISION: dict[str, tuple[dict[str, int], int]] = {"edp 2": ({}, 0), "ep 2": ({"ep": 2}, 4)}
"""For each mesh, its sizes and the number of casts that are kept."""


def every_precision() -> dict[str, list[dict[str, Any]]]:
    return {
        name: [in_bfloat16(sizes, told=told) for told in (True, False)]
        for name, (sizes, _) in PRECISION.items()
    }


@pytest.fixture(scope="module")
def in_both_ways() -> list[dict[str, list[dict[str, Any]]]]:
    return on_ranks(2, every_precision)


@pytest.mark.parametrize("name", PRECISION)
def test_mixed_precision_that_casts_less_changes_no_bit(in_both_ways, name):
    """FSDP gathers experts in the products' dtype, and spread experts are cast once a step;
    otherwise every call casts both."""
    sizes, kept = PRECISION[name]
    for mine, its in [of_rank[name] for of_rank in in_both_ways]:
        assert (mine["kept"], its["kept"]) == (kept, 0)
        assert (mine["seen"], its["seen"]) == (
            {torch.float32 if sizes else torch.bfloat16},
            {torch.float32},
        )
        assert all(map(torch.equal, mine["results"], its["results"]))
        assert mine["gradients"].keys() == its["gradients"].keys()
        for name, gradient in mine["gradients"].items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, its["gradients"][name]), name


@pytest.mark.parametrize(
    ("sizes", "dim"), [((1, 2, 3, 5), 0), ((1, 2, 6, 5), 2), ((3, 2, 3, 4), 3), ((2, 2, 6, 4), 0)]
)
def test_gate_and_up_are_split_alike(sizes, dim):
    assert shard_dim(torch.empty(sizes), 2, whole=(1,)) == dim


def odd_experts() -> list[tuple[int, Tensor, Tensor]]:
    """Return the dimensions in which FSDP split gate and up, the parameter gathered from all ranks,
    and the original."""
    mesh = Mesh.create()
    torch.manual_seed(0)
    model = nn.Sequential(MoE(4, 6, 3, 2, shared_hidden=2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].parallelize(mesh, Plan())
    shard_over_data(model, mesh)
    found = []
    for name, experts in (("experts", model[0].experts), ("shared", model[0].shared)):
        assert isinstance(experts, GatedExperts)
        assert isinstance(experts.w13, DTensor)
        found.append(
            (
                experts.w13.placements[0].dim,
                experts.w13.full_tensor().detach(),
                expected[f"0.{name}.w13"],
            )
        )
    return found


def test_fsdp_never_splits_gate_from_up():
    """3 experts and 1 shared expert do not split over 2 ranks, so FSDP splits a width (not etp's);
    gate and up stay whole."""
    for found in on_ranks(2, odd_experts):
        assert [dim for dim, _, _ in found] == [3, 2]
        assert all(torch.equal(whole, expected) for _, whole, expected in found)
