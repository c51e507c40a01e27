"""`moesaic check` with its claims: cases, failures, planted bugs, worlds of processes.

python -m moesaic_lab.check --json benchmarks/results/check.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from moesaic.cli.arguments import parse
from moesaic.cli.check import DESCRIPTION, CheckOptions, as_dict, gather
from moesaic_lab.claims import Claim, Measurement

LEAST_CASES, LEAST_MUTANTS = 2000, 40
NOTES = (
    "Relative errors of cases in float64 whose expected values are exact; cases run on loopback unless a world of processes is "
    "named."
)


def run(arguments: Sequence[str]) -> int:
    """Check everything and print the claims as JSON; returns the exit code."""
    import torch

    torch.set_num_threads(1)
    evidence = gather(parse(CheckOptions, arguments, prog="python -m moesaic_lab.check", description=DESCRIPTION))
    measurement(as_dict(evidence)).write("-")
    return 0 if evidence.passed else 1


def measurement(found: dict[str, Any]) -> Measurement:
    """Return rows and claims of what `moesaic check --json` prints."""
    caught = sum(mutant["caught_by"] != "nobody" for mutant in found["mutants"])
    worlds = found["cases_by_processes"]
    reason = "" if worlds else "run without processes (--no-gloo)"

    def claim(name: str, value: float | None, target: float, op: str, why: str = "") -> Claim:
        return Claim(name=f"check.{name}", value=value, unit="1", target=target, op=op, reason=why)  # type: ignore[arg-type]

    return Measurement(
        rows=[{"quantity": quantity, "worst_error": error} for quantity, error in found["worst_errors"].items()]
        + found["mutants"]
        + [{"world": int(world), "cases": cases} for world, cases in worlds.items()]
        + [{"balance": answer, "cases": cases} for answer, cases in found["cases_by_balance"].items()]
        + found["failures"],
        claims=[
            claim("cases", found["cases"], LEAST_CASES, ">="),
            claim("failures", len(found["failures"]), 0, "<="),
            claim("mutants", len(found["mutants"]), LEAST_MUTANTS, ">="),
            claim("mutants_caught", caught, len(found["mutants"]), ">="),
            claim("gloo_worlds", len(worlds) or None, 3, ">=", reason),
        ],
        notes=NOTES,
    )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
