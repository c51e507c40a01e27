"""Compares placements of samples and of experts with the best possible ones, found by integer
programs on small random loads.

Samples: 2 or 4 on each of 4 to 8 ranks in nodes of 2 and 4, two experts per rank, 16 copies per
sample and layer, two layers. Each sample's shares of the experts come from a Dirichlet distribution
of 0.3, and homes are random; the time is that of the slower kind of link. Experts: 12 to 16 on 2 to
4 places, popularity by powers of 0.3, 0.8 and 1.2 of the rank among experts, 4,096 copies in all;
the measure is the rows at the busiest place, and moving is free. A gap is the share by which a
policy takes longer, or has more rows, than the best placement. Times are of one two-stage decision
for 16 ranks in two nodes, on this processor, next to those of KM and PuLP in NetMoE's Table 4.

A load says how many copies go from where to which expert. A sample's home is its rank, an expert's
place its index in ep; slots are the samples that a rank holds.

    moesaic bench placement_gaps --json benchmarks/results/placement_gaps.json
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.balance.expert_placement import Balanced, ExpertLoad, SmartMoE, places_of
from moesaic.balance.samples import (
    AbstractPlacer,
    Homes,
    SampleLoad,
    TwoStage,
    Weighed,
    by_flow,
    by_seats,
)
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.exact_placements import assign_by_program, best_experts, best_samples
from moesaic_lab.policies.stay import Stay

NODES = ((2, 2), (3, 2), (2, 4), (4, 2))
"""Numbers of nodes, and ranks per node."""
ALL_TO_ALLS = {
    "8 times faster inside": (1.0, 8.0),
    "alike": (1.0, 1.0),
    "8 times slower inside": (8.0, 1.0),
}
"""Time per row inside nodes and between them, up to a common factor."""
PLACES = ((2, 12), (2, 16), (3, 12), (3, 15), (4, 12), (4, 16))
"""Places of ep, with one rank each, and numbers of experts."""
SKEWS = (0.3, 0.8, 1.2)
SOLVERS = {
    "seats (Kuhn-Munkres)": by_seats,
    "flow": by_flow,
    "integer program (HiGHS)": assign_by_program,
}
TABLE_4 = {2: (0.08, 42.8), 4: (0.48, 50.1), 8: (1.48, 72.9), 16: (10.82, 143.7), 24: (None, None)}
"""By samples per rank: the milliseconds that NetMoE prints for KM and PuLP; None if the values are
held out."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PlacementGapsOptions(BenchmarkOptions):
    """Command-line options."""

    samples: int = 4
    """Random loads per number of nodes and samples."""
    experts: int = 10
    """Random loads per number of places and skew."""
    repeats: int = 5
    """Timed decisions per solver and size; the fastest counts."""


def of_samples(draws: int) -> Rows:
    """Return the gaps of the sample-placement policies, for each ratio of link speeds.

    Args:
        draws: random loads of each size.
    """
    loads = [
        sample_load(nodes, per_node, slots, seed)
        for nodes, per_node in NODES
        for slots in (2, 4)
        for seed in range(draws)
    ]
    rows = Rows()
    for links, (intra, inter) in ALL_TO_ALLS.items():
        rates = Rates(intra_gbps=1 / intra, inter_gbps=1 / inter)
        policies: dict[str, AbstractPlacer] = {
            "nobody moves": Stay(),
            "two_stage": TwoStage(least_gain=0.0),
            "two_stage, as a run has it": TwoStage(),
            "weighed": Weighed(rates, least_gain=0.0),
            "weighed, as a run has it": Weighed(rates),
        }
        best = [load.seconds(best_samples(load, intra, inter), intra, inter) for load in loads]
        for name, placer in policies.items():
            seconds = [load.seconds(placer.decide(load), intra, inter) for load in loads]
            rows.append(
                {"part": "samples", "links": links, "method": name, **summary(seconds, best)}
            )
    return rows


def sample_load(nodes: int, per_node: int, slots: int, seed: int) -> SampleLoad:
    """Return a load in which each sample prefers few experts, with random homes of the samples.

    Args:
        slots: samples per rank.
    """
    world = nodes * per_node
    samples = world * slots
    num_experts = 2 * world
    random = np.random.default_rng((seed, nodes, per_node, slots))
    homes = Homes.of_ranks(random.permutation(np.arange(samples) // slots), world)

    # Each sample's shares of the experts, (samples, num_experts), in two consecutive layers.
    shares_now = random.dirichlet(np.full(num_experts, 0.3), size=samples)
    shares_next = random.dirichlet(np.full(num_experts, 0.3), size=samples)
    current = np.stack([random.multinomial(16, shares) for shares in shares_now])
    following = np.stack([random.multinomial(16, shares) for shares in shares_next])

    grid = Grid(world=world, ep=world, ranks_per_node=per_node)
    return SampleLoad(grid, homes, current, following)


def of_solvers(repeats: int) -> Rows:
    """Return the time of the fastest of `repeats` two-stage decisions, for each solver of the
    assignments, beside what NetMoE prints."""
    rows = Rows()
    for slots, (km, pulp) in TABLE_4.items():
        load = sample_load(2, 8, slots, 0)
        for name, solve in SOLVERS.items():
            placer = TwoStage(least_gain=0.0, solve=solve)
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                homes = placer.decide(load)
                seconds.append(time.perf_counter() - start)
            rows.append(
                {
                    "part": "solvers",
                    "slots": slots,
                    "method": name,
                    "milliseconds": 1e3 * min(seconds),
                    "km_printed": km,
                    "pulp_printed": pulp,
                    "rows_between_nodes": load.volume(homes).inter,
                }
            )
    return rows


def of_experts(draws: int) -> Rows:
    """Return the gaps of the expert-placement policies.

    Args:
        draws: random loads of each size and skew.
    """
    loads = [
        expert_load(ep, num_experts, skew, seed)
        for ep, num_experts in PLACES
        for skew in SKEWS
        for seed in range(draws)
    ]
    best = [load.busiest(best_experts(load)) for load in loads]
    busiest = {
        "nobody moves": [load.busiest(load.place) for load in loads],
        "smartmoe": [
            load.busiest(places_of(SmartMoE().decide(load), load.grid.ep)) for load in loads
        ],
        "balanced": [load.busiest(Balanced().best(load)) for load in loads],
    }
    return [
        {"part": "experts", "links": "", "method": name, **summary(own, best)}
        for name, own in busiest.items()
    ]


def expert_load(ep: int, num_experts: int, skew: float, seed: int) -> ExpertLoad:
    """Return a load in which experts differ in popularity, by a Zipf law with the exponent `skew`,
    and ranks slightly in their preferences."""
    random = np.random.default_rng((seed, ep, num_experts, round(10 * skew)))
    popularity = random.permutation(np.arange(1, num_experts + 1) ** -skew)
    shares_of_ranks = random.dirichlet(20 * popularity / popularity.mean(), size=ep)
    copies = np.stack([random.multinomial(4096 // ep, shares) for shares in shares_of_ranks])
    grid = Grid(world=ep, ep=ep, ranks_per_node=2 if ep % 2 == 0 else None)
    return ExpertLoad(
        grid=grid,
        copies=copies.astype(np.float64),
        order=random.permutation(num_experts),
        dim=64,
        expert_parameters=1,
        expert_bytes=1,
        steps=1,
    )


def summary(values: list[float], best: list[float]) -> dict[str, float]:
    """Return statistics of a policy's gaps.

    Args:
        values: the policy's time or load, for each case.
        best: the least possible one.
    """
    gaps = np.array(values) / np.array(best) - 1
    return {
        "cases": len(gaps),
        "gap_mean": float(gaps.mean()),
        "gap_median": float(np.median(gaps)),
        "gap_worst": float(gaps.max()),
        "share_optimal": float((gaps < 1e-9).mean()),
    }


def claims(rows: Rows) -> list[Claim]:
    """Return the figures that the documentation quotes: worst gaps, and means of `two_stage` on
    slow links inside nodes and of `experts.mean`."""

    def figure(name: str, key: str, **where: str) -> Claim:
        return claimed(
            f"placement_gaps.{name}", lambda: max(figures(rows, key, **where)), None, unit="share"
        )

    slow = {"part": "samples", "links": "8 times slower inside"}
    fast = {"part": "samples", "links": "8 times faster inside"}
    return [
        figure("two_stage.fast_inside", "gap_worst", method="two_stage", **fast),
        figure("two_stage.alike", "gap_worst", method="two_stage", part="samples", links="alike"),
        figure("two_stage.slow_inside", "gap_mean", method="two_stage", **slow),
        figure("weighed.slow_inside", "gap_worst", method="weighed", **slow),
        figure("experts.mean", "gap_mean", part="experts", method="balanced"),
        figure("experts.worst", "gap_worst", part="experts", method="balanced"),
    ]


COLUMNS = ("links", "method", "cases", "gap_mean", "gap_median", "gap_worst", "share_optimal")


def measure(options: PlacementGapsOptions, cases: None, told: Told) -> Rows:
    """Draw loads, apply the policies, and solve for the best placements."""
    told("samples")
    rows = of_samples(options.samples)
    told("experts")
    rows += of_experts(options.experts)
    told("solvers")
    return rows + of_solvers(options.repeats)


BENCHMARK = Benchmark(
    name="placement_gaps",
    description="Compare placements of samples and experts with the best ones.",
    options=PlacementGapsOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=(
        *(
            Shown(title=part, where={"part": (part,)}, columns=COLUMNS, group_by=("links",))
            for part in ("samples", "experts")
        ),
        Shown(title="solvers", where={"part": ("solvers",)}, group_by=("slots",)),
    ),
)
