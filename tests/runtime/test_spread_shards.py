"""Storage: each rank's part of every parameter. It is the same for every plan, and the parts
together are the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers import refused
from moesaic.experts import AbstractExperts, GatedExperts, ModuleExperts, PlainExperts
from moesaic.program.grid import Grid
from moesaic.runtime.sharding import shard_experts

DIM = 4
HIDDEN = 8
EXPERTS = 4
MAKERS = {
    "swiglu": lambda: GatedExperts(DIM, HIDDEN, EXPERTS),
    "swiglu with biases": lambda: GatedExperts(DIM, HIDDEN, EXPERTS, bias=True),
    "gelu with biases": lambda: PlainExperts(DIM, HIDDEN, EXPERTS, bias=True),
}
GRIDS = [
    Grid(world=1),
    Grid(world=4, ep=2, etp=2),
    Grid(world=4, ep=2, etp=2, innermost="ep"),
    Grid(world=8, ep=4, etp=2),
    Grid(world=8, tp=2, ep=1, etp=4),
    Grid(world=8, ep=2),
]


def shards(whole: AbstractExperts, grid: Grid) -> list[AbstractExperts]:
    found = []
    for rank in range(grid.world):
        part = copy.deepcopy(whole)
        shard_experts(part, grid, rank, None)
        found.append(part)
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_parts_laid_together_are_the_whole(kind: str, grid: Grid) -> None:
    whole = MAKERS[kind]()
    parts = shards(whole, grid)
    for name, parameter in whole.named_parameters():
        dim = whole.shard_dim(name)
        for replica in {grid.group(rank, ("ep", "etp")) for rank in range(grid.world)}:
            by_ep = []
            for e in range(grid.ep):
                row = [r for r in replica if grid.coordinate(r, "ep") == e]
                row.sort(key=lambda r: grid.coordinate(r, "etp"))
                held = [parts[r].get_parameter(name) for r in row]
                if dim is None:
                    assert all(torch.equal(part, held[0]) for part in held), (
                        "shards hold it in common"
                    )
                by_ep.append(held[0] if dim is None else torch.cat(held, dim))
            assert torch.equal(torch.cat(by_ep), parameter)


@pytest.mark.parametrize("kind", MAKERS)
def test_parts_are_contiguous_memory_of_their_own(kind: str) -> None:
    whole = MAKERS[kind]()
    whole.w2.requires_grad_(False)
    part = shards(whole, Grid(world=4, ep=2, etp=2))[3]
    assert part.is_spread
    assert not whole.is_spread
    for name, parameter in part.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.requires_grad == (name != "w2")


def test_modules_keep_the_experts_of_their_rank_under_their_own_names() -> None:
    whole = ModuleExperts(lambda: nn.Linear(DIM, DIM), DIM, 6)
    parts = shards(whole, Grid(world=6, ep=3))
    for rank, part in enumerate(parts):
        names = [
            f"experts.{e}.{kind}"
            for e in range(rank % 3 * 2, rank % 3 * 2 + 2)
            for kind in ("weight", "bias")
        ]
        assert [name for name, _ in part.named_parameters()] == names
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name))


@pytest.mark.parametrize(
    ("make", "mesh", "line"),
    [
        (
            lambda: GatedExperts(DIM, HIDDEN, 6),
            {"ep": 4},
            "num_experts=6 does not split over mesh.ep=4: choose ep as a divisor of it",
        ),
        (
            lambda: GatedExperts(DIM, 6, 4),
            {"etp": 4},
            (
                "an expert's hidden width of 6 does not split over mesh.etp=4: choose etp as a "
                "divisor of it"
            ),
        ),
        (
            lambda: ModuleExperts(lambda: nn.Linear(DIM, DIM), DIM, 4),
            {"ep": 2, "etp": 2},
            (
                "ModuleExperts cannot be cut into shards: choose mesh.etp=1 (mesh.ep spreads "
                "whole experts)"
            ),
        ),
    ],
)
def test_what_does_not_split_is_refused_and_left_whole(make: object, mesh: dict, line: str) -> None:
    experts: AbstractExperts = make()  # type: ignore[operator]
    before = {name: value.clone() for name, value in experts.state_dict().items()}
    assert refused(lambda: shard_experts(experts, Grid(world=4, **mesh), 0, None)) == line
    assert not experts.is_spread
    assert experts.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in experts.state_dict().items())


@pytest.mark.parametrize(
    "make", [*MAKERS.values(), lambda: ModuleExperts(lambda: nn.Linear(DIM, DIM), DIM, EXPERTS)]
)
def test_parameters_carry_the_marks_that_other_trainers_look_for(make) -> None:
    """DeepSpeed and Megatron-Core leave parameters with `allreduce=False` out of the average over
    all data-parallel ranks."""
    for part in shards(make(), Grid(world=4, ep=2)):
        assert {(p.allreduce, p.group_name) for p in part.parameters()} == {(False, "ep_size_2")}
