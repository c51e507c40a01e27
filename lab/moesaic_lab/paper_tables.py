"""Tables that only one paper's page has: a figure or table of the paper beside ours.

Rows are those of committed results of benchmarks, dicts by key. The key "plain_over_this" has a
gain: the time without a technique over that with it; "time_ratio" is the inverse. Locality is 0 if
all samples choose experts alike, and 1 if each has experts of its own. `two_stage` is NetMoE's
placement of samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic_lab.gates_loss import table_3
from moesaic_lab.paper_pairs import Row
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.tables import markdown_table, share

SYNTHETIC = ("2x2", "4x2")
"""How the names of loads begin that a Zipf law draws."""


def tables_of(paper: str, results: Mapping[str, Any]) -> list[str]:
    """Return the tables of a paper's page."""
    if paper == "fastermoe":
        rows = results["balance"]["rows"]
        return [predictor(rows), *by_load(rows), times_to_loss(results["gates_loss"]["rows"])]
    if paper == "netmoe":
        rows = results["netmoe"]["rows"]
        simulated = [row for row in results["reproduce"]["rows"] if row["paper"] == "netmoe"]
        return [trained(rows), predicted_and_real(rows), over_steps(rows), bounds(simulated)]
    return [perplexities(results["codec_convergence"]["rows"])] if paper == "schemoe" else []


def predictor(rows: Sequence[Row]) -> str:
    """Return R^2 of FasterMoE's equations 1 and 2 together against the measured layers without a
    technique."""
    plain = [row for row in rows if row.get("part") == "bed" and row["method"] == "plain ep"]
    measured = [row["median_seconds"] for row in plain]
    errors = [
        row["communication_seconds"] + row["computing_seconds"] - row["median_seconds"]
        for row in plain
    ]
    mean = statistics.mean(measured)
    unexplained = sum(error**2 for error in errors)
    spread = sum((each - mean) ** 2 for each in measured)
    r2 = 1 - unexplained / spread
    johnny = read_book().value("fastermoe.predictor.johnny")
    trevor = read_book().value("fastermoe.predictor.trevor")
    return (
        "Section 5.3: the time of the busiest link (equation 2) plus that of the busiest rank "
        f"(equation 1) against {len(plain)} measured layers without a technique: R^2 {r2:.3f}, "
        f"published end to end {johnny:g} on johnny and {trevor:g} on trevor (`balance.json`)."
    )


def by_rule(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return the measured methods of every load by name."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("part") == "bed":
            cases.setdefault(row["case"], {})[row["method"]] = row
    return cases


def by_load(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the measured gains of FasterMoE's techniques under every load, with our rule for
    shadows in both columns that have shadows, and the published rule in the last: the loads of a
    Zipf law, and those recorded."""
    names = ("shadow", "smart schedule", "smart + shadow", "shadow, published")
    head = ["load", "bed", "MaxVio", "shadowing", "smart schedule", "both"]
    head.append("shadowing, published rule")
    cases = by_rule(rows)
    for title, is_synthetic in (("a synthetic Zipf law", True), ("recorded loads", False)):
        lines = [head]
        for case, methods in cases.items():
            if case.startswith(SYNTHETIC) is not is_synthetic:
                continue
            gains = []
            for name in names:
                row = methods[name]
                interval = span(row["plain_over_this_95"])
                gains.append(f"{row['plain_over_this']:.2f} ({interval})")
            plain = methods["plain ep"]
            lines.append([case, plain["bed"], share(plain["max_vio"]), *gains])
        yield (
            f"### By load: {title}\n\nFastMoE's time over that with each technique, shadows by "
            f"our rule but in the last column:\n\n{markdown_table(lines)}"
        )


def times_to_loss(rows: Sequence[Row]) -> str:
    """Return FasterMoE's Table 3 beside our gates: steps, time of a step and time to a loss."""
    value = read_book().value
    times = table_3()
    steps = value("fastermoe.steps.gate") / value("fastermoe.steps.plain")
    step = value("fastermoe.step.gate") / value("fastermoe.step.plain")
    lines = [
        [
            "gate over plain top-2",
            *("a step, published", "here", "steps to a loss, published", "here"),
            *("time to a loss, published", "here"),
        ]
    ]
    for row in rows[1:]:  # the first is plain top-2 itself
        gate = row["gate"]
        published_step = ""
        published_steps = ""
        published_time = share(times[gate]) if gate in times else ""
        if gate == "topology":  # only of this gate the paper prints steps and their time
            published_step = share(step)
            published_steps = share(steps)
            published_time = f"{times[gate]:.3f}"
        here = f"{row['time_to_loss_ratio']:.2f} ({row['time_to_loss_least']:.2f} to "
        here += f"{row['time_to_loss_most']:.2f} by seed)"
        lines.append(
            [
                gate,
                *(published_step, share(row["step_time_ratio"])),
                *(published_steps, share(row["steps_to_loss_ratio"])),
                *(published_time, here),
            ]
        )
    return (
        "### Table 3: time to a loss\n\nThe topology gate over FasterMoE without it, GShard and "
        f"BASE over FastMoE's top-2 (`gates_loss.json`):\n\n{markdown_table(lines)}"
    )


def perplexities(rows: Sequence[Row]) -> str:
    """Return ScheMoE's Table 6 beside our perplexities."""
    # The rows with more steps only show that training has converged.
    fewest = min(row["steps"] for row in rows)
    lines = [["model or codec", "published", "over no codec", "here", "least to most", "over no"]]
    found = {row["codec"]: row for row in rows if row["steps"] == fewest}
    base = found["none"]
    for codec, row in found.items():
        printed = row["published"]
        moved = ""
        if printed is not None:
            moved = f"{printed - base['published']:+.2f}"
        lines.append(
            [
                {"dense": "dense model", "none": "MoE, no codec"}.get(codec, codec),
                "" if printed is None else f"{printed:g}",
                moved,
                share(row["score"]),
                span([row["least"], row["most"]]),
                f"{row['score'] - base['score']:+.3f}",
            ]
        )
    return (
        "### Table 6: perplexity under codecs\n\nIn the paper int8 costs perplexity and zfp does "
        "not. Here zfp moves it more than int8, and neither by more than seeds differ "
        f"(`codec_convergence.json`, a model of our own):\n\n{markdown_table(lines)}"
    )


def placed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of placement under the recorded routing of trained models."""
    return [row for row in rows if row["part"] == "trained" and row["method"] == "two_stage"]


def measured_gains(rows: Sequence[Row]) -> list[float]:
    """Return the measured gains of rows, as far as they were measured."""
    return [1 / row["time_ratio"] for row in rows if "time_ratio" in row]


def trained(rows: Sequence[Row]) -> str:
    """Return what placement saves and gains under the recorded routing of trained models; "" if
    that was not run."""
    chosen = placed(rows)
    lines = [
        [
            "trained on",
            "steps",
            "locality, as a share",
            "saved between nodes, simulated",
            "gain, simulated",
            "gain, measured",
        ]
    ]
    for text in dict.fromkeys(row["text"] for row in chosen):
        steps = sorted({row["step"] for row in chosen if row["text"] == text})
        middle = len(steps) // 2
        for half in (steps[:middle], steps[middle:]):
            of_half = [row for row in chosen if row["text"] == text and row["step"] in half]
            simulated = [row for row in of_half if "time_ratio" not in row]
            measured = []
            for row in of_half:
                if "time_ratio" in row:
                    interval = span([1 / row["time_ratio_high"], 1 / row["time_ratio_low"]])
                    measured.append(f"{row['bed']}: {1 / row['time_ratio']:.2f} ({interval})")
            saved = span([100 * row["predicted_inter_saved"] for row in simulated], "%")
            gain = span([1 / row["predicted_time_ratio"] for row in simulated])
            locality = span([row["locality"] for row in simulated])
            lines.append(
                [text, f"{half[0]} to {half[-1]}", locality, saved, gain, "; ".join(measured)]
            )
    return markdown_table(lines) if chosen else ""


def predicted_and_real(rows: Sequence[Row]) -> str:
    """Return, like NetMoE's figure 7, the predicted and the measured gain of placement."""
    lines = [["bed", "routing", "locality", "gain, predicted", "gain, measured"]]
    for row in rows:
        if row.get("method") != "two_stage" or "time_ratio" not in row:
            continue
        bed = row.get("bed", row["part"])
        routing = "synthetic"
        if "text" in row:
            routing = f"{row['text']}, step {row['step']}"
        gains = [share(1 / row[key]) for key in ("predicted_time_ratio", "time_ratio")]
        lines.append([bed, routing, share(row["locality"]), *gains])
    return (
        "### Figure 7: predicted and real gain\n\nOf layers in a row (`netmoe.json`):\n\n"
        f"{markdown_table(lines)}"
    )


def over_steps(rows: Sequence[Row]) -> str:
    """Return, like NetMoE's figure 10, what placement saves and moves over a training."""
    lines = [["trained on", "step", "saved between nodes", "moved to another node", "device"]]
    for row in placed(rows):
        if "time_ratio" not in row:
            keys = ("predicted_inter_saved", "moved_nodes", "moved_devices")
            lines.append(
                [row["text"], str(row["step"]), *(f"{100 * row[key]:.0f} %" for key in keys)]
            )
    return (
        "### Figure 10: saving and moved samples over a training\n\nRouting that was recorded of "
        f"our own models, simulated on NetMoE's cluster:\n\n{markdown_table(lines)}"
    )


def bounds(rows: Sequence[Row]) -> str:
    """Return by how much each saving between nodes could speed a layer up if it were nothing but
    messages between nodes."""
    lines = [["nodes", "model", "saving, published", "bound", "saving, simulated", "bound"]]
    for row in rows:
        if not row["cell"].startswith("netmoe.change."):
            continue
        _, _, gpus, model = row["cell"].split(".")
        cells = []
        for change in (row["published"], row["ours"]):  # percent, negative if it saves
            if change is None:
                cells += ["", ""]
            else:
                cells += [f"{-change:.1f} %", share(1 / (1 + change / 100))]
        lines.append([str(int(gpus) // 8), model, *cells])
    value = read_book().value("netmoe.speedup.fastmoe")
    return (
        "### Table 5: the bound of each model\n\nThe most that a saving between nodes allows, for "
        f"the published speed-up of up to {value:g} over FastMoE:\n\n{markdown_table(lines)}"
    )


def span(values: Sequence[float], unit: str = "") -> str:
    """Return the least and the largest of some figures: whole ones with a unit, else with two
    decimals."""
    digits = 0 if unit else 2
    suffix = f" {unit}" if unit else ""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}{suffix}"
