"""Frozen experts, in NF4 and not, with adapters and without, against a plain computation in
float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import refused
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.experts import Clamp, FourBitExperts, GatedExperts, PlainExperts
from moesaic.experts.four_bit import NAMES
from moesaic.kernels import nf4
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.data_parallel import average_gradients

DIM = 64
HIDDEN = 128
EXPERTS = 4
RANK = 3
BASES: dict[str, Any] = {
    "swiglu": GatedExperts,
    "clamped": lambda *sizes: GatedExperts(*sizes, clamp=Clamp(1.0, 1.7, 1.0), bias=True),
    "gelu": lambda *sizes: PlainExperts(*sizes, bias=True),
}


def four_bit(base: str, *sizes: int, rank: int = RANK) -> FourBitExperts:
    experts = FourBitExperts.of(BASES[base](*sizes), rank=rank)
    for name in (NAMES["up_outer"], NAMES["down_outer"]) if rank else ():
        torch.nn.init.normal_(experts.get_parameter(name), std=0.3)
    return experts


def layer(base: str, rank: int = RANK) -> MoE:
    torch.manual_seed(0)
    return MoE(
        DIM, HIDDEN, EXPERTS, 2, experts=lambda *sizes: four_bit(base, *sizes, rank=rank), losses=()
    )


def numbers(experts: FourBitExperts, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the tensors of whole experts by field, dequantized, as leaves."""
    found = {
        field: experts.get_parameter(name).detach()
        for field, name in NAMES.items()
        if hasattr(experts, name)
    }
    for field in ("up", "down"):
        found[field] = nf4.dequantize(found[field], found.pop(f"{field}_scales"), dtype)
    return {field: tensor.double().requires_grad_() for field, tensor in found.items()}


def expected(experts: FourBitExperts, found: dict[str, Tensor], x: Tensor, expert: int) -> Tensor:
    """Return the result of one expert for rows, (R, DIM), from whole adapted matrices."""

    def matrix(name: str) -> Tensor:
        whole = found[name][expert].flatten(0, -2)
        if f"{name}_inner" not in found:
            return whole
        return (
            whole + found[f"{name}_outer"][expert].flatten(0, -2) @ found[f"{name}_inner"][expert]
        )

    pre = x @ matrix("up").t() + (found["up_bias"][expert].flatten() if "up_bias" in found else 0)
    if not experts.gated:
        hidden = F.gelu(pre)
    else:
        gate, up = pre.chunk(2, 1)
        clamp = experts.clamp
        if clamp is not None:
            gate = gate.clamp(max=clamp.limit)
            up = up.clamp(-clamp.limit, clamp.limit) + clamp.offset
        hidden = gate * torch.sigmoid((1.0 if clamp is None else clamp.alpha) * gate) * up
    return hidden @ matrix("down").t() + (found["down_bias"][expert] if "down_bias" in found else 0)


def of_layer(moe: MoE, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return output, input gradient and gradients of the adapters, densely and in float64."""
    router = copy.deepcopy(moe.router).double()
    found = numbers(moe.experts)
    x = x.detach().double().requires_grad_()
    scores = (x @ router.weight.t()).softmax(1)
    top, chosen = scores.topk(moe.top_k, 1)
    top = top / top.sum(1, keepdim=True)
    results = torch.stack(
        [expected(moe.experts, found, x, each) for each in range(moe.num_experts)], 1
    )
    y = (results.gather(1, chosen.unsqueeze(2).expand(-1, -1, DIM)) * top.unsqueeze(2)).sum(1)
    y.backward(dy.double())
    trained = {
        NAMES[field]: tensor.grad
        for field, tensor in found.items()
        if "inner" in field or "outer" in field
    }
    return {"y": y.detach(), "x": x.grad, "router": router.weight.grad, **trained}


def found_of(moe: MoE, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = moe(x)
    y.backward(dy)
    trained = {name: p.grad for name, p in moe.experts.named_parameters() if p.requires_grad}
    assert not any(p.grad is not None for p in moe.experts.parameters() if not p.requires_grad)
    return {"y": y.detach(), "x": x.grad, "router": moe.router.weight.grad, **trained}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((found[name].double() - tensor).abs().max()) / max(
            float(tensor.abs().max()), 1e-12
        )
        assert error <= bound, (name, error)


@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("base", BASES)
def test_a_layer_equals_the_plain_computation(base, rank):
    moe = layer(base, rank)
    x, dy = torch.randn(2, 30, DIM)
    close(found_of(moe, x, dy), of_layer(moe, x, dy), 2e-5)
    moe = moe.double()
    moe.zero_grad()
    close(found_of(moe, x.double(), dy.double()), of_layer(moe, x, dy), 1e-12)


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"ep": 4}, {}),
    ({"ep": 2, "etp": 2}, {"chunks": 2}),
    ({"ep": 2, "etp": 2}, {"gather_weights": 1, "chunks": 2}),
    ({"ep": 2, "etp": 2}, {"gather_weights": 1, "schedule": "s2"}),
    ({"ep": 4, "ranks_per_node": 2}, {"all_to_all": "multicast", "chunks": 2}),
    ({"ep": 4}, {"replication": "shadow"}),
    ({"ep": 2, "etp": 2}, {"replication": "eplb"}),
]


@pytest.mark.parametrize(("base", "rank"), [("swiglu", 0), ("clamped", RANK)])
@pytest.mark.parametrize(("axes", "plan"), MESHES, ids=str)
def test_every_plan_equals_one_rank(axes, plan, base, rank, monkeypatch):
    """Weights of frozen experts travel as bytes, gradients of adapters alone."""
    widths = set()
    unpack = FourBitExperts.unpack
    monkeypatch.setattr(
        FourBitExperts, "unpack", lambda *given: (widths.add(given[1].shape[1]), unpack(*given))[1]
    )
    whole = layer(base, rank)
    grid = Grid(world=4, **axes)
    with torch.no_grad():
        # an expert with more rows than others, which is worth replicating
        whole.router.weight[0] += 1.0
    x, dy = torch.randn(2, 4 * 8, DIM)
    wanted = of_layer(whole, x, dy)

    def on_rank(transport):
        mesh = Mesh(grid, transport)
        moe = copy.deepcopy(whole)
        moe.parallelize(mesh, Plan(**plan))
        part = slice(8 * transport.rank, 8 * transport.rank + 8)
        own = {**found_of(moe, x[part], 4 * dy[part])}
        average_gradients(moe, mesh)
        trained = {name: p.grad for name, p in moe.experts.named_parameters() if p.requires_grad}
        return {**own, "x": own["x"] / 4, "router": moe.router.weight.grad, **trained}

    results = run_ranks(4, on_rank)
    for name in ("y", "x"):
        wanted_parts = wanted[name].split(8)
        close(
            {str(n): each[name] for n, each in enumerate(results)},
            dict(zip("0123", wanted_parts)),
            2e-5,
        )
    for place, each in enumerate(results):
        parts = {"router": wanted["router"]}
        for name in wanted.keys() - {"y", "x", "router"}:
            dim = whole.experts.shard_dim(name)
            first = grid.coordinate(place, "ep") * EXPERTS // grid.ep
            part = wanted[name][first : first + EXPERTS // grid.ep]
            parts[name] = (
                part if dim is None else part.chunk(grid.etp, dim)[grid.coordinate(place, "etp")]
            )
        close({name: each[name] for name in parts}, parts, 2e-5)
    assert len(widths) == (2 if plan.keys() & {"gather_weights", "replication"} else 0), (
        "weights, and their gradients"
    )


def test_backward_saves_no_matrix():
    moe = layer("swiglu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: (saved.append(kept), kept)[1], lambda kept: kept
    ):
        moe(torch.randn(8, DIM))
    largest = max(each.nbytes for each in saved)
    assert largest == EXPERTS * 2 * HIDDEN * DIM // 2, "the codes of up"
    assert all(
        each.dtype == torch.uint8 for each in saved if each.numel() >= EXPERTS * DIM * HIDDEN // 2
    )


@pytest.mark.parametrize("base", BASES)
def test_a_state_dict_restores_the_experts_after_moves_to_other_dtypes(base):
    torch.manual_seed(0)
    experts = four_bit(base, DIM, HIDDEN, EXPERTS)
    stored = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    parts = 2 if experts.gated else 1
    assert stored["gate_up_proj"].shape == (EXPERTS, parts * HIDDEN * DIM // 2)
    assert stored["down_absmax"].shape == (EXPERTS, DIM * HIDDEN // 64)
    again = FourBitExperts(
        DIM,
        HIDDEN,
        EXPERTS,
        gated=experts.gated,
        activation=experts.activation,
        bias=experts.bias,
        rank=RANK,
    )
    again.load_state_dict(stored)
    again = again.bfloat16()
    assert again.gate_up_absmax.dtype == torch.float32
    assert again.gate_up_lora_A.dtype == torch.bfloat16
    for name in ("gate_up_proj", "gate_up_absmax", "down_proj", "down_absmax"):
        assert torch.equal(again.state_dict()[name], stored[name])


def test_widths_that_blocks_do_not_divide_are_refused():
    assert "dim=48 and hidden=64 must be multiples of 64" in refused(FourBitExperts, 48, 64, 2)
