"""A figure that was measured on a CPU stands beside the processor's maker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moesaic_lab.claims import describe_machine, processor
from moesaic_lab.measured import machine_in_words, maker, measured, places

ROOT = Path(__file__).parents[2]
RESULTS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
}
SIMULATED = ("reproduce", "pays", "ledger")
"""Results without a measured figure."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"(?:results/|`)(\w+)\.json\b|claims: ([\w, ]+) -->")
XEON = {"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2, "gpu": None}


def result(**changes: Any) -> dict[str, Any]:
    return {"date": "2026-11-01", "machine": XEON, "rows": [{"x": 1}]} | changes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_the_makers_of_the_processors_behind_their_figures(page: Path) -> None:
    text = re.sub("Further figures are in .*", "", page.read_text(encoding="utf-8"))
    named = {name for found in NAMED.findall(text) for names in found for name in names.split(", ")}
    for name in sorted(named & RESULTS.keys() - set(SIMULATED)):
        assert maker(RESULTS[name]["machine"]) in text, (
            f"{page.name} shows {name}.json and names no processor"
        )


def test_machines_are_described_in_words() -> None:
    assert machine_in_words(XEON) == "two cores of an Intel Xeon @ 2.50GHz"
    assert machine_in_words({"cpu": "Cortex-A76", "cores": 1}) == "one core of a Cortex-A76"
    assert machine_in_words({"cpu": "x", "cores": 16, "gpu": "NVIDIA H200"}) == "one NVIDIA H200"
    assert maker({"cpu": "AMD EPYC (family 25, model 17)"}) == "AMD"
    assert maker({"cpu": "AMD EPYC", "gpu": "NVIDIA H200"}) == "NVIDIA"


def test_rows_may_name_another_place_than_their_file() -> None:
    epyc = {"cpu": "AMD EPYC", "date": "2026-11-02"}
    assert places(result()) == ["2026-11-01 on two cores of an Intel Xeon @ 2.50GHz"]
    assert places(result(rows=[epyc])) == ["2026-11-02 on two cores of an AMD EPYC"]
    both = measured({"a": result(rows=[{"x": 1}, epyc]), "b": result()})
    assert both == (
        "2026-11-01 on two cores of an Intel Xeon @ 2.50GHz (`a`, `b`); 2026-11-02 on two "
        "cores of an AMD EPYC (`a`)"
    )


def test_a_processor_is_named_with_its_generation() -> None:
    cpuinfo = (
        "processor\t: 0\nmodel name\t: AMD EPYC\ncpu family\t: 25\nmodel\t: 17\n\nprocessor\t: "
        "1\nmodel name\t: x\n"
    )
    assert processor(cpuinfo) == "AMD EPYC (family 25, model 17)"
    assert processor("CPU implementer\t: 0x41\n") == processor("") == ""
    assert describe_machine()["cpu"]
