"""Writes the HTML report about runs: summary, charts, decisions of balancing and planner, configuration.

Some charts compare runs: loss, speed, optimisation, and balance as the mean over the layers. Others show one run's MoE layers.
A chart leaves out runs that lack its number; the page leaves out empty charts. Pages are self-contained: they load nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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

OVER_STEPS: tuple[tuple[str, str, str, str, dict[str, str]], ...] = (
    ("Throughput", "Training tokens per second since the previous line of metrics.", "tokens/s", "tokens_per_second",
     {"tickformat": "~s"}),
    ("MFU", "The model's FLOPs over the matmul peak measured at the start.", "MFU (% of matmul peak)", "mfu",
     {"tickformat": "~%"}),
    ("Gradient norm", "Over all parameters, before clipping.", "gradient norm", "grad_norm", {}),
    ("Learning rate", "Linear warm-up, then the decay.", "learning rate", "lr", {"exponentformat": "power"}),
)  # fmt: skip
"""(title, caption, axis title, number, axis options) of the charts about speed and optimisation."""
OF_LAYERS: tuple[tuple[str, str, str, str, dict[str, str]], ...] = (
    ("MaxVio", "Largest load over mean load, minus 1; 0 is balanced.", "MaxVio", "max_violation", {}),
    ("Dead experts", "Chosen by no token since the previous line.", "dead experts", "dead_experts", {}),
    ("Dropped copies", "For lack of capacity.", "dropped (% of copies)", "dropped_share", {"tickformat": "~%"}),
    ("Load entropy", "1: balanced; 0: one expert gets all tokens.", "entropy of the load", "entropy",
     {"rangemode": "normal"}),
    ("Needed capacity factor", "The smallest that drops nothing.", "capacity factor", "needed_capacity_factor",
     {"rangemode": "normal"}),
)  # fmt: skip
"""The same of the charts about the balance of MoE layers."""
MOST_NAMED = 12
"""Largest number of layers that a legend names."""
MEBIBYTE = 2**20
BYTES = {
    "token_bytes_alone": "tokens, left alone", "token_bytes": "tokens", "weight_bytes": "weights of experts",
    "sample_bytes_across": "samples, between nodes", "sample_bytes_inside": "samples, inside nodes",
}  # fmt: skip
"""Number -> name of the bytes that a call of a layer moves."""
SHOWN = 40
"""Largest number of decisions about plans in the table; the last ones are shown."""


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
        text = report_text(runs, Drawn())
    return save_page(text, out or runs[0].folder / "report.html", typed=out is not None)


def report_text(runs: Sequence[RunSummary], drawn: Drawn) -> str:
    """Return the HTML of a report; `drawn` collects its charts."""
    coloured = [(run, run_colour(index)) for index, run in enumerate(runs)]
    sections = [
        Section(title="Learning", charts=[loss_over_steps(runs), validation_over_time(runs)]),
        Section(title="Speed and optimisation", charts=over_steps(runs)),
        *[section for run in runs if (section := plans_section(run))],
        *[section for run, colour in coloured if (section := balance_section(run, colour))],
        *[
            Section(
                title="Experts of",
                run=run.name,
                colour=colour,
                charts=[*layer_charts(run), *load_maps(run)],
            )
            for run, colour in coloured
            if run.layers
        ],
    ]
    return page_text(
        "report.html",
        drawn,
        what="report",
        title=" vs ".join(run.name for run in runs),
        runs=[{"name": run.name, "colour": colour} for run, colour in coloured],
        words=[f"{run.name}: {phrase}." for run in runs for phrase in run.stragglers],
        cards=cards(runs),
        sections=[
            each
            for each in sections
            if each.table or any(chart.figure.data for chart in each.charts)
        ],
        configuration=configuration(runs),
    )


def loss_over_steps(runs: Sequence[RunSummary]) -> Picture:
    """Draw training loss (thin) and validation loss (markers) over steps.

    The initial axis excludes the first steep drop, which would flatten the rest of the curve.
    """
    is_of_bytes = all(
        run.over_steps("val_loss") == run.over_steps("val_nats_per_byte") for run in runs
    )
    chart = figure(
        STEP, f"loss (nats/{'byte' if is_of_bytes else 'token'})", height=340, legend=True
    )
    firsts, every, validations = [], [], []
    for index, run in enumerate(runs):
        loss, validation = run.over_steps("loss"), run.over_steps("val_loss")
        every += [*loss.values, *validation.values]
        firsts += [validation.values[0]] if len(validation) > 2 else []
        name = f"{run.name}, training"
        chart.add_trace(
            line(name, loss.steps, loss.values, run_colour(index), width=1, opacity=0.55)
        )
        if validation:
            name = f"{run.name}, validation"
            validations.append(_validation(name, validation.steps, validation.values, index))
    chart.add_traces(validations)  # in front
    if firsts:
        high = max(firsts) + 0.12 * (max(firsts) - min(every))
        chart.update_yaxes(range=[min(every) - 0.08 * (high - min(every)), high])
    caption = "Training loss of single steps (thin) and validation loss. Double-click for the whole range."
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
    """Draw speed, optimisation, auxiliary losses and, of several runs, the mean MaxVio over steps: a line per run."""
    rows = list(OVER_STEPS)
    for name in dict.fromkeys(name for run in runs for name in run.auxiliary):
        words = name.replace("_", " ")
        rows.append(
            (
                f"Auxiliary loss: {words}",
                "Before its coefficient, averaged over the MoE layers.",
                words,
                name,
                {},
            )
        )
    pictures = [
        Picture(
            title, caption, _per_run(runs, [run.over_steps(name) for run in runs], axis, **options)
        )
        for title, caption, axis, name, options in rows
    ]
    if sum(bool(run.layers) for run in runs) > 1:
        means = [
            mean_over_layers([layer.over_steps("max_violation") for layer in run.layers])
            for run in runs
        ]
        caption = "Mean over each run's MoE layers; 0 is balanced."
        pictures.append(Picture("Balance compared", caption, _per_run(runs, means, "mean MaxVio")))
    return pictures


def _per_run(
    runs: Sequence[RunSummary], series: Sequence[Series], title: str, **y_axis: str
) -> go.Figure:
    """Draw a line for each run that has the number. A run has the same colour in all charts."""
    chart = figure(STEP, title, height=270, legend=len(runs) > 1, rangemode="tozero", **y_axis)
    for index, (run, values) in enumerate(zip(runs, series)):
        if values:
            chart.add_trace(
                line(run.name, values.steps, values.values, run_colour(index), showlegend=True)
            )
            if chart.data[1:]:  # equal numbers would hide each other
                chart.data[-1].line.dash = "dash"
    return chart


def layer_charts(run: RunSummary) -> list[Picture]:
    """Draw the balance of a run's MoE layers over steps. The first chart has the legend of all."""
    pictures = []
    for title, caption, axis, name, options in OF_LAYERS:
        series = {
            f"layer {index}": layer.over_steps(name) for index, layer in enumerate(run.layers)
        }
        pictures.append(Picture(title, caption, per_layer(series, axis, **options)))
        pictures[-1].figure.update_layout(showlegend=len(pictures) == 1)
    return pictures


def per_layer(series: Mapping[str, Series], title: str, **y_axis: str) -> go.Figure:
    """Draw a thin line per layer, by its name, and their mean in `INK`. The legend of a deep model has the mean alone."""
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
    """Return the section about balancing of skewed routing; None for a run without an arbiter and moving samples.

    The numbers come from the first rank's metrics; they hold for all ranks, since these decide from the same counts.
    """
    lines = [
        each
        for each in run.lines
        if each["kind"] == "train" and isinstance(each.get("balance"), dict)
    ]
    if not lines:
        return None
    steps, layers = [each["step"] for each in lines], [each["balance"]["layers"] for each in lines]
    busiest = figure(STEP, "busiest rank / mean", height=300, legend=True, rangemode="normal")
    for name, title in (("rows_alone", "left alone"), ("rows", "as decided")):
        if any(name in layer for of_line in layers for layer in of_line):
            loads = [
                _mean(
                    [
                        max(rows) * len(rows) / sum(rows)
                        for rows in _having(name, each)
                        if any(rows)
                    ],
                    1.0,
                )
                for each in layers
            ]
            busiest.add_trace(
                line(title, steps, loads, part_colour(title), width=2.2, showlegend=True)
            )
    moved = figure(STEP, "MiB per call, all ranks", height=300, legend=True)
    for name, title in BYTES.items():
        if any(name in layer for of_line in layers for layer in of_line):
            sizes = [_mean(_having(name, each), 0.0) / MEBIBYTE for each in layers]
            moved.add_trace(
                line(title, steps, sizes, part_colour(title), width=2.0, showlegend=True)
            )
    chosen = [sum(map(Counter, _having("options", each)), Counter[str]()) for each in layers]
    options = figure(
        STEP, "share of the calls", height=300, legend=True, rangemode="tozero", tickformat="~%"
    )
    for name in sorted({name for counts in chosen for name in counts}):
        shares = [counts[name] / max(counts.total(), 1) for counts in chosen]
        options.add_trace(line(name, steps, shares, part_colour(name), width=2.0, showlegend=True))
    pictures = [
        Picture(
            "Load of the busiest rank",
            "Relative to the mean load, averaged over the layers; 1 is balanced.",
            busiest,
        ),
        Picture(
            "Bytes that moved", "Per call, forward and backward, averaged over the layers.", moved
        ),
        Picture(
            "Decisions",
            "How often the layers ran each option since the previous line of metrics.",
            options,
        ),
    ]
    return Section(title="Balance of", run=run.name, colour=colour, charts=pictures)


def _having(name: str, layers: Sequence[dict[str, Any]]) -> list[Any]:
    """Return a number of all layers that have it."""
    return [layer[name] for layer in layers if name in layer]


def _mean(values: Sequence[float], empty: float) -> float:
    return sum(values) / len(values) if values else empty


def plans_section(run: RunSummary) -> Section | None:
    """Return the section about automatic changes of plan during a run; None if the run did not choose plans automatically."""
    plans = [each["plan"] for each in run.lines if isinstance(each.get("plan"), dict)]
    if not plans:
        return None
    last = plans[-1]
    text = (
        f"{last['switches']} changes of plan, {percent(last['explored_share'])} of the steps on trial; at the end "
        f"{last['running']} runs."
    )
    rows = [
        (str(step), why, str(bucket), plan)
        for entry in plans
        for step, why, bucket, plan in entry["decisions"]
    ]
    table = Table(("Step", "Why", "Load", "Plan from then on"), rows[-SHOWN:])
    return Section(title="Plans of", run=run.name, text=text, table=table)


def configuration(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the tables of the configuration: the fields that differ between runs (if any), and all fields."""
    configurations = [flattened(run.config) for run in runs]
    fields = dict.fromkeys(name for each in configurations for name in each)
    rows = {name: [each.get(name, NONE) for each in configurations] for name in fields}
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
