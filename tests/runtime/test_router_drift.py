"""Ranks whose routers differ stop at the next call, with one line that names the parameter and the
ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from moesaic import Capacity, Mesh, MoE, Plan, average_gradients, balance_on_step
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.parallel import parameter_groups
from moesaic.program.grid import Grid
from moesaic.routing.peers import hash_of
from moesaic.runtime import expert_parallel
from stand_in import DEVICE, StandIn, pretending, to_device
from worlds import on_ranks

SAYS = re.compile(
    r"InputError: router\.weight differs: float32 \(8, 16\) [0-9a-f]{16} on rank 0, float32 \(8, "
    r"16\) [0-9a-f]{16} on rank 1: "
    r"call moesaic\.average_gradients\(model, mesh\) after every backward pass "
    r"[^\n]*broadcast=True\)"
)


def _three_steps(averages: bool) -> str:
    """Train as a loop does that takes each rank's own batch; return what the first call that fails
    says, with its step."""
    torch.manual_seed(0)
    mesh = Mesh.create(ep=2)
    moe = MoE(dim=16, hidden=16, num_experts=8, top_k=2)
    moe.parallelize(mesh, "auto")
    optimizer = torch.optim.AdamW(parameter_groups(moe), lr=1e-3)
    balance_on_step(optimizer, moe)
    torch.manual_seed(mesh.rank)
    for step in range(3):
        try:
            moe(torch.randn(2, 8, 16)).square().mean().backward()
        except InputError as error:
            return f"{step} InputError: {error}"
        if averages:
            average_gradients(moe, mesh)
        optimizer.step()
        optimizer.zero_grad()
    return ""


def _of_both() -> tuple[str, str]:
    return _three_steps(True), _three_steps(False)


def test_a_loop_without_average_gradients_stops_at_the_second_call() -> None:
    ranks = on_ranks(2, _of_both)
    assert [trained for trained, _ in ranks] == ["", ""]
    (line,) = {stopped for _, stopped in ranks}
    assert line.startswith("1 ")
    assert SAYS.fullmatch(line[2:])


PLANS = [Plan(schedule="s2"), Plan(chunks=2, all_to_all="multicast")]


def refused(
    grid: Grid, change: Callable[[MoE, int], None], plan: Plan = PLANS[0], **options: object
) -> list[str]:
    """Call a layer on all ranks of a mesh, change it on each, call it again and return what that
    says, by rank."""
    said = [""] * grid.world

    def rank(transport: AbstractTransport) -> None:
        torch.manual_seed(0)
        layer = MoE(16, 8, 8, 2, **options)  # type: ignore[arg-type]
        layer.parallelize(Mesh(grid, transport), plan)
        x = torch.randn(6, 16)
        layer(x)
        with torch.no_grad():
            change(layer, transport.rank)
        try:
            layer(x)
        except InputError as error:
            said[transport.rank] = str(error)

    run_ranks(grid.world, rank)
    return said


def by_one_bit(layer: MoE, rank: int) -> None:
    """Change the last bit of the last weight on rank 2."""
    if rank == 2:
        layer.router.weight[-1, -1:].view(torch.int32).bitwise_xor_(1)  # type: ignore[index]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule}-{plan.all_to_all}")
def test_one_bit_is_found_under_every_kind_of_plan(plan: Plan) -> None:
    lines = refused(Grid(world=4, ep=4, ranks_per_node=2), by_one_bit, plan)
    assert len(set(lines)) == 1
    assert re.match(
        r"router\.weight differs: .* on ranks 0-1 and 3, .* on rank 2: call moesaic\.average_grad",
        lines[0],
    )


@pytest.mark.parametrize(
    "capacity", [1.25, Capacity.fixed(1.25, scope="rank", padded=True)], ids=["fixed", "padded"]
)
def test_it_is_found_under_capacities(capacity: object) -> None:
    assert set(map(bool, refused(Grid(world=4, ep=2), by_one_bit, capacity=capacity))) == {True}


@pytest.mark.filterwarnings("ignore:moesaic. experts in torch.float32 on this cuda device")
def test_gpus_that_wait_for_no_counts_compare_in_some_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_parallel, "CHECKED_CALLS", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def rank(transport: AbstractTransport) -> tuple[list[int], str]:
        torch.manual_seed(0)
        layer = MoE(
            16, 8, 8, 2, capacity=Capacity.fixed(1.25, scope="rank", padded=True), losses=()
        )
        layer.parallelize(Mesh(Grid(world=2, ep=2), transport))
        waits = []
        with torch.no_grad(), StandIn() as stand_in:
            transport.device = DEVICE
            to_device(layer)
            x = torch.randn(6, 16, device=DEVICE)
            for call in range(8):
                if call == 6:
                    layer.router.weight.mul_(1 + transport.rank)  # type: ignore[operator]
                stand_in.record.clear()
                try:
                    layer(x)
                except InputError as error:
                    return waits, f"{call} {error}"
                waits.append(sum("_all_on_host" in line for line in stand_in.record.waits))
        return waits, ""

    with pretending():
        found = run_ranks(2, rank)
    for waits, said in found:
        assert said.startswith("6 router.weight differs")
        assert waits == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"router": "noisy"}, "noise_weight"),
        ({"router": "sigmoid", "router_options": {"bias": True}}, "logit_bias"),
        ({"router": "cosine"}, "log_temperature"),
    ],
)
def test_every_parameter_of_a_router_is_compared_and_named(
    options: dict[str, object], name: str
) -> None:
    def change(layer: MoE, rank: int) -> None:
        layer.router.get_parameter(name).flatten()[0].add_(rank)

    assert all(
        f"router.{name} differs" in line for line in refused(Grid(world=2, ep=2), change, **options)
    )


def test_copies_in_a_tensor_parallel_group_may_differ_by_rounding() -> None:
    """Ranks of one group may add in different orders; each is compared with the ranks of the other
    groups alone."""

    def by_group(layer: MoE, rank: int) -> None:
        layer.router.weight[0, 0] += rank % 2  # type: ignore[index,operator]

    for plan in (Plan(), Plan(schedule="s1")):
        assert refused(Grid(world=4, tp=2, ep=2), by_group, plan) == [""] * 4
        assert all(
            "router.weight differs" in line
            for line in refused(Grid(world=4, tp=2, ep=2), by_one_bit, plan)[::2]
        )


DTYPES = [torch.float64, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_hash_tells_values_signs_places_and_parameters_apart(dtype: torch.dtype) -> None:
    start = torch.arange(1, 13).view(3, 4).to(dtype)
    variants = [start, start.flip(0), start.flip(1), start.t().contiguous(), start * 2]
    # opposite signs at two places, as after the first step of a matrix that starts at zero
    if dtype.is_floating_point:
        signs = torch.ones(3, 4, dtype=dtype)
        signs[0, 1] = signs[2, 3] = -1
        variants += [start * signs, start * signs.flip(0), -start]
    hashes = [float(hash_of([variant])) for variant in variants]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < 2**53 for value in hashes)
    assert float(hash_of([start, start * 2])) != float(hash_of([start * 2, start]))
    assert float(hash_of([start.t()])) == float(hash_of([start.t().contiguous()]))


def test_a_router_without_parameters_and_one_that_is_sharded_are_not_compared() -> None:
    assert hash_of([]) is None
    assert refused(Grid(world=2, ep=2), lambda layer, rank: None, router="softmax") == ["", ""]
