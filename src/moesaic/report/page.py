"""The page: one self-contained HTML file with plotly.js inside. It loads nothing, and its policy forbids loading."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.report import balance, charts, layers
from moesaic.report.assets import CSS
from moesaic.report.plan_choices import plans_section
from moesaic.report.style import INK, layer_colours, run_colour
from moesaic.report.summary import RunSummary, read_runs
from moesaic.report.words import NONE, cards, in_words, number, percent
from moesaic.train.metrics import read_metrics

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_DRAW = """
for (const [id, chart] of Object.entries(charts))
  Plotly.newPlot(id, chart.data, chart.layout, {responsive: true, displayModeBar: false});
"""


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
        InputError: if the file cannot be written.
    """
    path = out or runs[0].folder / "report.html"
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name a file, {path / 'report.html'} say")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Page(runs).text(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    return path


class Page:
    """Builds the text of one page.

    Args:
        runs: what it is about, at least one.
    """

    def __init__(self, runs: Sequence[RunSummary]) -> None:
        self.runs = runs
        self.charts: dict[str, go.Figure] = {}

    def text(self) -> str:
        """Return the whole HTML file."""
        title = " vs ".join(run.name for run in self.runs)
        body = [
            f"<header><p class='brand'>moesaic report</p><h1>{self._titles()}</h1>{self._words()}</header>",
            self._cards(),
            self._learning(),
            self._speed(),
            *[plans_section(run) for run in self.runs],
            *[self._balance(index) for index in range(len(self.runs))],
            self._comparison(),
            *[self._experts(index) for index, run in enumerate(self.runs) if run.layers],
            self._config(),
            f"<footer>Written by moesaic {__version__}. This file holds everything it shows and loads nothing.</footer>",
        ]
        head = (
            "<meta charset='utf-8'>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
            f"<title>{html.escape(title)} · moesaic report</title>\n<style>{CSS}</style>\n"
            f"<script>{get_plotlyjs()}</script>"
        )
        main = "\n".join(body)
        return (
            f"<!doctype html>\n<html lang='en'>\n<head>\n{head}\n</head>\n"
            f"<body>\n<main>\n{main}\n</main>\n{self._script()}\n</body>\n</html>\n"
        )

    def _script(self) -> str:
        """Return the script that draws the charts, once the page stands and every box has its width."""
        drawn = ",\n".join(f'"{name}": {plotly.io.to_json(made)}' for name, made in self.charts.items())
        assert "</" not in drawn  # plotly writes < as an escape, so that no name can end the script
        return f"<script>\nconst charts = {{\n{drawn}\n}};{_DRAW}</script>"

    def _words(self) -> str:
        first, *others = in_words(self.runs)
        return f"<p class='lead'>{html.escape(first)}</p><p class='more'>{html.escape(' '.join(others))}</p>"

    def _titles(self) -> str:
        return " <span class='versus'>vs</span> ".join(
            f"<span class='run'>{_dot(index)}{html.escape(run.name)}</span>" for index, run in enumerate(self.runs)
        )

    def _cards(self) -> str:
        made = []
        for card in cards(self.runs):
            rows = "".join(
                f"<div class='value'>{_dot(index) if len(self.runs) > 1 else ''}<span>{html.escape(value)}</span></div>"
                for index, value in enumerate(card.values)
            )
            made.append(
                f"<div class='card'><h3>{html.escape(card.title)}</h3>{rows}<p>{html.escape(card.note)}</p></div>"
            )
        return f"<section class='cards'>{''.join(made)}</section>"

    def _learning(self) -> str:
        found = [
            self._chart(
                "Loss over steps",
                "Training loss of single steps (thin) and validation loss. Double-click for the whole range.",
                charts.loss_over_steps(self.runs),
            ),
            self._chart(
                "Validation loss over training time",
                "What a step costs counts here. Evaluation time is left out.",
                charts.validation_over_time(self.runs),
            ),
        ]
        return _section("Learning", found)

    def _speed(self) -> str:
        names = list(dict.fromkeys(name for run in self.runs for name in run.auxiliary))
        found = [
            self._chart(
                "Throughput", "Training tokens per second since the line before.", charts.throughput(self.runs)
            ),
            self._chart("MFU", "The model's FLOPs over the matmul peak measured at the start.", charts.mfu(self.runs)),
            self._chart("Gradient norm", "Over all parameters, before clipping.", charts.gradient_norm(self.runs)),
            self._chart("Learning rate", "Linear warm-up, then a cosine.", charts.learning_rate(self.runs)),
            *[
                self._chart(
                    f"Auxiliary loss: {name.replace('_', ' ')}",
                    "Before its coefficient, mean over the MoE layers.",
                    charts.auxiliary_loss(self.runs, name),
                )
                for name in names
            ],
        ]
        return _section("Speed and optimisation", found)

    def _comparison(self) -> str:
        if sum(bool(run.layers) for run in self.runs) < 2:
            return ""
        found = [
            self._chart(
                "MaxVio",
                "Largest load over mean load, minus 1; mean over the layers.",
                charts.mean_max_violation(self.runs),
            ),
            self._chart(
                "Churn",
                "Tokens whose experts changed in one optimizer step; mean over the layers.",
                charts.mean_churn(self.runs),
            ),
        ]
        return _section("Balance compared", found)

    def _experts(self, index: int) -> str:
        run = self.runs[index]
        large = [
            self._chart("MaxVio", "Largest load over mean load, minus 1; 0 is balance.", layers.max_violation(run)),
            self._chart(
                "Churn",
                "Tokens of a fixed probe batch whose experts changed in one optimizer step.",
                layers.churn(run),
            ),
        ]
        small = [
            self._chart("Dead experts", "Chosen by no token since the line before.", layers.dead_experts(run)),
            self._chart("Dropped copies", "For lack of capacity.", layers.dropped_share(run)),
            self._chart("Load entropy", "1 is balance, 0 one expert for all.", layers.entropy(run)),
            self._chart(
                "Needed capacity factor", "The smallest that drops nothing.", layers.needed_capacity_factor(run)
            ),
        ]
        maps = [
            self._chart(f"Load of layer {number}", "Each expert's load over the mean.", layers.load_heatmap(layer))
            for number, layer in enumerate(run.layers)
            if layer.loads
        ]
        return (
            f"<section><h2>Experts of {_dot(index)}{html.escape(run.name)}</h2>{_layer_legend(run)}"
            f"<div class='grid'>{''.join(large)}</div><div class='grid quarter'>{''.join(small)}</div>"
            f"<div class='grid'>{''.join(maps)}</div>{_layer_table(run)}</section>"
        )

    def _balance(self, index: int) -> str:
        """Return the section about what moved because routing is skewed; "" where nothing was decided."""
        run = self.runs[index]
        found = balance.balance_of(read_metrics(run.folder))
        if found is None:
            return ""
        drawn = [
            self._chart(
                "Load of the busiest rank",
                "Over the mean, mean over the layers; 1 is balance.",
                balance.busiest_rank(found),
            ),
            self._chart(
                "Bytes that moved", "Per call, forward and backward, mean over the layers.", balance.bytes_moved(found)
            ),
        ]
        layer = balance.most_skewed(found)
        for name, when in (("rows_alone", "if left alone"), ("rows", "as decided")):
            if layer is not None:
                title = f"Load per rank of layer {layer}, {when}"
                caption = "The layer with the most skew; copies that each rank of ep computes, over the mean."
                drawn.append(self._chart(title, caption, balance.load_per_rank(found, layer, name)))
        chosen = self._chart("Decisions", "What each layer ran most since the line before.", balance.decisions(found))
        return (
            f"<section><h2>Balance of {_dot(index)}{html.escape(run.name)}</h2><p>{html.escape(balance.told(found))}</p>"
            f"<div class='grid'>{''.join(drawn)}</div>{balance.legend(found.options)}<div class='grid'>{chosen}</div>"
            f"{balance.table(found)}</section>"
        )

    def _config(self) -> str:
        tables = [flattened(run.config) for run in self.runs]
        fields = list(dict.fromkeys(name for table in tables for name in table))
        different = [name for name in fields if len({table.get(name, NONE) for table in tables}) > 1]
        found = []
        if different:
            found.append(self._config_table(f"Fields that differ ({len(different)})", different, tables, is_open=True))
        found.append(self._config_table(f"All fields ({len(fields)})", fields, tables, is_open=False))
        return f"<section><h2>Configuration</h2>{''.join(found)}</section>"

    def _config_table(
        self, title: str, fields: Sequence[str], tables: Sequence[dict[str, str]], *, is_open: bool
    ) -> str:
        head = "".join(f"<th>{_dot(index)}{html.escape(run.name)}</th>" for index, run in enumerate(self.runs))
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>"
            + "".join(f"<td>{html.escape(table.get(name, NONE))}</td>" for table in tables)
            + "</tr>"
            for name in fields
        )
        return (
            f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary><div class='scroll'>"
            f"<table><thead><tr><th>field</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )

    def _chart(self, title: str, caption: str, made: go.Figure) -> str:
        """Return a figure element, or nothing for a chart without a line."""
        if not made.data:
            return ""
        name = f"chart-{len(self.charts) + 1}"
        self.charts[name] = made
        return (
            f"<figure class='chart'><figcaption><h3>{html.escape(title)}</h3>"
            f"<p>{html.escape(caption)}</p></figcaption>"
            f"<div class='plot' id='{name}' style='height:{made.layout.height}px'></div></figure>"
        )


def flattened(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as dotted names and texts."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            flat[prefix + name] = ", ".join(map(str, value)) or "none"
        else:
            flat[prefix + name] = {None: "none", True: "yes", False: "no"}[value] if _is_word(value) else str(value)
    return flat


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _section(title: str, found: Sequence[str]) -> str:
    drawn = "".join(found)
    return f"<section><h2>{html.escape(title)}</h2><div class='grid'>{drawn}</div></section>" if drawn else ""


def _dot(index: int) -> str:
    return f"<i class='dot' style='background:{run_colour(index)}'></i>"


def _layer_legend(run: RunSummary) -> str:
    colours = layer_colours(len(run.layers))
    keys = [f"<span><i class='key' style='background:{c}'></i>layer {n}</span>" for n, c in enumerate(colours)]
    if len(colours) > 1:
        keys.append(f"<span><i class='key thick' style='background:{INK}'></i>mean</span>")
    return f"<p class='legend'>{''.join(keys)}</p>"


def _layer_table(run: RunSummary) -> str:
    rows = "".join(
        f"<tr><th>layer {index}</th><td>{number(layer.max_violation.last, '{:.2f}')}</td>"
        f"<td>{number(layer.entropy.last, '{:.3f}')}</td><td>{number(layer.needed_capacity_factor.last, '{:.2f}')}</td>"
        f"<td>{number(layer.dead_experts.last, '{:.0f}')}</td><td>{percent(layer.dropped_share.last)}</td>"
        f"<td>{percent(layer.churn.last)}</td></tr>"
        for index, layer in enumerate(run.layers)
    )
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("At the end", "MaxVio", "Entropy", "Needed capacity factor", "Dead experts", "Dropped", "Churn")
    )
    return (
        f"<div class='scroll'><table class='numbers'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
