"""Writes the HTML report about runs (summary, charts, decisions of balancing and planner) and the page about a routing trace.

Pages are self-contained: they load nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from moesaic.report import charts
from moesaic.report.balance import balance_section, plans_section
from moesaic.report.style import (
    INK,
    Drawn,
    Picture,
    PictureGrid,
    Section,
    figure,
    layer_colours,
    line,
    page_text,
    run_colour,
    write_text,
)
from moesaic.report.summary import (
    NONE,
    RunSummary,
    Series,
    cards,
    damage_as_input_error,
    mean_over_layers,
    read_runs,
)
from moesaic.traces.load import LayerLoad
from moesaic.traces.trace import Trace, steps_in_words


def write_report(run_folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report about the runs and return its path.

    Args:
        run_folders: the runs' folders.
        out: the file to write; None for report.html in the first run's folder.

    Raises:
        InputError: a folder holds no run, or the file cannot be written.
    """
    return write_page(read_runs(run_folders), out)


def write_page(runs: Sequence[RunSummary], out: Path | None = None) -> Path:
    """Write the report about runs that have been read, and return its path.

    Raises:
        InputError: the file cannot be written, or a run's files hold values that no run writes.
    """
    with damage_as_input_error(runs[0].folder):
        text = Page(runs).text()
    return write_text(text, out or runs[0].folder / "report.html")


class Page:
    """Builds the HTML of one report."""

    def __init__(self, runs: Sequence[RunSummary]) -> None:
        self.runs = runs
        self.drawn = Drawn()

    def text(self) -> str:
        """Return the whole HTML file."""
        coloured = [(run, run_colour(index)) for index, run in enumerate(self.runs)]
        sparse = [(run, colour) for run, colour in coloured if run.layers]
        sections = [
            *_section("Learning", self._learning()),
            *_section("Speed and optimisation", charts.speed(self.runs)),
            *[section for run in self.runs if (section := plans_section(run))],
            *[section for run, colour in coloured if (section := balance_section(run, colour))],
            *_section("Balance compared", charts.comparison(self.runs) if len(sparse) > 1 else ()),
            *[self._experts(run, colour) for run, colour in sparse],
        ]
        return page_text(
            "report.html",
            self.drawn,
            what="report",
            title=" vs ".join(run.name for run in self.runs),
            runs=[{"name": run.name, "colour": colour} for run, colour in coloured],
            words=[f"{run.name}: {phrase}." for run in self.runs for phrase in run.stragglers],
            cards=cards(self.runs),
            sections=sections,
            configuration=self._configuration(),
        )

    def _learning(self) -> list[Picture]:
        return [
            Picture(
                "Loss over steps",
                "Training loss of single steps (thin) and validation loss. Double-click for the whole range.",
                charts.loss_over_steps(self.runs),
            ),
            Picture(
                "Validation loss over training time",
                "Takes the time of a step into account. Evaluation time is not counted.",
                charts.validation_over_time(self.runs),
            ),
        ]

    def _experts(self, run: RunSummary, colour: str) -> Section:
        maps = [
            Picture(
                f"Load of layer {number}",
                "Each expert's load relative to the mean.",
                charts.expert_loads(layer.load_steps, layer.loads),
            )
            for number, layer in enumerate(run.layers)
            if layer.loads
        ]
        return Section(
            title="Experts of",
            run=run.name,
            colour=colour,
            blocks=[
                charts.legend(run),
                PictureGrid(charts.balance_of_layers(run)),
                PictureGrid(charts.experts_of_layers(run), "quarter"),
                PictureGrid(maps),
                charts.table(run),
            ],
        )

    def _configuration(self) -> list[dict[str, Any]]:
        """Return the tables of the configuration: the fields that differ between runs (if any), and all fields."""
        configurations = [flattened(run.config) for run in self.runs]
        fields = list(dict.fromkeys(name for configuration in configurations for name in configuration))
        rows = {name: [configuration.get(name, NONE) for configuration in configurations] for name in fields}
        different = {name: values for name, values in rows.items() if len(set(values)) > 1}
        tables = [{"title": f"All fields ({len(rows)})", "rows": list(rows.items()), "is_open": False}]
        if different:
            title = f"Fields that differ ({len(different)})"
            tables.insert(0, {"title": title, "rows": list(different.items()), "is_open": True})
        return tables


def flattened(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as a flat one: dotted name -> value as text."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[prefix + name] = ", ".join(map(str, value)) or "none"
        elif value is None or isinstance(value, bool):
            flat[prefix + name] = {None: "none", True: "yes", False: "no"}[value]
        else:
            flat[prefix + name] = str(value)
    return flat


def _section(title: str, pictures: Sequence[Picture]) -> list[Section]:
    """Return a list with the section of these charts; empty if all charts are empty."""
    return (
        [Section(title=title, blocks=[PictureGrid(pictures)])] if any(chart.figure.data for chart in pictures) else []
    )


MOST_HEATMAPS = 12
"""Largest number of layers for which the experts' loads are drawn; of deeper models, this many are chosen, evenly spread."""


def write_trace_page(trace: Trace, loads: Sequence[LayerLoad], path: Path) -> Path:
    """Write the page about a routing trace and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    shown = drawn_layers(len(loads))
    pictures = [
        Picture("MaxVio", "Largest load over mean load, minus 1; 0 is balanced.", violations(trace.steps, loads)),
        *(
            Picture(
                f"Load of the experts, layer {load.layer}",
                f"locality {load.locality:.3f}, drift {load.drift:.3f} a step, {load.dead_experts} dead experts",
                charts.expert_loads(trace.steps, load.shares.tolist()),
            )
            for load in (loads[number] for number in shown)
        ),
    ]
    left_out = "" if len(shown) == len(loads) else f" The charts show {len(shown)} of {len(loads)} layers."
    lead = f"{trace_in_words(trace)}.{left_out}"
    title = Path(trace.name).name
    return write_text(page_text("charts.html", Drawn(), what="trace", title=title, lead=lead, charts=pictures), path)


def violations(steps: Sequence[int], loads: Sequence[LayerLoad]) -> go.Figure:
    """Draw MaxVio over steps: a thin line per layer, and the mean of the layers in `INK`."""
    chart = figure("optimizer step", "MaxVio", height=320, legend=True, rangemode="tozero")
    series = [Series(tuple(steps), load.max_violation) for load in loads]
    for load, of_layer, colour in zip(loads, series, layer_colours(len(loads))):
        name = f"layer {load.layer}"
        chart.add_trace(
            line(name, of_layer.steps, of_layer.values, colour, width=1.4, showlegend=len(loads) <= MOST_HEATMAPS)
        )
    if len(series) > 1:
        mean = mean_over_layers(series)
        chart.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6, showlegend=True))
    return chart


def trace_in_words(trace: Trace) -> str:
    """Return a one-line description of a trace."""
    shape = trace.shape
    contents = "every token's experts" if trace.holds == "tokens" else "counts"
    micro = f" x {shape.accumulation} micro-batches" if shape.accumulation > 1 else ""
    return (
        f"{contents} of {shape.num_layers} MoE layers with {shape.num_experts} experts, {shape.top_k} per token; steps "
        f"{steps_in_words(trace.steps)}{micro} of {shape.sequences} sequences of {shape.seq_len} tokens"
    )


def drawn_layers(count: int) -> list[int]:
    """Return which of `count` layers get a heatmap of their experts."""
    if count <= MOST_HEATMAPS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_HEATMAPS - 1)) for place in range(MOST_HEATMAPS)})
