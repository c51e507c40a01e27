"""`moesaic certify`: compares your MoE layer or experts with a dense layer in float64, on several
ranks of this machine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError

DESCRIPTION = (
    "Run your MoE layer or experts on several processes, and compare outputs, all gradients and "
    "clipping with a dense layer in float64. Prints one line per failure; the exit code is 1 if "
    "there is one."
)
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """Options of `moesaic certify`."""

    system: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:CLASS")]
    """package.module:Class or path/to/file.py:Class, derived from AbstractRoutedExperts or
    AbstractMoELayer."""
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of processes to run on, one after the other."""
    poison: bool = True
    """Fill memory that torch allocates without a value with NaN."""
    json: bool = False
    """Print only the results, as JSON."""

    def __post_init__(self) -> None:
        if not self.ranks or any(ranks not in (1, 2, 4, 8) for ranks in self.ranks):
            raise InputError(
                f"--ranks {' '.join(map(str, self.ranks))}: choose among 1, 2, 4 and 8"
            )


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(CertifyOptions, arguments, prog="moesaic certify", description=DESCRIPTION)
    from moesaic.testing.certify import system_named

    system_named(options.system)  # refuses a wrong name before any process starts
    findings = []
    for ranks in options.ranks:
        findings += _findings(options, ranks)
    wrong = [finding for finding in findings if not finding["holds"]]
    if options.json:
        sys.stdout.write(json.dumps({"passed": not wrong, "findings": findings}, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{finding['ranks']} ranks, {finding['says']}\n" for finding in wrong)
        all_ranks = " and ".join(map(str, options.ranks))
        num_right = len(findings) - len(wrong)
        sys.stdout.write(
            f"{options.system} on {all_ranks} ranks: {num_right} right, {len(wrong)} wrong\n"
        )
    return 1 if wrong else 0


def _findings(options: CertifyOptions, ranks: int) -> list[dict[str, Any]]:
    """Return the findings on a number of ranks as plain data; an infinite error as None, since JSON
    has no such number."""
    from moesaic.testing.certify import Certified, certify_named
    from moesaic.testing.runner import on_ranks

    arguments = (options.system, options.poison)
    try:
        by_rank = on_ranks(ranks, certify_named, *arguments, timeout_seconds=TIMEOUT_SECONDS)
        comparisons = by_rank[0]  # all ranks return the same
    except Exception as error:  # a rank that dies is a finding too
        lines = str(error).strip().splitlines()
        last_line = lines[-1] if lines else ""
        death = Certified(
            "every situation",
            quantity="all",
            error=math.inf,
            factor=None,
            failed=f"{type(error).__name__}: {last_line}",
        )
        comparisons = [death]
    findings = []
    for compared in comparisons:
        finding = {
            "ranks": ranks,
            **asdict(compared),
            "holds": compared.holds(),
            "says": str(compared),
        }
        if not math.isfinite(compared.error):
            finding["error"] = None
        findings.append(finding)
    return findings
