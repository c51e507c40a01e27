"""The roofline of distributed training as a picture: plans as points under the curves of full and of no overlap."""

from __future__ import annotations

import html
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from moesaic import __version__
from moesaic.cost.roofline import Roofline
from moesaic.errors import InputError
from moesaic.report.assets import CSS
from moesaic.report.style import INK, RUN_SYMBOLS, figure, line, rounded, run_colour

_TERA = 1e12
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def roofline_figure(data: Roofline) -> go.Figure:
    """Draw the curves and the points; a plan that moves nothing stands at the right end.

    Args:
        data: what to draw.
    """
    ratios, ideal, semi = data.curves()
    made = figure("computing over communication, R_CC", "TFLOP/s per device", height=460, legend=True, type="log")
    x = ratios.tolist()
    made.add_trace(line("all communication hidden", x, (ideal / _TERA).tolist(), INK, width=2.2, hoverinfo="skip"))
    made.add_trace(line("none hidden", x, (semi / _TERA).tolist(), INK, width=1.4, hoverinfo="skip"))
    made.data[-1].line.dash = "dash"
    for number, point in enumerate(data.points):
        share = point.share_of_ideal(data.peak)
        made.add_trace(
            go.Scatter(
                name=html.escape(point.name, quote=False),
                x=[rounded(min(point.ratio, x[-1]))],
                y=[rounded(point.throughput / _TERA)],
                mode="markers",
                marker={
                    "color": run_colour(number),
                    "size": 11,
                    "symbol": RUN_SYMBOLS[number % len(RUN_SYMBOLS)],
                    "line": {"color": "#ffffff", "width": 1},
                },
                hovertemplate=f"R_CC %{{x:.3g}}<br>%{{y:.4g}} TFLOP/s, {share:.0%} of what full overlap gives",
            )
        )
    made.update_xaxes(type="log", showgrid=True)
    made.update_layout(hovermode="closest")
    return made


def write_roofline(data: Roofline, title: str, path: Path) -> Path:
    """Write a page with the picture; returns its path. The file holds everything that it shows and loads nothing.

    Args:
        data: what to draw.
        title: of the page.
        path: of the file.

    Raises:
        InputError: if there is no plan to draw, or the file cannot be written.
    """
    if not data.points:
        raise InputError(f"{path}: no plan to draw: give at least one")
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name a file, {path / 'roofline.html'} say")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_page(data, title), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another place") from error
    return path


def _page(data: Roofline, title: str) -> str:
    made = roofline_figure(data)
    chart = str(plotly.io.to_json(made))
    assert "</" not in chart  # plotly writes < as an escape, so that no name can end the script
    shown = html.escape(title)
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{shown} · moesaic roofline</title>\n<style>{CSS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<header><p class='brand'>moesaic roofline</p><h1>{shown}</h1></header>\n"
        f"<figure class='chart'><div class='plot' id='chart' style='height:{made.layout.height}px'></div></figure>\n"
        f"<footer>Written by moesaic {__version__}. This file holds everything it shows and loads nothing.</footer>\n"
        f"</main>\n<script>\nconst chart = {chart};\nPlotly.newPlot('chart', chart.data, chart.layout, "
        "{responsive: true, displayModeBar: false});\n</script>\n</body>\n</html>\n"
    )
