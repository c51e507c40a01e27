"""`moesaic check` with its claims: cases, failures, planted bugs, worlds of processes.

moesaic bench check --json benchmarks/results/check.json
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table

from moesaic.cli.check import DESCRIPTION, CheckOptions, as_dict, gather
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told
from moesaic_lab.claims import Claim

LEAST_CASES, LEAST_MUTANTS = 2000, 40
NOTES = (
    "Relative errors of cases in float64 whose expected values are exact; cases run on loopback unless a world of processes is "
    "named."
)


@dataclass(frozen=True, kw_only=True)
class CheckedOptions(BenchmarkOptions):
    """How much to check; see `moesaic check --help`."""

    cases: int = LEAST_CASES
    """Random cases on loopback."""
    seed: int = 0
    """Of the first case."""
    gloo: bool = True
    """Also run cases over real processes."""
    workers: int = 0
    """Processes for the cases; 0 for one per core, at most 8."""

    @property
    def asked(self) -> CheckOptions:
        """The same, as the command has it."""
        return CheckOptions(cases=self.cases, seed=self.seed, gloo=self.gloo, workers=self.workers)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per quantity, planted bug, world, answer and failure."""
    made = [{"quantity": quantity, "worst_error": error} for quantity, error in found["worst_errors"].items()]
    made += found["mutants"]
    made += [{"world": int(world), "cases": cases} for world, cases in found["cases_by_processes"].items()]
    made += [{"balance": answer, "cases": cases} for answer, cases in found["cases_by_balance"].items()]
    return made + found["failures"]


def claims(found: dict[str, Any]) -> list[Claim]:
    """Return how much was checked, and what failed or escaped."""
    caught = sum(mutant["caught_by"] != "nobody" for mutant in found["mutants"])
    worlds = found["cases_by_processes"]
    reason = "" if worlds else "run without processes (--no-gloo)"

    def claim(name: str, value: float | None, target: float, op: Literal["<=", ">="], why: str = "") -> Claim:
        return Claim(name=f"check.{name}", value=value, unit="1", target=target, op=op, reason=why)

    return [
        claim("cases", found["cases"], LEAST_CASES, ">="),
        claim("failures", len(found["failures"]), 0, "<="),
        claim("mutants", len(found["mutants"]), LEAST_MUTANTS, ">="),
        claim("mutants_caught", caught, len(found["mutants"]), ">="),
        claim("gloo_worlds", len(worlds) or None, 3, ">=", reason),
    ]


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the worst error of every quantity."""
    return Shown(title="Worst errors").of(rows(found)[: len(found["worst_errors"])])


def measure(options: CheckedOptions, cases: CheckOptions, told: Told) -> dict[str, Any]:
    """Run the suite."""
    torch.set_num_threads(1)
    told("cases, planted bugs, processes")
    return as_dict(gather(cases))


BENCHMARK = Benchmark(
    name="check", description=DESCRIPTION, options=CheckedOptions, notes=NOTES, cases=lambda options: options.asked,
    measure=measure, rows=rows, claims=claims, columns=tables, is_proof=True,
)  # fmt: skip
