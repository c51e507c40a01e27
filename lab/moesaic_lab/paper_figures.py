"""The measured figures that the written part of a paper's page names, in words.

A page has `{NAME}` where a figure goes, so that none is typed by hand. `results` are the contents
of the committed files of results, by name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic_lab.gates_loss import table_3
from moesaic_lab.headlines import COMPARISONS, SLOWER
from moesaic_lab.paper_pairs import Row, pairs
from moesaic_lab.paper_tables import measured_gains, placed
from moesaic_lab.pays import TECHNIQUES
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.tables import share

Results = Mapping[str, Any]


def figures_of(paper: str, results: Results) -> dict[str, str]:
    """Return the figures of a paper's page by name."""
    about = read_book().publications[paper]
    rows = [row for row in results["reproduce"]["rows"] if row["paper"] == paper]
    errors = [r["error"] for r in rows if r["role"] == "validation" and r["unit"] == "x"]
    claims = {claim["name"]: claim["value"] for claim in results["reproduce"]["claims"]}
    return {
        "citation": about.short,
        "title": about.title,
        "authors": about.authors,
        "venue": about.venue,
        "year": str(about.year),
        "error.worst": f"{100 * max(errors, default=0.0):.0f}",
        "error.median": f"{100 * claims[f'reproduce.{paper}.error']:.0f}",
        **OF_PAPERS[paper](results),
    }


def parm(results: Results) -> dict[str, str]:
    """Return SAA's gains on few and many tokens per rank, and what Algorithm 1 chose."""
    found: dict[str, str] = {}
    for name, bed in (("few", "4x4"), ("many", "2x2")):
        gains = pairs(results["layer"]["rows"], "saa", "", bed)
        found |= {
            f"saa.{name}.layers": str(len(gains)),
            f"saa.{name}.faster": str(sum(gain > 1 for gain in gains)),
            f"saa.{name}.gain": share(statistics.median(gains)),
        }
    for make in COMPARISONS["parm"]:
        comparison = make(SLOWER)
        # The first headline says "..., which is SCHEDULE here".
        _, _, after = comparison.headlines[0].what.partition(", which is ")
        schedule, *_ = after.split()
        found[f"chosen.{comparison.name.removeprefix('parm-')}"] = schedule
    return found


def schemoe(results: Results) -> dict[str, str]:
    """Return what Pipe-A2A gains, the ablation, and the simulated steps' error."""
    # Gains of pairs that differ by the all-to-all: of layers, and of all-to-alls alone.
    layers = pairs(results["model"]["rows"], "pipelined", "linear")
    moves = pairs(results["comm"]["rows"], "pipelined", "linear")
    ablation = [row for row in results["layer"]["rows"] if row["part"] == "ablation"]
    steps = [
        row["error"]
        for row in results["reproduce"]["rows"]
        if row["cell"].startswith("schemoe.step.") and row["error"] is not None
    ]
    findings = results["reproduce"]["papers"]["schemoe"]["findings"]
    without_codec = [each["ours"] for each in findings if "without a codec" in each["statement"]]
    return {
        "pipe.layers": str(len(layers)),
        "pipe.layers.faster": str(sum(gain > 1 for gain in layers)),
        "pipe.layers.most": share(max(layers)),
        "pipe.moves": str(len(moves)),
        "pipe.moves.faster": str(sum(gain > 1 for gain in moves)),
        "ablation.all": share(max(row["first_over_this"] for row in ablation)),
        "error.steps": f"{100 * max(steps):.0f}",
        "layers.bare": without_codec[0],
    }


def tutel(results: Results) -> dict[str, str]:
    """Return the memory of a layer and the accuracy by router."""
    memory = {
        f"memory.{row['tokens']}": share(row["measured_gib"])
        for row in results["layer_memory"]["rows"]
        if row["measured_gib"] is not None
    }
    page_names = {"switch": "linear", "cosine": "cosine"}
    routers = {
        f"router.{page_names[row['router']]}": f"{100 * row['accuracy']:.1f}"
        for row in results["vision_sweeps"]["rows"]
        if row["table"] == "13" and row["router"] in page_names
    }
    return memory | routers


def fastermoe(results: Results) -> dict[str, str]:
    """Return the topology gate's figures, and where the schedule gains on top of shadowing."""
    gate = next(row for row in results["gates_loss"]["rows"] if row["gate"] == "topology")
    on_top = next(each for each in TECHNIQUES if each.name == "smart schedule over shadowing")
    gains = []
    for result, *words in on_top.measured:
        gains += pairs(results[result]["rows"], *words)
    return {
        "gate.step": share(gate["step_time_ratio"]),
        "gate.time": share(gate["time_to_loss_ratio"]),
        "gate.least": share(gate["time_to_loss_least"]),
        "gate.most": share(gate["time_to_loss_most"]),
        "gate.steps": str(gate["steps"]),
        "table3.time": f"{table_3()['topology']:.3f}",
        "both.faster": str(sum(gain > 1 for gain in gains)),
        "both.layers": str(len(gains)),
    }


def netmoe(results: Results) -> dict[str, str]:
    """Return what placement costs without locality, and gains under trained routing."""
    rows = results["netmoe"]["rows"]
    beds = [row for row in rows if row["part"] in ("2x2", "4x2") and row["method"] == "two_stage"]
    costs = [100 * (row["time_ratio"] - 1) for row in beds if not row["locality"]]
    trained = placed(rows)
    simulated = [row for row in trained if "time_ratio" not in row]
    saved = [100 * row["predicted_inter_saved"] for row in simulated]
    early, late = halved(trained)
    return {
        "cost.least": f"{min(costs):.0f}",
        "cost.most": f"{max(costs):.0f}",
        "trained.locality": words([row["locality"] for row in simulated]),
        "trained.saved": f"{min(saved):.0f} to {max(saved):.0f} %",
        "trained.early": words(measured_gains(early)),
        "trained.late": words(measured_gains(late)),
        "placement.cases": str(len(results["placement_cases"]["rows"])),
    }


def halved(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the early steps, the first half of each text's, and those of the late
    ones."""
    early: list[Row] = []
    late: list[Row] = []
    for text in dict.fromkeys(row["text"] for row in rows):
        of_text = [row for row in rows if row["text"] == text]
        steps = sorted({row["step"] for row in of_text})
        first = set(steps[: len(steps) // 2])
        early += [row for row in of_text if row["step"] in first]
        late += [row for row in of_text if row["step"] not in first]
    return early, late


def words(values: Sequence[float]) -> str:
    """Return the least and the largest of some ratios."""
    return f"{min(values):.2f} to {max(values):.2f}"


OF_PAPERS: dict[str, Callable[[Results], dict[str, str]]] = {
    "parm": parm,
    "schemoe": schemoe,
    "tutel": tutel,
    "fastermoe": fastermoe,
    "netmoe": netmoe,
}
"""What gives a paper's figures."""
