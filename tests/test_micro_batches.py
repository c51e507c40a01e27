"""Micro-batches of a step under every sharding and wrapper: gradients, norm and clipping are those
of one process, and gradients cross the wire once a step."""

from __future__ import annotations

import math
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moesaic import Mesh, ModuleExperts, MoE, average_gradients, clip_grad_norm_, set_loss_scale
from moesaic.parallel import (
    micro_batches,
    parallelize_model,
    parameter_groups,
    prepare_ddp,
    shard_over_data,
)
from worlds import on_ranks

DIM = 4
MICRO = 3
TOKENS = 5


@dataclass(frozen=True)
class Case:
    """A mesh, a wrapper, and what is held between micro-batches."""

    way: str
    ep: int
    shard: str = "all"
    per_node: int = 2
    hold: str = "parameters"
    kind: str = "swiglu"

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of the mesh."""
        return {"ep": self.ep, "ranks_per_node": self.per_node, "shard": self.shard}


HELD = ("parameters", "gradients", "nothing")
CASES = {
    2: [
        *(Case("fsdp", 1, "all", hold=hold) for hold in HELD),
        Case("fsdp", 1, "node", per_node=1),  # replicas 2, shards 1
        Case("fsdp", 1, "node", per_node=2),  # replicas 1, shards 2
        Case("fsdp", 2, "all"),
        Case("fsdp", 2, "node", per_node=1, hold="nothing"),
        Case("fsdp", 1, "node", per_node=1, kind="modules"),
        Case("ddp", 1),
        Case("ddp", 2),
        Case("hand", 1),
    ],
    4: [
        *(Case("fsdp", 2, "all", hold=hold) for hold in HELD),
        *(Case("fsdp", 1, "node", hold=hold) for hold in HELD),  # replicas 2, shards 2
        *(Case("fsdp", 2, "node", hold=hold) for hold in HELD),
        Case("fsdp", 2, "node", kind="modules"),
        Case("fsdp", 2, "all", kind="modules"),
        Case("fsdp", 1, "node", kind="modules"),
        Case("fsdp", 2, "none"),
        Case("fsdp", 4, "node", per_node=2),
        Case("ddp", 2),
        Case("ddp", 4),
        Case("ddp", 2, kind="modules"),
        Case("hand", 2),
    ],
    8: [Case("fsdp", 2, "node", per_node=4, hold=hold) for hold in HELD],
}
"""Of each number of ranks. With eight, experts have two replicas of two shards."""


def own_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM))


class Block(nn.Module):
    """A dense part and an MoE layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        experts = (
            kind
            if kind == "swiglu"
            else lambda dim, hidden, count: ModuleExperts(own_expert, dim, count)
        )
        self.dense = nn.Linear(DIM, DIM)
        self.ffn = MoE(DIM, 8, 8, 2, experts=experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.dense(x).tanh())


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(kind), Block(kind), nn.Linear(DIM, 4)).double()


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def wrapped(case: Case) -> tuple[nn.Sequential, nn.Module, Mesh]:
    """Return the model of a case, what runs it, and its mesh."""
    mesh = Mesh.create(**case.sizes)
    model = make_model(case.kind)
    parallelize_model(model, mesh)
    if case.way == "fsdp":
        shard_over_data(model, mesh, [model[0], model[1]])
    if case.way == "ddp":
        prepare_ddp(model, mesh)
        return model, DistributedDataParallel(model), mesh
    return model, model, mesh


def step(case: Case, run: nn.Module, mesh: Mesh, first: int) -> None:
    """Run the micro-batches of a step on this rank's part of batches `first` onwards."""
    for micro in micro_batches(run, MICRO, hold=case.hold):  # type: ignore[arg-type]
        x = batch((first + micro) * mesh.grid.dp + mesh.rank)
        (run(x).sin().mean() / MICRO).backward()


def spread(case: Case) -> dict[str, Any]:
    """Return gradients, norms and clipped norms on this rank of a step; the gradients of a step
    after one that was skipped; and those of a further step that adds to them."""
    model, run, mesh = wrapped(case)
    step(case, run, mesh, 0)
    if case.way == "hand":
        average_gradients(model, mesh)
    found: dict[str, Any] = {"first": gradients(model)}
    found["norms"] = [float(clip_grad_norm_(model, math.inf, p)) for p in (2.0, math.inf)]
    found["clipped"] = [
        float(clip_grad_norm_(model, found["norms"][0] / 2)),
        float(clip_grad_norm_(model, math.inf)),
    ]
    model.zero_grad()
    step(case, run, mesh, MICRO)
    if case.way == "hand":
        average_gradients(model, mesh)
    found["next"] = gradients(model)
    if case.way != "hand":  # which would average twice
        set_loss_scale(model, 1 / MICRO)
        step(case, run, mesh, 0)
        found["added"] = gradients(model)
    return found


def expected(case: Case, dp: int) -> list[dict[str, Tensor]]:
    """Return the gradients of the same steps in one process, each by itself."""
    model = make_model(case.kind)
    steps = []
    for first in (0, MICRO, 0):
        model.zero_grad()
        for micro in range(first, first + MICRO):
            x = torch.cat([batch(micro * dp + rank) for rank in range(dp)])
            (model(x).sin().mean() / MICRO).backward()
        steps.append(gradients(model))
    return steps


def all_cases() -> list[dict[str, Any]]:
    return [spread(case) for case in CASES[dist.get_world_size()]]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], case: Case) -> None:
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-12, atol=1e-12), f"{case}: {name}"


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(each, marks=pytest.mark.random) for each in (4, 8))]
)
def test_a_step_of_micro_batches_is_that_of_one_process(world: int) -> None:
    of_ranks = on_ranks(world, all_cases)
    for number, case in enumerate(CASES[world]):
        first, later, again = expected(case, world)
        norm = float(nn.utils.get_total_norm(list(first.values())))
        largest = max(float(gradient.abs().max()) for gradient in first.values())
        for ranks in of_ranks:
            found = ranks[number]
            assert_same(found["first"], first, case)
            assert found["norms"] == pytest.approx([norm, largest], rel=1e-12), case
            assert found["clipped"] == pytest.approx([norm, norm / 2], rel=1e-5), case
            assert_same(found["next"], later, case)
            if "added" in found:
                added = {name: later[name] + again[name] for name in first}
                assert_same(found["added"], added, case)
        names = {name for ranks in of_ranks for name in ranks[number]["first"]}
        assert names == set(first), case


WIDE = 64
"""Width of a model whose parameters outweigh all other messages."""
BYTES_SENT = struct.Struct("<200xQQ")
"""Where Linux's `tcp_info` has the number of bytes that a socket sent, repeats included, and the
number of those that were repeats, which a busy machine sends."""


def sent_bytes() -> int:
    """Return the bytes that this process has sent over TCP, by the kernel's count."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            number = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=number) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                found = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(found) >= BYTES_SENT.size:
                    sent, repeated = BYTES_SENT.unpack_from(found)
                    total += sent - repeated
    return total


class Wide(nn.Module):
    """Two blocks of a dense layer and an MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(WIDE, 8 * WIDE, bias=False) for _ in range(2))
        self.ffn = nn.ModuleList(MoE(WIDE, 2 * WIDE, 8, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for dense, ffn in zip(self.dense, self.ffn):
            x = x + ffn(dense(x)[:, :WIDE])
        return x


def formula(case: Case, world: int) -> float:
    """Return the bytes of parameters and gradients that a rank sends in a step.

    An all-gather among n ranks sends (n - 1) / n of the whole from each; Gloo's reduce-scatter and
    its all-reduce send 2 (n - 1) / n.
    """
    model = Wide()
    experts = sum(p.numel() for layer in model.ffn for p in layer.experts.parameters())
    dense = sum(p.numel() for p in model.parameters()) - experts
    total = 0.0
    for numbers, ranks, stride in (
        (dense, world, 1),
        (experts / case.ep, world // case.ep, case.ep),
    ):
        shards = {"all": ranks, "node": max(case.per_node // stride, 1), "none": 1}[case.shard]
        if case.way != "fsdp":
            shards = 1
        replicas = ranks // shards
        gathers = {"parameters": 1, "gradients": 2 * MICRO, "nothing": 2 * MICRO}[case.hold]
        reductions = MICRO if case.hold == "nothing" else 1
        in_node = (shards - 1) / shards * (gathers + 2 * reductions)
        between = 2 * (replicas - 1) / replicas / shards
        total += 4 * numbers * (in_node + between)
    return total


def bytes_of_a_step(case: Case) -> int:
    mesh = Mesh.create(**case.sizes)
    torch.manual_seed(0)
    model = Wide()
    parallelize_model(model, mesh)
    run: nn.Module = model
    if case.way == "fsdp":
        shard_over_data(model, mesh, [model.dense[1]])
    if case.way == "ddp":
        prepare_ddp(model, mesh)
        run = DistributedDataParallel(model)
    for number in range(2):  # the first step opens connections
        dist.barrier()
        before = sent_bytes()
        for _ in micro_batches(run, MICRO, hold=case.hold):  # type: ignore[arg-type]
            run(torch.randn(1, WIDE)).sum().backward()
        if case.way == "hand":
            average_gradients(model, mesh)
        sent = sent_bytes() - before
        model.zero_grad(set_to_none=number == 0)
    return sent


WIRED = (
    *(Case("fsdp", 1, "all", hold=hold) for hold in HELD),
    *(Case("fsdp", 1, "node", hold=hold) for hold in HELD),
    *(Case("fsdp", 2, shard) for shard in ("all", "node", "none")),
    *(Case(way, ep) for way in ("ddp", "hand") for ep in (1, 2)),
)


def all_bytes() -> list[int]:
    return [bytes_of_a_step(case) for case in WIRED]


@pytest.mark.random
def test_the_bytes_on_the_wire_are_those_of_the_formula() -> None:
    of_ranks = on_ranks(4, all_bytes)
    for number, case in enumerate(WIRED):
        wanted = formula(case, 4)
        for ranks in of_ranks:
            assert ranks[number] == pytest.approx(wanted, rel=0.05), case


SCALED = {
    2: (
        Case("fsdp", 1, "node", per_node=2),  # replicas 1, shards 2
        Case("fsdp", 2, "node", per_node=2),  # experts: 1 and 1
    ),
    4: (
        Case("fsdp", 1, "node", per_node=2),  # replicas 2, shards 2
        Case("fsdp", 2, "node", per_node=2),  # experts: replicas 2, shards 1
        Case("fsdp", 2, "node", per_node=4),  # experts: replicas 1, shards 2
    ),
}
"""Replicas and shards under float16's scaler, by the number of ranks. Where no parameter outside
the experts is sharded, torch's scaler refuses them beside the experts, which are DTensors."""
STEPS = 3
OVERFLOWS = 1
"""The step in which a gradient overflows."""


def scaled_training(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Train under a gradient scaler; return its scales after the steps, and the parameters. In one
    step the gradient of one shard of an expert overflows, on each of its replicas."""
    model, run, mesh = wrapped(case)
    optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for number in range(STEPS):
        set_loss_scale(model, scaler.get_scale() / MICRO)
        for micro in micro_batches(run, MICRO):
            x = batch((number * MICRO + micro) * mesh.grid.dp + mesh.rank)
            scaler.scale(run(x).sin().mean() / MICRO).backward()
        in_node = mesh.rank % case.per_node
        if number == OVERFLOWS and in_node == case.per_node - 1:
            local = model[1].ffn.experts.w2.grad
            (local.to_local() if isinstance(local, DTensor) else local)[-1] = math.inf
        scaler.unscale_(optimizer)
        clip_grad_norm_(model, math.inf)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name: whole(p.detach()) for name, p in model.named_parameters()}


def all_scaled() -> list[tuple[list[float], dict[str, Tensor]]]:
    return [scaled_training(case) for case in SCALED[dist.get_world_size()]]


@pytest.mark.random
@pytest.mark.parametrize("world", SCALED)
def test_all_ranks_skip_a_step_whose_scaled_gradients_overflow_on_some(world: int) -> None:
    of_ranks = on_ranks(world, all_scaled)
    model = make_model("swiglu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for micro in range(number * MICRO, (number + 1) * MICRO):
            x = torch.cat([batch(micro * world + rank) for rank in range(world)])
            set_loss_scale(model, 1 / MICRO)
            (model(x).sin().mean() / MICRO).backward()
        if number != OVERFLOWS:
            optimizer.step()
        optimizer.zero_grad()
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for number, case in enumerate(SCALED[world]):
        for ranks in of_ranks:
            scales, found = ranks[number]
            assert scales == [4.0, 2.0, 2.0], case
            assert_same(found, wanted, case)


def rounded_sums() -> list[dict[str, Tensor]]:
    """Return the gradients of a step whose sums between nodes are sent in bfloat16, for experts
    that are whole in a node and experts that are sharded there; and of one without."""
    found = []
    for ep, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (2, None)):
        case = Case("fsdp", ep, "node", per_node=2)
        mesh = Mesh.create(**case.sizes)
        model = make_model(case.kind)
        parallelize_model(model, mesh)
        shard_over_data(model, mesh, [model[0], model[1]], replica_dtype=dtype)
        step(case, model, mesh, 0)
        found.append(gradients(model))
    return found


@pytest.mark.random
def test_sums_between_nodes_are_rounded_and_those_inside_are_not() -> None:
    """A gradient is that of two nodes, each rounded once: with one node's whole sum beside it, what
    lies between is at most what bfloat16 rounds."""
    of_ranks = on_ranks(4, rounded_sums)
    exact = expected(Case("fsdp", 2), 4)[0]
    one, spread_, plain = of_ranks[0]
    assert_same(plain, exact, Case("fsdp", 2))
    for found in (one, spread_):
        for name, gradient in found.items():
            largest = float(exact[name].abs().max())
            assert gradient.dtype == torch.float64
            assert not torch.allclose(gradient, exact[name], rtol=1e-6, atol=0), name
            assert (gradient - exact[name]).abs().max() < 0.02 * largest, name
            # a sum of two rounded numbers, rounded, times a power of two
            assert torch.equal(gradient, gradient.bfloat16().double()), name
    for found in of_ranks:
        for mine, theirs in zip(found, of_ranks[0]):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def own_switches() -> list[list[Any]]:
    """Return what was set on a model's FSDP2 units before, in, and after a step of each kind."""
    mesh = Mesh.create()
    found = []
    for hold in HELD:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        shard_over_data(model, mesh, [model[0]])
        model[0].set_reshard_after_forward(False)
        model[0].set_reshard_after_backward(False)
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()

        def told(model: Any = model) -> list[Any]:
            groups = [each._get_fsdp_state()._fsdp_param_group for each in (model[0], model)]
            return [
                (group.post_forward_mesh_info is None, group.reshard_after_backward)
                for group in groups
            ]

        own = [told()]
        for _ in micro_batches(model, 2, hold=hold):  # type: ignore[arg-type]
            own.append(told())
            model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        found.append([*own, told()])
    return found


def test_what_was_set_on_units_holds_again_after_a_step() -> None:
    own = [(True, False), (False, True)]
    held = [(True, False), (True, False)]
    ends = [(True, False), (True, True)]
    for found in on_ranks(2, own_switches):
        assert found == [[own, held, ends, own], [own] * 4, [own] * 4]


def left_early() -> tuple[Tensor, Tensor]:
    """Return a gradient of a whole step after one that was left, and of the same step alone."""
    mesh = Mesh.create()
    found = []
    for leaves in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        shard_over_data(model, mesh, [model[0]])
        x = torch.ones(3, 4, dtype=torch.float64)
        for _ in micro_batches(model, 2) if leaves else ():
            model(5 * x).square().sum().backward()
            break
        model.zero_grad()
        for _ in micro_batches(model, 2):
            model(x).square().sum().backward()
        found.append(model[0].weight.grad.full_tensor())
    return found[0], found[1]


def test_a_step_that_is_left_early_leaves_no_gradient_behind() -> None:
    for after, alone in on_ranks(2, left_early):
        torch.testing.assert_close(after, alone)
