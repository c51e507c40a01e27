"""Start-up time and rate of every collective as `moesaic profile` fits them, on emulated clusters
of 2 x 2 and 4 x 2 ranks.

alpha is in microseconds, beta in gigabits per second, by least squares over 16 KiB to 2 MiB with
equal weight for every size. Bytes are counted as in nccl-tests: a rank's input, or for an
all-gather its output. r2 is of the logarithms of the times.

    moesaic bench collectives --json benchmarks/results/collectives.json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from moesaic.comm.mesh import open_transport
from moesaic.measure.links import collectives
from moesaic.measure.together import hold_still, latest, start_together
from moesaic.planner.fit import Fit
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.model.config import COMMITTED, read_config
from moesaic_testbed.cluster import Launcher

LEAST_R2 = 0.98


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions(BenchmarkOptions):
    """Command-line options."""

    repeats: int = 9
    """Timed repeats of each size."""


def measure(ranks_per_node: int, repeats: int) -> dict[str, Fit]:
    """Return the fits of one bed, by collective. Every rank calls this and returns the same."""
    hold_still(dist.get_rank())
    return collectives(open_transport(), ranks_per_node, repeats, start_together(latest))


def measure_all(options: CollectivesOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Measure on the beds of `moesaic bench model`."""
    rows = []
    with Launcher() as launcher:
        for bed, (case, *_) in read_config(COMMITTED).beds.items():
            told(case.shape)
            with launcher.open(bed) as ranks:
                fits = ranks.run(measure, bed.ranks_per_node, options.repeats)[0]
            rows += [{"bed": case.shape, **asdict(line)} for line in fits.values()]
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the least r2 over all collectives and beds."""
    least = min(row["r2"] for row in rows)
    return [Claim(name="profile.collectives_r2", value=least, target=LEAST_R2, op=">=")]


COLUMNS = ("bed", "what", "alpha", "beta", "r2", "worst", "spread")
BENCHMARK = Benchmark(
    name="collectives",
    description="Fit start-up and rate of every collective on emulated clusters.",
    options=CollectivesOptions,
    notes=notes_of(__doc__),
    measure=measure_all,
    claims=claims,
    columns=(Shown(title="Collectives", columns=COLUMNS),),
)
