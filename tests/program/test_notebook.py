"""What notebooks show of plans, programs and runs, by IPython's protocol of `_repr_html_`."""

from __future__ import annotations

import re
from pathlib import Path

from moesaic.program.build import SCHEDULES
from moesaic.program.notebook import html_table
from moesaic.program.plan import Plan
from moesaic.report.summary import read_runs
from report.folders import sparse_run


def cells(html: str) -> list[list[str]]:
    """Return the rows of a table."""
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_a_plan_shows_what_was_chosen() -> None:
    plan = Plan(schedule="s2", chunks=4)
    bundle = plan._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert eval(bundle["text/plain"]) == plan
    heads, *rows = cells(bundle["text/html"])
    assert heads == ["choice", "value", ""]
    assert [row[:2] for row in rows if row[2]] == [["schedule", "s2"], ["chunks", "4"]]
    assert "plan: s2, linear, 4 chunks" in bundle["text/html"]


def test_a_program_shows_a_row_per_task() -> None:
    program = SCHEDULES["s2"]()
    _, *rows = cells(program._repr_html_())
    assert [row[0] for row in rows] == [task.name for task in program.tasks]
    assert {row[2] for row in rows} == {"dispatch", "expert", "combine"}


def test_a_run_shows_the_cards_of_its_report(tmp_path: Path) -> None:
    (run,) = read_runs([sparse_run(tmp_path / "<moe>")])
    shown = run._repr_html_()
    assert "<caption>run &lt;moe&gt;</caption>" in shown
    assert ["figure", "value", "note"] in cells(shown)
    assert "2.750" in shown


def test_cells_are_escaped() -> None:
    assert cells(html_table("<t>", ("a",), [("<script>",)])) == [["a"], ["&lt;script&gt;"]]
