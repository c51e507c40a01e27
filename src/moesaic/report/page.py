"""Writes the HTML report about runs: summary, charts, decisions of balancing and planner,
configuration.

Some charts compare runs: loss, speed, optimisation, and balance as the mean over the layers. Others
show one run's MoE layers. A chart leaves out runs that lack its number; the page leaves out empty
charts. Pages are self-contained: they load nothing.

A *line* of metrics is one entry of a run's metrics.jsonl, a *number* one of its values by name. A
run has the colour and the symbol of its index among the runs in all charts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from moesaic.report.style import (
    INK,
    RUN_SYMBOLS,
    STEP,
    Drawn,
    Picture,
    Section,
    Table,
    expert_loads,
    figure,
    line,
    ordered_colours,
    page_text,
    part_colour,
    run_colour,
    save_page,
    time_unit,
)
from moesaic.report.summary import (
    NONE,
    RunSummary,
    Series,
    cards,
    damage_as_input_error,
    mean_over_layers,
    percent,
    read_runs,
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of one number of the metrics over steps."""

    title: str
    caption: str
    y_title: str
    number: str
    """Name of the number in the metrics."""
    y_axis: dict[str, str] = field(default_factory=dict)
    """Options of the y axis, as plotly calls them."""


OVER_STEPS = (
    Chart(
        title="Throughput",
        caption="Training tokens per second since the previous line of metrics.",
        y_title="tokens/s",
        number="tokens_per_second",
        y_axis={"tickformat": "~s"},
    ),
    Chart(
        title="MFU",
        caption="The model's FLOPs over the matmul peak measured at the start.",
        y_title="MFU (% of matmul peak)",
        number="mfu",
        y_axis={"tickformat": "~%"},
    ),
    Chart(
        title="Gradient norm",
        caption="Over all parameters, before clipping.",
        y_title="gradient norm",
        number="grad_norm",
    ),
    Chart(
        title="Learning rate",
        caption="Linear warm-up, then the decay.",
        y_title="learning rate",
        number="lr",
        y_axis={"exponentformat": "power"},
    ),
)
"""The charts about speed and optimisation."""
OF_LAYERS = (
    Chart(
        title="MaxVio",
        caption="Largest load over mean load, minus 1; 0 is balanced.",
        y_title="MaxVio",
        number="max_violation",
    ),
    Chart(
        title="Dead experts",
        caption="Chosen by no token since the previous line.",
        y_title="dead experts",
        number="dead_experts",
    ),
    Chart(
        title="Dropped copies",
        caption="For lack of capacity.",
        y_title="dropped (% of copies)",
        number="dropped_share",
        y_axis={"tickformat": "~%"},
    ),
    Chart(
        title="Load entropy",
        caption="1: balanced; 0: one expert gets all tokens.",
        y_title="entropy of the load",
        number="entropy",
        y_axis={"rangemode": "normal"},
    ),
    Chart(
        title="Needed capacity factor",
        caption="The smallest that drops nothing.",
        y_title="capacity factor",
        number="needed_capacity_factor",
        y_axis={"rangemode": "normal"},
    ),
)
"""The charts about the balance of MoE layers."""
MOST_NAMED = 12
"""Largest number of layers that a legend names."""
MEBIBYTE = 2**20
BYTES = {
    "token_bytes_alone": "tokens, left alone",
    "token_bytes": "tokens",
    "weight_bytes": "weights of experts",
    "sample_bytes_across": "samples, between nodes",
    "sample_bytes_inside": "samples, inside nodes",
}
"""Number -> name of the bytes that a call of a layer moves."""
SHOWN = 40
"""Largest number of decisions about plans in the table; the last ones are shown."""


def write_report(
    run_folders: Sequence[Path], out: Path | None = None, *, typed: bool = True
) -> Path:
    """Write the report about the runs and return its path.

    Args:
        out: the file to write; None for report.html in the first run's folder.
        typed: whether a user typed that path, which may then be a link.

    Raises:
        InputError: a folder holds no run, or the file cannot be written.
    """
    return write_page(read_runs(run_folders), out, typed=typed)


def write_page(runs: Sequence[RunSummary], out: Path | None = None, *, typed: bool = True) -> Path:
    """Write the report about runs that have been read, and return its path.

    Args:
        out: the file to write; None for report.html in the first run's folder.
        typed: whether a user typed `out`, which may then be a link.

    Raises:
        InputError: the file cannot be written, or a run's files hold values that no run writes.
    """
    first_folder = runs[0].folder
    with damage_as_input_error(first_folder):
        text = report_text(runs, Drawn())
    if out is None:
        return save_page(text, first_folder / "report.html", typed=False)
    return save_page(text, out, typed=typed)


def report_text(runs: Sequence[RunSummary], drawn: Drawn) -> str:
    """Return the HTML of a report; `drawn` collects its charts."""
    coloured = [(run, run_colour(index)) for index, run in enumerate(runs)]
    sections = [
        Section(title="Learning", charts=[loss_over_steps(runs), validation_over_time(runs)]),
        Section(title="Speed and optimisation", charts=over_steps(runs)),
    ]
    sections += filter(None, [plans_section(run) for run in runs])
    sections += filter(None, [balance_section(run, colour) for run, colour in coloured])
    sections += [_experts_section(run, colour) for run, colour in coloured if run.layers]
    sentences = []
    for run in runs:
        sentences += [f"{run.name}: {phrase}." for phrase in run.stragglers]

    return page_text(
        "report.html",
        drawn,
        what="report",
        title=" vs ".join(run.name for run in runs),
        runs=[{"name": run.name, "colour": colour} for run, colour in coloured],
        words=sentences,
        cards=cards(runs),
        sections=[section for section in sections if not _is_empty(section)],
        configuration=configuration(runs),
    )


def _is_empty(section: Section) -> bool:
    """Return whether a section has neither a table nor a chart with anything in it."""
    return not section.table and not any(chart.figure.data for chart in section.charts)


def loss_over_steps(runs: Sequence[RunSummary]) -> Picture:
    """Draw training loss (thin) and validation loss (markers) over steps.

    The initial axis excludes the first steep drop, which would flatten the rest of the curve.
    """
    # where a token is a byte, both losses are the same
    is_of_bytes = all(
        run.over_steps("val_loss") == run.over_steps("val_nats_per_byte") for run in runs
    )
    unit = "nats/byte" if is_of_bytes else "nats/token"
    chart = figure(STEP, f"loss ({unit})", height=340, legend=True)

    first_validations = []
    all_losses = []
    validation_lines = []
    for index, run in enumerate(runs):
        loss = run.over_steps("loss")
        validation = run.over_steps("val_loss")
        all_losses += [*loss.values, *validation.values]
        if len(validation) > 2:
            first_validations.append(validation.values[0])
        name = f"{run.name}, training"
        chart.add_trace(
            line(name, loss.steps, loss.values, run_colour(index), width=1, opacity=0.55)
        )
        if validation:
            name = f"{run.name}, validation"
            validation_lines.append(_validation(name, validation.steps, validation.values, index))
    chart.add_traces(validation_lines)  # in front

    if first_validations:
        # from a little above the first validation, at which the loss has fallen, to a little below
        # the smallest loss
        low = min(all_losses)
        highest = max(first_validations)
        high = highest + 0.12 * (highest - low)
        chart.update_yaxes(range=[low - 0.08 * (high - low), high])
    caption = (
        "Training loss of single steps (thin) and validation loss. Double-click for the whole "
        "range."
    )
    return Picture("Loss over steps", caption, chart)


def validation_over_time(runs: Sequence[RunSummary]) -> Picture:
    """Draw validation loss over training time, which takes the cost of a step into account."""
    unit, length = time_unit(max(run.training_seconds for run in runs))
    chart = figure(
        f"training time ({unit})", "validation loss (nats/byte)", height=340, legend=True
    )
    for index, run in enumerate(runs):
        losses = run.over_steps("val_nats_per_byte").values
        if losses:
            times = [second / length for second in run.over_steps("val_seconds").values]
            chart.add_trace(_validation(run.name, times, losses, index))
    chart.update_xaxes(rangemode="tozero", hoverformat=".1f")
    caption = "Takes the time of a step into account. Evaluation time is not counted."
    return Picture("Validation loss over training time", caption, chart)


def _validation(name: str, x: Sequence[float], y: Sequence[float], index: int) -> go.Scatter:
    """Return a run's line through validation losses, with markers."""
    marker = {
        "symbol": RUN_SYMBOLS[index % len(RUN_SYMBOLS)],
        "line": {"color": "#ffffff", "width": 1},
    }
    return line(
        name,
        x,
        y,
        run_colour(index),
        width=2.2,
        mode="lines+markers",
        marker=marker,
        showlegend=True,
    )


def over_steps(runs: Sequence[RunSummary]) -> list[Picture]:
    """Draw speed, optimisation, auxiliary losses and, of several runs, the mean MaxVio over steps:
    a line per run."""
    charts = list(OVER_STEPS)
    auxiliary: dict[str, None] = {}  # each name once
    for run in runs:
        auxiliary |= dict.fromkeys(run.auxiliary)
    for name in auxiliary:
        words = name.replace("_", " ")
        charts.append(
            Chart(
                title=f"Auxiliary loss: {words}",
                caption="Before its coefficient, averaged over the MoE layers.",
                y_title=words,
                number=name,
            )
        )

    pictures = []
    for chart in charts:
        series = [run.over_steps(chart.number) for run in runs]
        drawn = _per_run(runs, series, chart.y_title, **chart.y_axis)
        pictures.append(Picture(chart.title, chart.caption, drawn))

    num_sparse = len([run for run in runs if run.layers])  # runs with MoE layers
    if num_sparse > 1:
        means = []
        for run in runs:
            by_layer = [layer.over_steps("max_violation") for layer in run.layers]
            means.append(mean_over_layers(by_layer))
        caption = "Mean over each run's MoE layers; 0 is balanced."
        pictures.append(Picture("Balance compared", caption, _per_run(runs, means, "mean MaxVio")))
    return pictures


def _per_run(
    runs: Sequence[RunSummary], series: Sequence[Series], title: str, **y_axis: str
) -> go.Figure:
    """Draw a line for each run that has the number, `title` beside the y axis. A run has the same
    colour in all charts."""
    chart = figure(STEP, title, height=270, legend=len(runs) > 1, rangemode="tozero", **y_axis)
    for index, (run, values) in enumerate(zip(runs, series)):
        if values:
            chart.add_trace(
                line(run.name, values.steps, values.values, run_colour(index), showlegend=True)
            )
            if chart.data[1:]:  # not the first line, which a solid one of equal numbers would hide
                chart.data[-1].line.dash = "dash"
    return chart


def layer_charts(run: RunSummary) -> list[Picture]:
    """Draw the balance of a run's MoE layers over steps. The first chart has the legend of all."""
    pictures = []
    for number, chart in enumerate(OF_LAYERS):
        series = {
            f"layer {index}": layer.over_steps(chart.number)
            for index, layer in enumerate(run.layers)
        }
        drawn = per_layer(series, chart.y_title, **chart.y_axis)
        drawn.update_layout(showlegend=number == 0)
        pictures.append(Picture(chart.title, chart.caption, drawn))
    return pictures


def per_layer(series: Mapping[str, Series], title: str, **y_axis: str) -> go.Figure:
    """Draw a thin line per layer, by its name, and their mean in `INK`, `title` beside the y axis.
    The legend of a deep model has the mean alone."""
    chart = figure(STEP, title, height=280, legend=True, **{"rangemode": "tozero", **y_axis})
    is_shallow = len(series) <= MOST_NAMED
    for (name, values), colour in zip(series.items(), ordered_colours(len(series))):
        chart.add_trace(
            line(name, values.steps, values.values, colour, width=1.4, showlegend=is_shallow)
        )
    if len(series) > 1:
        mean = mean_over_layers(list(series.values()))
        chart.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6, showlegend=True))
    return chart


def _experts_section(run: RunSummary, colour: str) -> Section:
    """Return the section about the MoE layers of a run."""
    charts = [*layer_charts(run), *load_maps(run)]
    return Section(title="Experts of", run=run.name, colour=colour, charts=charts)


def load_maps(run: RunSummary) -> list[Picture]:
    """Draw a heatmap of the experts' loads for each of a run's MoE layers."""
    return [
        Picture(
            f"Load of layer {number}",
            "Each expert's load relative to the mean.",
            expert_loads(layer.load_steps, layer.loads),
        )
        for number, layer in enumerate(run.layers)
        if layer.loads
    ]


def balance_section(run: RunSummary, colour: str) -> Section | None:
    """Return the section about balancing of skewed routing; None for a run without an arbiter and
    moving samples.

    The numbers come from the first rank's metrics; they hold for all ranks, since these decide from
    the same counts.
    """
    lines = [
        entry
        for entry in run.lines
        if entry["kind"] == "train" and isinstance(entry.get("balance"), dict)
    ]
    if not lines:
        return None
    steps = [entry["step"] for entry in lines]
    layers = [entry["balance"]["layers"] for entry in lines]

    pictures = [
        Picture(
            "Load of the busiest rank",
            "Relative to the mean load, averaged over the layers; 1 is balanced.",
            _busiest(steps, layers),
        ),
        Picture(
            "Bytes that moved",
            "Per call, forward and backward, averaged over the layers.",
            _bytes_moved(steps, layers),
        ),
        Picture(
            "Decisions",
            "How often the layers ran each option since the previous line of metrics.",
            _options(steps, layers),
        ),
    ]
    return Section(title="Balance of", run=run.name, colour=colour, charts=pictures)


Layers = Sequence[Sequence[dict[str, Any]]]
"""By line of metrics, then by layer: the layer's numbers about balance."""


def _busiest(steps: Sequence[int], layers: Layers) -> go.Figure:
    """Draw the busiest rank's load over the mean load, left alone and as decided."""
    chart = figure(STEP, "busiest rank / mean", height=300, legend=True, rangemode="normal")
    for name, title in (("rows_alone", "left alone"), ("rows", "as decided")):
        if not _any_has(name, layers):
            continue
        loads = []
        for layers_of_line in layers:
            # for each layer that had any, the copies that each place of ep computes
            rows_by_layer = [rows for rows in _having(name, layers_of_line) if any(rows)]
            relative = [max(rows) * len(rows) / sum(rows) for rows in rows_by_layer]
            loads.append(_mean(relative, empty=1.0))
        chart.add_trace(line(title, steps, loads, part_colour(title), width=2.2, showlegend=True))
    return chart


def _bytes_moved(steps: Sequence[int], layers: Layers) -> go.Figure:
    """Draw the bytes that a call of a layer moves, by what they are."""
    chart = figure(STEP, "MiB per call, all ranks", height=300, legend=True)
    for name, title in BYTES.items():
        if _any_has(name, layers):
            sizes = [
                _mean(_having(name, layers_of_line), empty=0.0) / MEBIBYTE
                for layers_of_line in layers
            ]
            chart.add_trace(
                line(title, steps, sizes, part_colour(title), width=2.0, showlegend=True)
            )
    return chart


def _options(steps: Sequence[int], layers: Layers) -> go.Figure:
    """Draw how often each option of the arbiter was chosen, as a share of the calls."""
    calls_by_line = []  # for each line, option -> its calls, over all layers
    for layers_of_line in layers:
        calls = Counter[str]()
        for calls_of_layer in _having("options", layers_of_line):
            calls += Counter(calls_of_layer)
        calls_by_line.append(calls)
    chart = figure(
        STEP, "share of the calls", height=300, legend=True, rangemode="tozero", tickformat="~%"
    )
    for name in sorted(set[str]().union(*calls_by_line)):
        shares = [calls[name] / max(calls.total(), 1) for calls in calls_by_line]
        chart.add_trace(line(name, steps, shares, part_colour(name), width=2.0, showlegend=True))
    return chart


def _any_has(name: str, layers: Layers) -> bool:
    """Return whether any layer in any line has the number."""
    return any(name in layer for of_line in layers for layer in of_line)


def _having(name: str, layers: Sequence[dict[str, Any]]) -> list[Any]:
    """Return a number of all layers that have it."""
    return [layer[name] for layer in layers if name in layer]


def _mean(values: Sequence[float], *, empty: float) -> float:
    """Return the mean; `empty` for no values."""
    return sum(values) / len(values) if values else empty


def plans_section(run: RunSummary) -> Section | None:
    """Return the section about automatic changes of plan during a run; None if the run did not
    choose plans automatically."""
    plans = [each["plan"] for each in run.lines if isinstance(each.get("plan"), dict)]
    if not plans:
        return None
    last = plans[-1]
    text = (
        f"{last['switches']} changes of plan, {percent(last['explored_share'])} of the steps on "
        f"trial; at the end {last['running']} runs."
    )
    rows = []
    for entry in plans:
        # a bucket is the number of a range of loads
        for step, why, bucket, plan in entry["decisions"]:
            rows.append((str(step), why, str(bucket), plan))
    table = Table(("Step", "Why", "Load", "Plan from then on"), rows[-SHOWN:])
    return Section(title="Plans of", run=run.name, text=text, table=table)


def configuration(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the tables of the configuration: the fields that differ between runs (if any), and all
    fields."""
    configurations = [flattened(run.config) for run in runs]
    rows: dict[str, list[str]] = {}
    for config in configurations:
        for name in config:
            if name not in rows:
                rows[name] = [other.get(name, NONE) for other in configurations]
    different = {name: values for name, values in rows.items() if len(set(values)) > 1}
    every = {"title": f"All fields ({len(rows)})", "rows": list(rows.items()), "is_open": False}
    if not different:
        return [every]
    differing = {
        "title": f"Fields that differ ({len(different)})",
        "rows": list(different.items()),
        "is_open": True,
    }
    return [differing, every]


def flattened(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as a flat one: dotted name -> value as text."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[prefix + name] = ", ".join(map(str, value)) or "none"
        elif value is None:
            flat[prefix + name] = "none"
        elif isinstance(value, bool):
            flat[prefix + name] = "yes" if value else "no"
        else:
            flat[prefix + name] = str(value)
    return flat
