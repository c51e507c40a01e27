"""The section about plans matches the metrics, in order and escaped; a run whose plan stayed gets
no section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.report.page import SHOWN, plans_section, write_report
from moesaic.report.summary import summarise
from report.folders import layer, sparse_run, train_line, write_run


def told(step: int, decisions: list[list[Any]], share: float = 0.05) -> dict[str, Any]:
    plan = {
        "running": "s1, <linear>",
        "load": 7.0,
        "estimated_seconds": 0.5,
        "switches": 2,
        "explored_share": share,
        "decisions": decisions,
    }
    return train_line(step, 2.0, 100.0, [layer([1, 1], 0.0)], plan=plan)


LINES = [
    told(10, [[0, "start", 3, "s1, <linear>"], [4, "trial", 3, "s2, linear"]]),
    told(20, []),
    told(30, [[22, "trial over", 4, "s1, <linear>"]], share=0.125),
]


def test_the_section_says_what_was_decided(tmp_path: Path) -> None:
    section = plans_section(summarise(write_run(tmp_path / "run", LINES), "run"))
    assert (
        section.text
        == "2 changes of plan, 12 % of the steps on trial; at the end s1, <linear> runs."
    )
    table = section.table
    assert table.rows[-1] == ("22", "trial over", "4", "s1, <linear>")
    assert [row[0] for row in table.rows] == ["0", "4", "22"], "in order, from all lines"
    page = write_report([tmp_path / "run"]).read_text(encoding="utf-8")
    assert "<tr><th>22</th><td>trial over</td><td>4</td><td>s1, &lt;linear&gt;</td></tr>" in page
    assert "<linear>" not in page


def test_only_the_last_decisions_are_shown(tmp_path: Path) -> None:
    many = [told(500, [[step, "load", step % 5, "s2, linear"] for step in range(100)])]
    section = plans_section(summarise(write_run(tmp_path / "run", many), "run"))
    assert [row[0] for row in section.table.rows] == [str(step) for step in range(100 - SHOWN, 100)]


def test_a_run_whose_plan_stayed_has_no_section(tmp_path: Path) -> None:
    assert plans_section(summarise(sparse_run(tmp_path / "run"), "run")) is None
