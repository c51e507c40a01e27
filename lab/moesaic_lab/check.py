"""Run `moesaic check`, verify that its cases notice planted bugs, and turn both into claims.

Relative errors of cases in float64 whose expected values are exact; cases run on loopback unless a
number of processes is given.

moesaic bench check --json benchmarks/results/check.json
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table

from moesaic.cli.check import CheckOptions, as_dict, gather
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.planted.mutants import judge_all, judge_all_on_gloo

DESCRIPTION = (
    "Run what `moesaic check` runs, and plant bugs in the library that its cases must notice. "
    "Exit code 1 if a case fails or a bug escapes."
)
LEAST_CASES = 2000
LEAST_MUTANTS = 40


@dataclass(frozen=True, kw_only=True)
class CheckedOptions(BenchmarkOptions):
    """How much to check. `moesaic check --help` describes the cases."""

    cases: int = LEAST_CASES
    """Number of random cases to run on loopback."""
    seed: int = 0
    """Seed of the first case."""
    gloo: bool = True
    """Also run cases over real processes."""
    workers: int = 0
    """Number of processes that run the cases; 0 for one per core, at most 8."""

    @property
    def asked(self) -> CheckOptions:
        """The same options as `moesaic check` takes them."""
        return CheckOptions(cases=self.cases, seed=self.seed, gloo=self.gloo, workers=self.workers)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per checked quantity, planted bug, number of processes and failure."""
    lines = [
        {"quantity": quantity, "worst_error": error}
        for quantity, error in result["worst_errors"].items()
    ]
    lines += result["mutants"]
    lines += [
        {"world": int(world), "cases": cases}
        for world, cases in result["cases_by_processes"].items()
    ]
    return lines + result["failures"]


def claims(result: dict[str, Any]) -> list[Claim]:
    """Return claims on the numbers of cases, failures, planted bugs, caught bugs and process
    counts."""
    caught = sum(mutant["caught_by"] != "nobody" for mutant in result["mutants"])
    worlds = result["cases_by_processes"]
    reason = "" if worlds else "run without processes (--no-gloo)"

    def claim(
        name: str, value: float | None, target: float, op: Literal["<=", ">="], why: str = ""
    ) -> Claim:
        return Claim(name=f"check.{name}", value=value, target=target, op=op, reason=why)

    return [
        claim("cases", result["cases"], LEAST_CASES, ">="),
        claim("failures", len(result["failures"]), 0, "<="),
        claim("mutants", len(result["mutants"]), LEAST_MUTANTS, ">="),
        claim("mutants_caught", caught, len(result["mutants"]), ">="),
        claim("gloo_worlds", len(worlds) or None, 3, ">=", reason),
    ]


def planted(options: CheckOptions, told: Told) -> list[dict[str, Any]]:
    """Plant every bug and return a row per bug: what caught it, and the first ratio of its wrong
    numbers."""
    verdicts = list(judge_all(options.at_once, lambda name: told(f"planted: {name}")))
    if options.gloo:
        told("planted bugs that need processes")
        verdicts += judge_all_on_gloo()
    return [
        {
            "mutant": verdict.mutant.name,
            "source": verdict.mutant.source,
            "caught_by": verdict.caught_by,
            "off_by": verdict.off_by,
        }
        for verdict in verdicts
    ]


def tables(result: dict[str, Any]) -> list[Table]:
    """Return one table with the worst error of every quantity, and one with the planted bugs."""
    errors = rows(result)[: len(result["worst_errors"])]
    bugs = result["mutants"]
    return Shown(title="Worst errors").of(errors) + Shown(title="Planted bugs").of(bugs)


def measure(options: CheckedOptions, cases: CheckOptions, told: Told) -> dict[str, Any]:
    """Run the conformance cases and then the planted bugs."""
    torch.set_num_threads(1)
    told("cases, processes")
    result = as_dict(gather(cases))
    return result | {"mutants": planted(cases, told)}


BENCHMARK = Benchmark(
    name="check",
    description=DESCRIPTION,
    options=CheckedOptions,
    notes=notes_of(__doc__),
    cases=lambda options: options.asked,
    measure=measure,
    rows=rows,
    claims=claims,
    columns=tables,
    is_proof=True,
)
