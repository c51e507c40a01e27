"""The report page is self-contained, escaped, has no empty charts, and draws without an error in a
real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import refused
from report.folders import dense_run, eval_line, layer, sparse_run, train_line, write_run

pytest.importorskip("plotly")

from moesaic.report.page import flattened, report_text, write_report
from moesaic.report.style import Drawn
from moesaic.report.summary import read_runs

NUM_RUN_CHARTS = 6
NUM_LAYER_CHARTS = 5
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed"
)


def open_in_browser(page: Path, profile: Path) -> tuple[str, str]:
    """Return the page's DOM after its scripts have run, and the browser's log."""
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--v=0",
            "--window-size=1400,2600",
            "--virtual-time-budget=8000",
            "--dump-dom",
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def complaints(log: str) -> list[str]:
    return [line for line in log.splitlines() if "CONSOLE" in line or "Uncaught" in line]


def without_plotly(text: str) -> str:
    """Return the page without the embedded plotly.js."""
    from plotly.offline import get_plotlyjs

    assert get_plotlyjs() in text
    return text.replace(get_plotlyjs(), "")


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    path = write_report([sparse_run(tmp_path / "moe"), dense_run(tmp_path / "dense")])
    assert path == tmp_path / "moe" / "report.html"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]*\ssrc|<link[\s>]|@import|<i(mg|frame)[\s>]", text)
    assert not re.search(r"https?://|\ssrc=|\shref=|url\(", without_plotly(text))
    assert "default-src 'none'" in text


def test_titles_cards_and_settings_are_shown(tmp_path: Path) -> None:
    folders = [sparse_run(tmp_path / "moe"), dense_run(tmp_path / "dense")]
    text = without_plotly(
        write_report(folders, tmp_path / "new" / "both.html").read_text(encoding="utf-8")
    )
    assert "<span>2.750</span>" in text
    assert "<h2>Experts of" in text
    assert "Fields that differ (4)" in text
    assert "<th>model.ffn</th><td>moe</td><td>dense</td>" in text
    assert "Auxiliary loss: load balance" in text
    assert "Balance compared" not in text


@pytest.mark.parametrize("name", ["<img onerror=alert(1)>&'\"", "<script>alert(1)<script>"])
def test_names_are_escaped(tmp_path: Path, name: str) -> None:
    text = without_plotly(write_report([sparse_run(tmp_path / name)]).read_text(encoding="utf-8"))
    assert name not in text
    assert "&lt;" in text
    assert text.count("<script>") == 2


def test_a_value_of_the_configuration_cannot_end_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [eval_line(1, 2.0)], out="</td><script>alert(1)</script>")
    text = without_plotly(write_report([run]).read_text(encoding="utf-8"))
    assert "alert(1)" in text
    assert text.count("<script>") == 2


def test_a_dense_run_has_no_empty_charts(tmp_path: Path) -> None:
    drawn = Drawn()
    text = report_text(read_runs([dense_run(tmp_path / "dense")]), drawn)
    assert len(drawn.figures) == NUM_RUN_CHARTS
    assert all(len(chart.data) for chart in drawn.figures.values())
    assert "<h2>Experts of" not in text


def test_a_run_without_evaluation_has_no_validation_chart(tmp_path: Path) -> None:
    drawn = Drawn()
    text = report_text(
        read_runs([write_run(tmp_path / "a", [train_line(5, 4.0, 9.0, [layer([1, 1], 0.0)])])]),
        drawn,
    )
    assert "Validation loss over training time" not in text
    assert len(drawn.figures) == NUM_RUN_CHARTS - 1 + NUM_LAYER_CHARTS + 1


def test_a_run_with_only_an_evaluation_has_a_page(tmp_path: Path) -> None:
    drawn = Drawn()
    text = report_text(read_runs([write_run(tmp_path / "a", [eval_line(1, 2.0)])]), drawn)
    assert "<span>2.000</span>" in text
    assert len(drawn.figures) == 2


def test_two_sparse_runs_of_one_name_are_compared_and_told_apart(tmp_path: Path) -> None:
    drawn = Drawn()
    text = report_text(
        read_runs([sparse_run(tmp_path / "a" / "moe"), sparse_run(tmp_path / "b" / "moe")]), drawn
    )
    assert "Balance compared" in text
    assert "a/moe" in text
    assert "b/moe" in text
    assert len(drawn.figures) == NUM_RUN_CHARTS + 1 + 1 + 2 * (NUM_LAYER_CHARTS + 2)


def test_configuration_is_flattened_into_words() -> None:
    table = {"a": 1, "b": {"c": None, "d": {"e": True}}, "f": [], "g": [1, 2], "h": 0, "i": 1.5}
    assert flattened(table) == {
        "a": "1",
        "b.c": "none",
        "b.d.e": "yes",
        "f": "none",
        "g": "1, 2",
        "h": "0",
        "i": "1.5",
    }


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = sparse_run(tmp_path / "moe")
    assert "is a folder: name a file" in refused(write_report, [run], tmp_path)
    assert "cannot be written" in refused(write_report, [run], run / "config.json" / "report.html")


@needs_browser
def test_a_browser_draws_every_chart_without_a_complaint(tmp_path: Path) -> None:
    runs = read_runs([sparse_run(tmp_path / "<moe> & co"), dense_run(tmp_path / "dense")])
    drawn = Drawn()
    path = tmp_path / "page.html"
    path.write_text(report_text(runs, drawn), encoding="utf-8")
    dom, log = open_in_browser(path, tmp_path / "profile")
    assert complaints(log) == []
    assert len(drawn.figures) == NUM_RUN_CHARTS + 1 + NUM_LAYER_CHARTS + 2
    for name in drawn.figures:
        assert re.search(
            (
                rf'id="{name}"[^>]*class="[^"]*js-plotly-plot|'
                rf'class="[^"]*js-plotly-plot[^>]*id="{name}"'
            ),
            dom,
        )
    shown = dom[dom.index("<main>") :]
    assert shown.count('class="main-svg"') >= len(drawn.figures)
    traces = [trace.type for chart in drawn.figures.values() for trace in chart.data]
    assert len(re.findall('class="trace scatter', shown)) == traces.count("scatter")
    assert len(re.findall('<g class="hm"', shown)) == traces.count("heatmap") == 2
    assert "&lt;moe&gt; &amp; co, validation" in shown


@needs_browser
def test_the_browser_check_sees_a_broken_page(tmp_path: Path) -> None:
    text = report_text(read_runs([dense_run(tmp_path / "dense")]), Drawn())
    path = tmp_path / "broken.html"
    path.write_text(
        text.replace(
            "</main>",
            "</main><script>nowhere.draw()</script><script src='https://x.invalid/y.js'></script>",
        )
    )
    _, log = open_in_browser(path, tmp_path / "profile")
    assert any("nowhere is not defined" in line for line in complaints(log))
    assert any("Content Security Policy" in line for line in complaints(log))
