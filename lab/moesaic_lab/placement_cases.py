"""Checks in float64 that moving samples to other homes changes no result, in every case that the
layer treats specially.

Two consecutive MoE layers, each with a residual, on four loopback ranks; before the second layer,
samples move to random homes. The output and the gradients of the input, routers, norms and experts
are compared with a dense loop over copies in one process. Since a capacity depends on the order of
tokens, the reference takes the samples of the second layer in the order in which they lie on the
mesh. Errors are relative to the largest expected value.

    moesaic bench placement_cases --json benchmarks/results/placement_cases.json
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, sample_dropout, samples_of
from moesaic.balance.run.residual import Residual
from moesaic.balance.samples import Given
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.routers import SigmoidTopK, SoftmaxTopK
from moesaic.runtime.data_parallel import average_gradients
from moesaic.testing.equivalence import random_homes
from moesaic.testing.expected import shard_of
from moesaic.testing.reference import reference, relative
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim

DIM = 4
HIDDEN = 6
EXPERTS = 4
LENGTH = 3
SAMPLES = 8
EXACT = 1e-10
"""Largest relative error of a case that counts as exact."""
FOUR = Grid(world=4, ep=4, ranks_per_node=2)
TENSOR = Grid(world=4, tp=2, ep=4, ranks_per_node=2)
MESHES: dict[str, tuple[Grid, Plan]] = {
    "s1": (FOUR, Plan(chunks=2)),
    "s1, tp": (TENSOR, Plan()),
    "s1, etp": (Grid(world=4, ep=2, etp=2, ranks_per_node=2), Plan()),
    "s2, tp": (TENSOR, Plan(schedule="s2", overlap_gather=True)),
    "multicast": (FOUR, Plan(all_to_all="multicast")),
    "replication": (FOUR, Plan(replication="shadow")),
}


@dataclass(frozen=True, kw_only=True)
class PlacementCase:
    """Properties of a layer that may decide whether its residual can travel with the results."""

    about: str
    """Description in words."""
    weights: Literal["sum to one", "do not", "sigmoid"] = "sum to one"
    """Normalization of a token's routing weights, before any copy is dropped."""
    top_k: int = 2
    capacity: AbstractCapacity = field(default_factory=Dropless)
    norm: Literal["before", "after", "none"] = "before"
    padding: bool = False
    dropout: float = 0.0
    """Dropout on the layer's result before the residual is added. With dropout, the residual
    travels separately."""
    shared: int = 0
    apply_weight: Literal["after", "before"] = "after"

    @property
    def router(self) -> Any:
        """Factory of a layer's router."""
        if self.weights == "sigmoid":
            return lambda dim, count: SigmoidTopK(dim, count, normalize=False)
        how: Literal["after", "before"] = "after" if self.weights == "sum to one" else "before"
        return lambda dim, count: SoftmaxTopK(dim, count, normalize=how)


CASES = (
    PlacementCase(about="weights that sum to one"),
    PlacementCase(about="weights that do not", weights="do not"),
    PlacementCase(about="weights of a sigmoid, one expert", weights="sigmoid", top_k=1),
    PlacementCase(about="some copies dropped", capacity=Capacity.fixed(0.7)),
    PlacementCase(
        about="some copies dropped, weights do not sum",
        weights="do not",
        capacity=Capacity.fixed(0.7),
    ),
    PlacementCase(
        about="tokens dropped everywhere", weights="do not", top_k=1, capacity=Capacity.fixed(0.4)
    ),
    PlacementCase(
        about="tokens dropped everywhere, norm behind", norm="after", capacity=Capacity.fixed(0.3)
    ),
    PlacementCase(
        about="nearly all dropped, padding",
        weights="do not",
        padding=True,
        top_k=1,
        capacity=Capacity.fixed(0.1),
    ),
    PlacementCase(about="padding", padding=True),
    PlacementCase(about="norm behind the residual", norm="after"),
    PlacementCase(about="no norm", norm="none", weights="do not"),
    PlacementCase(about="dropout in between", dropout=0.4, capacity=Capacity.fixed(0.7)),
    PlacementCase(about="a shared expert", shared=4, capacity=Capacity.fixed(0.7)),
    PlacementCase(about="weights before the experts", apply_weight="before", weights="do not"),
)


class Layers(nn.Module):
    """Two MoE layers with norms and residuals."""

    def __init__(self, case: PlacementCase) -> None:
        super().__init__()
        self.case = case
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.moes = nn.ModuleList(
            MoE(
                DIM,
                HIDDEN,
                EXPERTS,
                case.top_k,
                router=case.router,
                losses=(),
                capacity=case.capacity,
                shared_hidden=case.shared,
                apply_weight=case.apply_weight,
            )
            for _ in range(2)
        )
        for norm in self.norms:
            nn.init.normal_(norm.weight)  # type: ignore[arg-type]

    def dense(self, x: Tensor, mask: Tensor | None, order: Tensor) -> Tensor:
        """Return the reference output, (samples, length, dim).

        Args:
            x: the input, (samples, length, dim).
            mask: (samples, length) bool, or None.
            order: (samples,) int64 order of the samples on the mesh in the second layer.
        """
        for number, positions in enumerate((torch.arange(len(x)), order)):
            norm = self.norms[number]
            moe = self.moes[number]
            assert isinstance(moe, MoE)
            inputs = norm(x) if self.case.norm == "before" else x

            # The layer sees the samples in their order on the mesh; its results go back to ours.
            local_mask = None if mask is None else mask[positions]
            results = reference(moe, inputs[positions], mask=local_mask).y
            y = results[positions.argsort()]

            x = x + sample_dropout(y, self.case.dropout, torch.arange(len(x)), number)
            if self.case.norm == "after":
                x = norm(x)
        return x

    def placed(
        self, x: Tensor, mask: Tensor | None, relocator: Relocator
    ) -> tuple[Tensor, list[bool]]:
        """Return the output for this rank's samples, which move in between, and for each layer
        whether its residual travelled with the results.

        Args:
            x: this rank's samples, (samples, length, dim).
            mask: of all ranks' samples, (samples, length) bool, or None.
        """
        trip = relocator.start(
            [Following(moe.router, self.case.top_k) for moe in self.moes],  # type: ignore[arg-type]
            *x.shape[:2],
        )
        rides = []
        for number, (norm, moe) in enumerate(zip(self.norms, self.moes)):
            assert isinstance(moe, MoE)
            before = self.case.norm == "before"
            move = trip.next()
            inputs = norm(x) if before else x
            local_mask = None if mask is None else mask[samples_of(relocator, move.before)]
            if self.case.dropout:
                y = MovingMoE(moe)(inputs, move=move, mask=local_mask)
                x = move.carry(x) + sample_dropout(
                    y, self.case.dropout, samples_of(relocator, move.after), number
                )
            else:
                residual = Residual(x, norm if before else None)
                x = MovingMoE(moe)(inputs, move=move, residual=residual, mask=local_mask)
            if self.case.norm == "after":
                x = norm(x)
            rides.append(move.rides)
        return trip.take_home(x), rides


def run_case(case: PlacementCase, mesh_name: str, seed: int = 0) -> dict[str, Any]:
    """Return the largest relative error of a case on a mesh, and whether residuals travelled with
    the results."""
    grid, plan = MESHES[mesh_name]
    torch.manual_seed(seed)
    layers = Layers(case).double()
    x = torch.randn(SAMPLES, LENGTH, DIM, dtype=torch.float64)
    upstream = torch.randn(SAMPLES, LENGTH, DIM, dtype=torch.float64)  # gradient of the output
    mask = torch.rand(SAMPLES, LENGTH) > 0.3 if case.padding else None
    homes = random_homes(grid, SAMPLES // grid.world, np.random.default_rng(seed))

    # The reference: one process, all samples.
    alone = copy.deepcopy(layers)
    leaf = x.clone().requires_grad_()
    order = torch.from_numpy(homes.samples.reshape(-1).copy())
    expected = alone.dense(leaf, mask, order)
    (expected * upstream).sum().backward()

    def rank(transport: AbstractTransport) -> dict[str, Any]:
        """Run this rank's samples; return the largest error, and which residuals travelled."""
        mine = copy.deepcopy(layers)
        mesh = Mesh(grid, transport)
        for moe in mine.moes:
            moe.parallelize(mesh, plan)  # type: ignore[operator]
        share = SAMPLES // grid.dp
        first = grid.coordinate(transport.rank, "dp") * share
        own = slice(first, first + share)
        inputs = x[own].clone().requires_grad_()
        relocator = Relocator(mesh, Given([homes, homes]))
        y, rides = mine.placed(inputs, mask, relocator)
        (y * upstream[own]).sum().backward()
        average_gradients(mine, mesh)

        # Pairs of actual and expected; averaged gradients are 1 / dp of the reference's sums.
        pairs = [(y, expected[own]), (inputs.grad, leaf.grad[own])]  # type: ignore[index]
        for name, parameter in alone.named_parameters():
            expected_grad = parameter.grad
            grad = mine.get_parameter(name).grad
            if expected_grad is None:
                continue
            if ".experts." in name and ".shared." not in name:  # this rank's shard of the experts
                dim = alone.moes[0].experts.shard_dim(name.rpartition(".")[2])  # type: ignore[union-attr, operator]
                expected_grad = shard_of(expected_grad, grid, transport.rank, dim)
            if grad is None:
                grad = torch.zeros_like(expected_grad)
            pairs.append((grad, expected_grad / grid.dp))
        error = max(
            relative(actual.detach(), wanted.detach(), least=1e-30)  # type: ignore[union-attr]
            for actual, wanted in pairs
        )
        return {"error": error, "rides": rides}

    results = run_ranks(grid.world, rank, seed=seed)
    return {
        "case": case.about,
        "mesh": mesh_name,
        "rides": all(rides for result in results for rides in result["rides"]),
        "error": max(result["error"] for result in results),
    }


def measure(options: BenchmarkOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Run every case on every mesh."""
    rows = []
    for case, mesh in itertools.product(CASES, MESHES):
        told(f"{case.about}, {mesh}")
        rows.append(run_case(case, mesh))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the share of cases that are exact, and the share in which residuals travelled with the
    results."""
    exact = sum(row["error"] <= EXACT for row in rows) / len(rows)
    rides = sum(row["rides"] for row in rows) / len(rows)
    return [
        Claim(name="placement.cases_exact", value=exact, unit="share", target=1.0, op=">="),
        Claim(name="placement.cases_riding", value=rides, unit="share", op=">="),
    ]


BENCHMARK = Benchmark(
    name="placement_cases",
    description="Compare layers whose samples change home with a dense loop.",
    options=BenchmarkOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    is_proof=True,
    columns=(
        Shown(
            title="largest error relative to the largest expected value",
            columns=("case", "mesh", "rides", "error"),
        ),
    ),
)
