"""Plans and layers that do not fit are refused before anything is sent: on every rank, with the
same message."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from meshes import DIM, make_layer, on_mesh, tokens_of

from helpers import refused
from moesaic import MoE
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.experts import PlainExperts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime import sharding
from moesaic.runtime.expert_parallel import ExpertParallel, PlainCalls

GRID = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)


def refusals(world: int, function: Any) -> list[str]:
    """Return the InputError of every rank."""

    def rank(transport: AbstractTransport) -> str:
        return refused(function, transport)

    return run_ranks(world, rank)


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (
            [{"schedule": "s2"}, {"schedule": "s3"}],
            "plan.schedule differs: s2 on ranks 0 and 2, s3 on ranks 1 and 3",
        ),
        ([{"chunks": 2}] * 3 + [{"chunks": 3}], "plan.chunks differs: 2 on ranks 0-2, 3 on rank 3"),
        ([{"codec": "int8"}, {}, {}, {}], "plan.codec differs: int8 on rank 0, none on ranks 1-3"),
    ],
)
def test_ranks_with_different_plans_all_say_so(plans: list[dict], words: str) -> None:
    """The ranks of a tensor-parallel group do not exchange counts, so this check cannot wait for
    the first call."""
    lines = refusals(
        4,
        lambda transport: on_mesh(
            make_layer(), GRID, transport, Plan(**plans[transport.rank % len(plans)])
        ),
    )
    assert set(lines) == {f"{words}: start every rank with the same settings"}


def test_ranks_with_different_meshes_all_say_so() -> None:
    lines = refusals(
        4,
        lambda transport: on_mesh(
            make_layer(), Grid(world=4, ep=4 if transport.rank else 2), transport, Plan()
        ),
    )
    assert set(lines) == {
        "mesh.ep differs: 2 on rank 0, 4 on ranks 1-3: start every rank with the same settings"
    }


def test_ranks_with_programs_compiled_otherwise_all_say_so() -> None:
    def rank(transport: AbstractTransport) -> None:
        compiled = compile_plan(Plan(chunks=2), GRID, bias=transport.rank == 2)
        on_mesh(make_layer(), GRID, transport, compiled)

    lines = refusals(4, rank)
    assert len(set(lines)) == 1
    assert lines[0].startswith("compiled plan differs: ")


def test_a_codec_that_one_rank_lacks_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def codec_named(name: str) -> None:
        if name == "zfp" and threading.current_thread().name == "rank 1":
            raise InputError("codec zfp needs the package zfpy")

    monkeypatch.setattr(sharding, "codec_named", codec_named)
    lines = refusals(
        2,
        lambda transport: on_mesh(make_layer(), Grid(world=2, ep=2), transport, Plan(codec="zfp")),
    )
    words = (
        "whether codec zfp is installed differs: True on rank 0, False on rank 1: start every "
        "rank with the same settings"
    )
    assert lines == [words] * 2


def test_a_plan_that_fits_no_mesh_is_refused_on_all_ranks_alike() -> None:
    lines = refusals(
        4, lambda transport: on_mesh(make_layer(), GRID, transport, Plan(gather_weights=3))
    )
    assert set(lines) == {
        "plan.gather_weights=3 does not divide mesh.etp=2: choose 0 or one of [1, 2]"
    }


def test_a_layer_goes_on_a_mesh_once() -> None:
    layer = on_mesh(make_layer(), Grid(world=1), NoTransport(), Plan())
    with pytest.raises(InputError, match=r"MoE\.parallelize: the layer is on a mesh already"):
        layer.parallelize(Mesh(Grid(world=1), NoTransport()), Plan())


@pytest.mark.parametrize("bias", [False, True])
def test_a_plan_compiled_for_other_experts_is_refused(bias: bool) -> None:
    experts = PlainExperts(DIM, 4, 2, bias=not bias)
    with pytest.raises(
        InputError,
        match=f"the plan was compiled with bias={bias}.*: compile it with bias={not bias}",
    ):
        ExpertParallel(
            Grid(world=1),
            NoTransport(),
            compile_plan(Plan(), Grid(world=1), bias=bias),
            experts,
            weight_first=False,
            calls_under=PlainCalls,
        )


def test_a_plan_compiled_for_another_mesh_is_refused() -> None:
    lines = refusals(
        4,
        lambda transport: on_mesh(
            make_layer(), Grid(world=4, ep=2), transport, compile_plan(Plan(), GRID)
        ),
    )
    assert len(set(lines)) == 1
    assert "compile it for the layer's mesh" in lines[0]
    compiled = compile_plan(Plan(gather_weights=1), GRID)
    run_ranks(4, lambda transport: on_mesh(make_layer(), GRID, transport, compiled)(tokens_of(0)))


def test_ranks_that_come_to_differ_later_stop_at_the_next_call() -> None:
    said: list[str] = []

    def rank(transport: AbstractTransport) -> None:
        layer = MoE(8, 8, 4, 2)
        layer.parallelize(Mesh(Grid(world=2, ep=2), transport), Plan())
        layer(torch.randn(3, 8))
        layer.on_mesh.peers.digest = layer.on_mesh.peers.digest + transport.rank
        caught = refused(lambda: layer(torch.randn(3, 8)))
        assert "ranks [1] run another plan or mesh than rank 0" in caught
        said.append(caught)

    run_ranks(2, rank)
    assert len(set(said)) == 1
    assert len(said) == 2
