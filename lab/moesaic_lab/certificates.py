"""Compare the expert parallelism of several systems with dense experts, in situations in which some
exchanges fail.

Each system gets tokens, experts and routing weights and returns weighted sums, on Gloo processes of
this machine, in float32 (its own casts included). Gradients of tokens and routing weights must be
complete on the token's rank. An expert's gradient must be the sum over all tokens that reached it,
and clipping must scale the router, the experts and a dense parameter by one factor. transformers is
tested under each of its implementations of experts and of expert parallelism. New memory holds NaN.
Versions are those that were installed. A system that is not installed, or cannot run without a GPU,
is listed with the reason.

moesaic bench certificates --json benchmarks/results/certificates.json
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table

from moesaic.errors import InputError
from moesaic.testing.certify import CLIPPED, LAYER_SITUATIONS, SITUATIONS, certify
from moesaic.testing.runner import on_ranks
from moesaic_lab.benchmark import Benchmark, PagedOptions, Told, notes_of
from moesaic_lab.certified_systems import NEEDS_A_GPU, SYSTEMS, TIMEOUT_SECONDS
from moesaic_lab.claims import Claim
from moesaic_lab.planted.certified import planted_rows
from moesaic_lab.tables import markdown_table, table

DESCRIPTION = (
    "Hold the expert parallelism of Moesaic and of others against dense experts, situation by "
    "situation."
)
WORLDS = (2, 4)
MARKS = ("<!-- tables: moesaic_lab/certificates.py -->", "<!-- end of tables -->")
SYSTEMS_ASKED = 3
"""Least number of other systems' packages that must have run."""


@dataclass(frozen=True, kw_only=True)
class CertificateOptions(PagedOptions):
    """Options of `moesaic bench certificates`."""

    only: str | None = None
    """Test only these systems, separated by commas, with those whose names continue theirs; None
    for all."""


def measure(options: CertificateOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Return a row per system, number of ranks, situation and quantity, and one per system that
    cannot run."""
    names = _chosen(options.only)
    rows: list[dict[str, Any]] = []
    for name in names:
        system = SYSTEMS[name]
        head = {"system": name, "what": system.what, "version": None}
        with contextlib.suppress(PackageNotFoundError):
            head["version"] = version(system.package)
        if head["version"] is None:
            rows.append({**head, "failed": f"{system.package} is not installed"})
            continue
        for world in WORLDS:
            told(f"{name} {head['version']} on {world} ranks")
            rows += [{**head, "world": world, **each} for each in _certified(name, world)]
    if not options.only:
        told("planted faults")
        rows += planted_rows()
    return rows + [
        {"system": name, "version": None, "failed": f"needs a GPU: {why}"}
        for name, why in NEEDS_A_GPU.items()
    ]


def _chosen(only: str | None) -> list[str]:
    """Return the names of the systems to test, from the value of the option `only`."""
    if not only:
        return list(SYSTEMS)
    names: list[str] = []
    for prefix in only.split(","):
        # "a" means "a" and "a-b", but not "ab".
        matching = [name for name in SYSTEMS if f"{name}-".startswith(f"{prefix}-")]
        if not matching:
            raise InputError(f"only={prefix}: choose among {', '.join(SYSTEMS)}")
        names += matching
    return names


def _certified(name: str, world: int) -> list[dict[str, Any]]:
    """Return the findings for a system on a number of ranks, or its failure."""
    try:
        rows_of_ranks = on_ranks(world, _rank, name, timeout_seconds=TIMEOUT_SECONDS)
    except Exception as error:
        last_line = str(error).strip().splitlines()[-1]
        return [{"failed": f"{type(error).__name__}: {last_line}"}]
    rows: list[dict[str, Any]] = rows_of_ranks[0]  # all ranks return the same
    return rows


def _rank(name: str) -> list[dict[str, Any]]:
    """Return the findings for a system's experts and its whole layer, on this rank."""
    # Some systems compile single functions, which says nothing about their exchange.
    torch._dynamo.config.disable = True
    system = SYSTEMS[name]
    rows = []
    for each in certify(system.make):
        rows.append(asdict(each) | {"holds": each.holds()})
    for each in certify(system.layer):
        rows.append(asdict(each) | {"holds": each.holds(), "is_layer": True})
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return claims on the number of other systems that ran and on the worst error of ours."""
    compared = [row for row in rows if "quantity" in row]
    packages = {SYSTEMS[row["system"]].package for row in compared}
    others = len(packages - {"moesaic"})
    own = [row["error"] for row in compared if row["system"].startswith("moesaic")]

    planted = [row["caught"] for row in rows if "fault" in row]
    caught = Claim(name="certify.planted_caught", value=sum(planted), target=len(planted), op=">=")
    return [
        *([caught] if planted else []),  # a run of only some systems plants no fault
        Claim(name="certificates.systems", value=others, target=SYSTEMS_ASKED, op=">="),
        Claim(name="certificates.moesaic_worst", value=max(own, default=None), target=1e-5),
    ]


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables and differences of docs/certificates.md from the rows of a result."""
    experts, layers = _parted(found)
    lines = [
        _markdown(_COLUMNS, _summary(experts, [each.name for each in SITUATIONS])),
        "",
        "The situations:",
        "",
    ]
    lines += [f"- **{each.name}**: {each.says}." for each in SITUATIONS]
    lines += ["", "The tested part of each system:", ""]
    measured = {row["system"] for row in found}
    lines += [f"- **{name}**: {each.what}." for name, each in SYSTEMS.items() if name in measured]
    lines += [
        "",
        "Whole layers:",
        "",
        _markdown(_LAYER_COLUMNS, _layer_summary(layers)),
        "",
        "The situations:",
        "",
    ]
    lines += [f"- **{each.name}**: {each.says}." for each in LAYER_SITUATIONS]
    wrong = [row for row in found if "quantity" in row and not row["holds"]]
    if wrong:
        lines += ["", "## Differences", ""]
    else:
        lines += ["", "No difference was found in these versions."]
    differences = []
    for row in wrong:
        part = ", whole layer" if "is_layer" in row else ""
        differences.append(
            f"- {row['system']}{part} on {row['world']} ranks, {row['situation']}: {_wrong(row)}"
        )
    return "\n".join([*lines, *dict.fromkeys(differences)])  # each once, in order


def _parted(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the rows of experts and the rows of whole layers, separately."""
    experts = [row for row in rows if "is_layer" not in row and "fault" not in row]
    return experts, [row for row in rows if "is_layer" in row]


def _markdown(columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table with titles for their keys."""
    lines = [
        [title for _, title in columns],
        *([str(row[key] or "") for key, _ in columns] for row in rows),
    ]
    return markdown_table(lines)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return two tables, for experts and for whole layers, with the situations that each system
    passes."""
    experts, layers = _parted(rows)
    return [
        table(
            "experts beside dense ones",
            _summary(experts, [each.name for each in SITUATIONS]),
            _COLUMNS,
        ),
        table("whole layers beside dense ones", _layer_summary(layers), _LAYER_COLUMNS),
    ]


_COLUMNS = [
    ("system", "system"),
    ("version", "version"),
    *((each.name, each.name) for each in SITUATIONS),
]
_LAYER_COLUMNS = [
    ("system", "system"),
    *((each.name, each.name) for each in LAYER_SITUATIONS),
    ("over", "auxiliary loss is over"),
    ("clipping", "clipping"),
]
AUXILIARY = "auxiliary loss over "


def _summary(rows: Sequence[Mapping[str, Any]], situations: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per system with its result in each situation."""
    summary = []
    for name in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == name]
        if any("quantity" in row for row in own):
            cells = {
                each: _cell([row for row in own if row.get("situation") == each])
                for each in situations
            }
        else:
            # A system that could not run has its reason in the first cell.
            cells = dict.fromkeys(situations, "")
            cells[situations[0]] = own[0]["failed"]
        summary.append({"system": name, "version": own[0]["version"], **cells})
    return summary


def _layer_summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per system whose whole layer was tested."""
    summary = _summary(rows, [each.name for each in LAYER_SITUATIONS])
    for row in summary:
        own = [each for each in rows if each["system"] == row["system"]]
        losses = [each for each in own if each["quantity"].startswith(AUXILIARY) and each["holds"]]
        row["over"] = "has none"
        if losses:
            tokens = losses[0]["quantity"].removeprefix(AUXILIARY)
            factors = sorted({f"{each['factor']:.3g}" for each in losses})
            row["over"] = f"{tokens}, times {' or '.join(factors)}"
        clipped = [each for each in own if each["quantity"] in CLIPPED]
        row["clipping"] = _cell(clipped) or "not compared"
        row["capacity"] = row["capacity"] or "has none"
    return summary


def _cell(own: Sequence[Mapping[str, Any]]) -> str:
    """Return the wrong quantities of a system's findings in words; "" if there are no findings."""
    if not own:
        return ""
    wrong = []
    for row in own:
        if not row["holds"]:
            wrong.append("fails" if row["failed"] else row["quantity"].partition(" over ")[0])
    return ", ".join(dict.fromkeys(wrong)) or "passes"


def _wrong(row: Mapping[str, Any]) -> str:
    """Return a wrong finding in words."""
    if row["failed"]:
        return str(row["failed"])
    if not math.isfinite(row["error"]):
        name, _, _ = row["quantity"].partition(" over ")
        return f"{name} is not a number"
    wrong = f"{row['quantity']} wrong by {row['error']:.1e}"
    if row["factor"] is None:
        return wrong
    return f"{wrong}, {row['factor']:.4g} times what it should be"


BENCHMARK = Benchmark(
    name="certificates",
    description=DESCRIPTION,
    options=CertificateOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=tables,
    page=page,
    page_marks=MARKS,
    packages=("torch", *(system.package for system in SYSTEMS.values())),
)
