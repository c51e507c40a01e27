"""The page about runs: words, cards, charts, and what balancing and the planner did. And the page about a routing trace.

Pages load nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from moesaic.report import balance, charts
from moesaic.report.balance import plans_section
from moesaic.report.charts import load_heatmap
from moesaic.report.style import INK, figure, layer_colours, line, run_colour
from moesaic.report.summary import LayerSeries, RunSummary, Series, mean_over_layers, read_runs, telling_damage
from moesaic.report.template import Drawn, Picture, PictureGrid, Section, page_text, write_text
from moesaic.report.words import NONE, cards, in_words
from moesaic.traces.load import LayerLoad
from moesaic.traces.trace import Trace, steps_in_words
from moesaic.train.metrics import read_metrics


def write_report(run_folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page about the runs; returns its path.

    Args:
        run_folders: the runs, in the order in which they are shown.
        out: the file; None for report.html in the first run's folder.

    Raises:
        InputError: if a folder is no run, or the file cannot be written.
    """
    return write_page(read_runs(run_folders), out)


def write_page(runs: Sequence[RunSummary], out: Path | None = None) -> Path:
    """Write the page about runs that have been read; returns its path.

    Raises:
        InputError: if the file cannot be written, or a run holds what no run writes.
    """
    with telling_damage(runs[0].folder):
        text = Page(runs).text()
    return write_text(text, out or runs[0].folder / "report.html")


class Page:
    """Builds the text of one page.

    Args:
        runs: what it is about, at least one.
    """

    def __init__(self, runs: Sequence[RunSummary]) -> None:
        self.runs = runs
        self.drawn = Drawn()

    def text(self) -> str:
        """Return the whole HTML file."""
        sections = [
            *_section("Learning", self._learning()),
            *_section("Speed and optimisation", self._speed()),
            *[section for run in self.runs if (section := plans_section(run))],
            *[section for index in range(len(self.runs)) if (section := self._balance(index))],
            *_section("Balance compared", self._comparison()),
            *[self._experts(index) for index, run in enumerate(self.runs) if run.layers],
        ]
        return page_text(
            "report.html",
            self.drawn,
            what="report",
            title=" vs ".join(run.name for run in self.runs),
            runs=[{"name": run.name, "colour": run_colour(index)} for index, run in enumerate(self.runs)],
            words=in_words(self.runs),
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
                "What a step costs counts here. Evaluation time is left out.",
                charts.validation_over_time(self.runs),
            ),
        ]

    def _speed(self) -> list[Picture]:
        names = list(dict.fromkeys(name for run in self.runs for name in run.auxiliary))
        return [
            Picture("Throughput", "Training tokens per second since the line before.", charts.throughput(self.runs)),
            Picture("MFU", "The model's FLOPs over the matmul peak measured at the start.", charts.mfu(self.runs)),
            Picture("Gradient norm", "Over all parameters, before clipping.", charts.gradient_norm(self.runs)),
            Picture("Learning rate", "Linear warm-up, then a cosine.", charts.learning_rate(self.runs)),
            *[
                Picture(
                    f"Auxiliary loss: {name.replace('_', ' ')}",
                    "Before its coefficient, mean over the MoE layers.",
                    charts.auxiliary_loss(self.runs, name),
                )
                for name in names
            ],
        ]

    def _comparison(self) -> list[Picture]:
        if sum(bool(run.layers) for run in self.runs) < 2:
            return []
        return [
            Picture(
                "MaxVio",
                "Largest load over mean load, minus 1; mean over the layers.",
                charts.mean_max_violation(self.runs),
            ),
            Picture(
                "Churn",
                "Tokens whose experts changed in one optimizer step; mean over the layers.",
                charts.mean_churn(self.runs),
            ),
        ]

    def _experts(self, index: int) -> Section:
        run = self.runs[index]
        large = [
            Picture("MaxVio", "Largest load over mean load, minus 1; 0 is balance.", charts.max_violation(run)),
            Picture(
                "Churn",
                "Tokens of a fixed probe batch whose experts changed in one optimizer step.",
                charts.churn(run),
            ),
        ]
        small = [
            Picture("Dead experts", "Chosen by no token since the line before.", charts.dead_experts(run)),
            Picture("Dropped copies", "For lack of capacity.", charts.dropped_share(run)),
            Picture("Load entropy", "1 is balance, 0 one expert for all.", charts.entropy(run)),
            Picture("Needed capacity factor", "The smallest that drops nothing.", charts.needed_capacity_factor(run)),
        ]
        maps = [
            Picture(f"Load of layer {number}", "Each expert's load over the mean.", charts.load_heatmap(layer))
            for number, layer in enumerate(run.layers)
            if layer.loads
        ]
        return Section(
            title="Experts of",
            run=run.name,
            colour=run_colour(index),
            blocks=[
                charts.legend(run),
                PictureGrid(large),
                PictureGrid(small, "quarter"),
                PictureGrid(maps),
                charts.table(run),
            ],
        )

    def _balance(self, index: int) -> Section | None:
        """Return the section about what moved because routing is skewed; None where nothing was decided."""
        run = self.runs[index]
        found = balance.balance_of(read_metrics(run.folder))
        if found is None:
            return None
        drawn = [
            Picture(
                "Load of the busiest rank",
                "Over the mean, mean over the layers; 1 is balance.",
                balance.busiest_rank(found),
            ),
            Picture(
                "Bytes that moved", "Per call, forward and backward, mean over the layers.", balance.bytes_moved(found)
            ),
        ]
        layer = balance.most_skewed(found)
        for name, when in (("rows_alone", "if left alone"), ("rows", "as decided")):
            if layer is not None:
                title = f"Load per rank of layer {layer}, {when}"
                caption = "The layer with the most skew; copies that each rank of ep computes, over the mean."
                drawn.append(Picture(title, caption, balance.load_per_rank(found, layer, name)))
        chosen = Picture("Decisions", "What each layer ran most since the line before.", balance.decisions(found))
        return Section(
            title="Balance of",
            run=run.name,
            colour=run_colour(index),
            text=balance.told(found),
            blocks=[PictureGrid(drawn), balance.legend(found.options), PictureGrid([chosen]), balance.table(found)],
        )

    def _configuration(self) -> list[dict[str, Any]]:
        """Return the tables of the configuration: the fields that differ, and all."""
        tables = [flattened(run.config) for run in self.runs]
        fields = list(dict.fromkeys(name for table in tables for name in table))
        rows = {name: [table.get(name, NONE) for table in tables] for name in fields}
        different = {name: values for name, values in rows.items() if len(set(values)) > 1}
        found = [{"title": f"All fields ({len(rows)})", "rows": list(rows.items()), "is_open": False}]
        if different:
            title = f"Fields that differ ({len(different)})"
            found.insert(0, {"title": title, "rows": list(different.items()), "is_open": True})
        return found


def flattened(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as dotted names and texts."""
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


def _section(title: str, found: Sequence[Picture]) -> list[Section]:
    """Return the section of these charts; none where none of them has a line."""
    return [Section(title=title, blocks=[PictureGrid(found)])] if any(chart.figure.data for chart in found) else []


MOST_HEATMAPS = 12
"""Layers whose experts are drawn; of deeper models as many, evenly spread."""


def write_trace_page(trace: Trace, loads: Sequence[LayerLoad], path: Path) -> Path:
    """Write the page; returns its path.

    Args:
        trace: what it is about.
        loads: its figures, by layer.
        path: of the file.

    Raises:
        InputError: if the file cannot be written.
    """
    shown = drawn_layers(len(loads))
    charts = [
        Picture("MaxVio", "Largest load over mean load, minus 1; 0 is balance.", violations(trace.steps, loads)),
        *(
            Picture(
                f"Load of the experts, layer {load.layer}",
                f"locality {load.locality:.3f}, drift {load.drift:.3f} a step, {load.dead_experts} dead experts",
                experts(trace.steps, load),
            )
            for load in (loads[number] for number in shown)
        ),
    ]
    left_out = "" if len(shown) == len(loads) else f" Drawn are {len(shown)} of {len(loads)} layers."
    lead = f"{trace_in_words(trace)}.{left_out}"
    title = Path(trace.name).name
    return write_text(page_text("charts.html", Drawn(), what="trace", title=title, lead=lead, charts=charts), path)


def violations(steps: Sequence[int], loads: Sequence[LayerLoad]) -> go.Figure:
    """Draw MaxVio over steps, a thin line per layer and their mean in ink."""
    made = figure("optimizer step", "MaxVio", height=320, legend=True, rangemode="tozero")
    series = [Series(tuple(steps), load.max_violation) for load in loads]
    for load, each, colour in zip(loads, series, layer_colours(len(loads))):
        name = f"layer {load.layer}"
        made.add_trace(line(name, each.steps, each.values, colour, width=1.4, showlegend=len(loads) <= MOST_HEATMAPS))
    if len(series) > 1:
        mean = mean_over_layers(series)
        made.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6, showlegend=True))
    return made


def experts(steps: Sequence[int], load: LayerLoad) -> go.Figure:
    """Draw each expert's load over the mean load of a layer, experts by steps."""
    empty = Series()
    shares = tuple(tuple(row) for row in load.shares.tolist())
    series = LayerSeries(
        max_violation=empty, dead_experts=empty, dropped_share=empty, entropy=empty, needed_capacity_factor=empty,
        churn=empty, load_steps=tuple(steps), loads=shares, dropped=0,
    )  # fmt: skip
    return load_heatmap(series)


def trace_in_words(trace: Trace) -> str:
    """Return what a trace holds in a line."""
    shape = trace.shape
    held = "every token's experts" if trace.holds == "tokens" else "counts"
    micro = f" x {shape.accumulation} micro-batches" if shape.accumulation > 1 else ""
    return (
        f"{held} of {shape.num_layers} MoE layers with {shape.num_experts} experts, {shape.top_k} per token; steps "
        f"{steps_in_words(trace.steps)}{micro} of {shape.sequences} sequences of {shape.seq_len} tokens"
    )


def drawn_layers(count: int, most: int = MOST_HEATMAPS) -> list[int]:
    """Return which of so many layers get a picture of their experts."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
