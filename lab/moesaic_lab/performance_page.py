"""Write the tables of docs/performance.md from the results in the repository: no figure is typed by
hand.

The page has a region for each question, between a line `<!-- claims: RESULT, ... -->` and the next
`<!-- end of claims -->`: the claims with a target of these results. A result that a change of
Moesaic outdated has a field `stale` with the reason until it is measured again; the region says so.

python -m moesaic_lab.performance_page            # writes docs/performance.md
python -m moesaic_lab.performance_page --check    # exit code 1 if the page is not of the results
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic_lab.claims import RESULTS, ROOT
from moesaic_lab.measured import measured
from moesaic_lab.tables import CLAIM_COLUMNS, markdown_table, with_unit

PAGE = ROOT / "docs" / "performance.md"
REGION = re.compile(r"<!-- claims: (.*?) -->\n.*?<!-- end of claims -->", re.DOTALL)
OTHERS = "others"
"""The region that names the results that no other region has."""
FEW = 4
"""Largest number of missed targets that are named; more are only counted."""


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it with the results if --check is given, and return the exit
    code."""
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob("*.json"))
    }
    before = PAGE.read_text(encoding="utf-8")
    text = page(before, results)
    if "--check" in arguments:
        return 0 if before == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def page(text: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Return the text of the page with the regions that the results, by file stem, give."""
    shown = [name for names in REGION.findall(text) for name in names.split(", ")]

    def written(region: re.Match[str]) -> str:
        names = region[1].split(", ")
        if names == [OTHERS]:
            others = [
                f"`{name}.json`" + " (stale)" * ("stale" in results[name])
                for name in results
                if name not in shown
            ]
            content = f"Further figures are in {', '.join(others)}."
        else:
            content = section(names, results)
        return f"<!-- claims: {region[1]} -->\n\n{content}\n\n<!-- end of claims -->"

    return REGION.sub(written, text)


def section(names: Sequence[str], results: Mapping[str, dict[str, Any]]) -> str:
    """Return the region of some results: what is missed, where it was measured, and the claims that
    have a target."""
    answers = [(name, results[name]) for name in names if name in results]
    claims = [
        claim for _, result in answers for claim in result["claims"] if claim["target"] is not None
    ]
    lines = [CLAIM_COLUMNS, *(line(alike) for alike in families(claims))]
    missed = [f"`{claim['name']}`" for claim in claims if claim["holds"] is False]
    verdict = (
        f"Missed: {', '.join(missed)}."
        if len(missed) <= FEW
        else f"Missed: {len(missed)} of {len(claims)}."
    )
    if not missed:
        verdict = "Every target holds."
    where = f"Measured {measured(dict(answers))}." if answers else "Not measured."
    where += "".join(
        f" **Stale:** `{name}.json`, {result['stale']}."
        for name, result in answers
        if "stale" in result
    )
    return f"{verdict} {where}\n\n{markdown_table(lines)}"


def families(claims: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group claims in their order: those that hold with the same first word and target, missed ones
    if their last word is the same too (headlines of papers always), those without a value if their
    reason is the same."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for claim in claims:
        words = claim["name"].split(".")
        missed = "" if words[0] == "papers" else words[-1]
        word = {True: "", False: missed, None: claim.get("reason", "")}[claim["holds"]]
        groups.setdefault(
            (words[0], claim["holds"], word, claim["op"], claim["target"]), []
        ).append(claim)
    return list(groups.values())


def line(alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table cells of a claim, or of the worst claim of a family."""
    is_measured = alike[0]["value"] is not None
    worst = max if alike[0]["op"] == "<=" else min
    claim = worst(alike, key=lambda each: each["value"]) if is_measured else alike[0]
    if is_measured:
        value = with_unit(f"{claim['value']:.4g}", claim.get("unit", "1"))
    else:
        value = f"not measured: {claim['reason']}"
    if "case" in claim:
        value += f" ({claim['case']})"
    words = {
        True: "the worst of {} with",
        False: "the worst of {} that miss",
        None: "one of {} with",
    }
    among = f" ({words[claim['holds']].format(len(alike))} this target)" if alike[1:] else ""
    holds = {True: "yes", False: "**no**", None: ""}[claim["holds"]]
    return [f"`{claim['name']}`{among}", value, f"{claim['op']} {claim['target']:g}", holds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
