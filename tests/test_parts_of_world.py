"""Layers on a part of the world: `DeviceMesh`es, sub-meshes and process groups. Each layer equals
its dense reference."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moesaic import LoadBalance, Mesh, MoE, Plan, average_gradients, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups, prepare_ddp
from worlds import on_ranks, refusal

DIM = 4
HIDDEN = 8
EXPERTS = 8
TOKENS = 6
WORLDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...], Plan]] = {
    "stages over strided ranks": ((2, 2), ("ep", "pp"), ("ep",), Plan(all_to_all="multicast")),
    "stages of tp 2": ((2, 2), ("pp", "tp"), ("tp",), Plan(schedule="s2", chunks=2)),
    "context parallelism": ((2, 2), ("cp", "ep"), ("cp", "ep"), Plan()),
    "ep and tp": ((2, 2), ("ep", "tp"), ("ep", "tp"), Plan(schedule="s3")),
    "one dimension without a name": ((4,), (), (), Plan()),
}
"""Shape and dimension names of the world, the names of the layer's dimensions, and a plan."""


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        MoE(DIM, HIDDEN, EXPERTS, 2, shared_hidden=4, losses=LoadBalance(0.1)) for _ in range(2)
    ]
    return nn.Sequential(layers[0], nn.Linear(DIM, DIM), layers[1]).double()


def tokens_of(part: int, group: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * part + group)
    return torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Run a step that leaves gradients on the parameters; return output and the input's
    gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.sin().mean().backward()
    assert x.grad is not None
    return {"output": y.detach(), "input gradient": x.grad}


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_of(p.grad) for name, p in model.named_parameters()}


def world_of(name: str) -> tuple[DeviceMesh, tuple[str, ...]]:
    shape, names, part, _ = WORLDS[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None), part


def on_part(name: str) -> dict[str, Any]:
    """Train one step on the part of the world to which this rank belongs."""
    world, part = world_of(name)
    ranks = world[part] if part else world
    mesh = Mesh.from_device_mesh(ranks)
    assert Mesh.from_device_mesh(world[part] if part else world) is mesh, "layers share connections"
    number = min(dist.get_process_group_ranks(mesh.process_group))
    model = make_model(number)
    for layer in (model[0], model[2]):
        layer.parallelize(world[part] if part else world, WORLDS[name][3])
    group = mesh.grid.coordinate(mesh.rank, "dp")
    found = step(model, tokens_of(number, group))
    average_gradients(model, mesh)
    norm = float(clip_grad_norm_(model, math.inf, mesh=mesh))
    return {**found, **whole(model), "norm": norm, "number": number, "place": (group, mesh.grid.dp)}


def expected(number: int, dp: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    model = make_model(number)
    found = step(model, torch.cat([tokens_of(number, group) for group in range(dp)]))
    gradients = whole(model)
    return found, gradients, float(nn.utils.get_total_norm(list(gradients.values())))


def everything() -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, str]]:
    return {name: on_part(name) for name in WORLDS}, some_alone(), lines()


@pytest.fixture(scope="module")
def of_ranks() -> list[tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, str]]]:
    return on_ranks(4, everything)


@pytest.mark.parametrize("name", WORLDS)
def test_layers_on_a_part_of_the_world_equal_their_dense_reference(of_ranks, name):
    parts = [of_parts for of_parts, *_ in of_ranks]
    for of_rank in parts:
        found = of_rank[name]
        group, dp = found["place"]
        run, gradients, norm = expected(found["number"], dp)
        mine = slice(group * TOKENS, (group + 1) * TOKENS)
        torch.testing.assert_close(found["output"], run["output"][mine], rtol=1e-9, atol=1e-12)
        scaled = run["input gradient"][mine] * dp  # the mean is over this group's tokens
        torch.testing.assert_close(found["input gradient"], scaled, rtol=1e-9, atol=1e-12)
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                found[key], gradient, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}"
            )
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
    shape, names, part, _ = WORLDS[name]
    together = math.prod(size for size, each in zip(shape, names) if each in part) if part else 4
    assert len({of_rank[name]["number"] for of_rank in parts}) == 4 // together


def some_alone() -> dict[str, Any]:
    """Two of four ranks have a layer; the other ranks need not take part in any call."""
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return {"elsewhere": float(torch.ones(3).sum())}
    x = tokens_of(0, rank // 2)
    direct = make_model(0)[0]
    direct.parallelize(group, Plan(chunks=2))
    found = {"direct": step(direct, x)["output"]}
    model = make_model(0)
    mesh = parallelize_model(model, Mesh.create(ep=2, group=group), fsdp=True)
    found |= step(model, x)
    found["norm"] = float(clip_grad_norm_(model, math.inf, mesh=mesh))
    found |= whole(model)
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.AdamW(parameter_groups(model), lr=0.1, foreach=True).step()
    found["moved"] = all(
        not torch.equal(whole_of(p), whole_of(q)) for p, q in zip(model.parameters(), before)
    )
    again = make_model(0)
    mesh = parallelize_model(again, mesh)
    prepare_ddp(again, mesh)
    ddp = DistributedDataParallel(again, process_group=mesh.dense["dp"].get_group())
    step(ddp, x)
    found["ddp"] = whole(again)
    return found


def test_ranks_that_have_no_layer_take_no_part(of_ranks):
    found = [alone for _, alone, _ in of_ranks]
    assert found[0] == found[2] == {"elsewhere": 3.0}
    run, gradients, norm = expected(0, 2)
    alone = step(make_model(0)[0], torch.cat([tokens_of(0, 0), tokens_of(0, 1)]))["output"]
    for place, of_rank in enumerate((found[1], found[3])):
        mine = slice(place * TOKENS, (place + 1) * TOKENS)
        torch.testing.assert_close(of_rank["direct"], alone[mine], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(of_rank["output"], run["output"][mine], rtol=1e-9, atol=1e-12)
        assert of_rank["norm"] == pytest.approx(norm, rel=1e-12)
        assert of_rank["moved"], "one step over lists of tensors, of which some are DTensors"
        for key, gradient in gradients.items():
            torch.testing.assert_close(of_rank[key], gradient, rtol=1e-9, atol=1e-12, msg=key)
            torch.testing.assert_close(
                of_rank["ddp"][key], gradient, rtol=1e-9, atol=1e-12, msg=f"ddp {key}"
            )


def lines() -> dict[str, str]:
    """Return the ranks' errors for meshes that do not fit, and whether a layer on a DeviceMesh can
    be pickled."""
    four = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    layer = make_model(0)[0]
    elsewhere = dist.new_group([0, 1])
    said = {
        "names": refusal(layer.parallelize, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))),
        "order": refusal(layer.parallelize, four),
        "both": refusal(
            layer.parallelize, init_device_mesh("cpu", (2, 2), mesh_dim_names=("etp", "tp"))
        ),
        "ranks": refusal(
            layer.parallelize, DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("ep",))
        ),
        "nothing": refusal(layer.parallelize, 4),
        "no layer": refusal(parallelize_model, nn.Linear(2, 2), four["ep"]),
    }
    if dist.get_rank() > 1:
        said["elsewhere"] = refusal(lambda: Mesh.create(ep=2, group=elsewhere))
    Mesh.from_device_mesh(four["ep"])
    pickle.dumps(four)
    copy.deepcopy(four)
    return said


def test_meshes_that_do_not_fit_are_refused_in_one_line(of_ranks):
    found = [said for *_, said in of_ranks]
    for said in found:
        assert all(line.startswith("InputError: ") and "\n" not in line for line in said.values())
        assert "has the dimensions ('dp',), and none of them spreads experts" in said["names"]
        assert "put ep and etp last" in said["order"]
        assert "leave etp out" in said["both"]
        assert "[3, 2, 1, 0]: take a DeviceMesh whose ranks ascend" in said["ranks"]
        assert "not int: write Mesh.create(ep=...)" in said["nothing"]
        assert "Linear has no MoE layer" in said["no layer"]
    assert found[3]["elsewhere"].endswith(
        "is not in the process group of the mesh: call on its ranks alone"
    )
