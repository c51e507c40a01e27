"""The pages of the papers: rows have commands that there are, and the evidence is that of the
committed results."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import COMMANDS, LABORATORY, main
from moesaic.planner.cluster import presets
from moesaic.planner.presets import CONFIGS
from moesaic.planner.presets import PRESETS as PLANNED
from moesaic.train.presets import PRESETS as TRAINED
from moesaic_lab import papers_page, pays
from moesaic_lab.bench import BENCHMARKS, OTHERS
from moesaic_lab.papers_page import (
    claims_by_paper,
    claims_of,
    crossing,
    evidence,
    in_short,
    pairs,
    read_results,
    trained,
)
from moesaic_lab.reproduce.records import PAPERS, read_book
from moesaic_lab.vision.config import PRESETS as VISION

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PAGES = {
    paper: (ROOT / "docs" / f"papers_{paper}.md").read_text(encoding="utf-8") for paper in PAPERS
}
NAMES = {"bench": (*BENCHMARKS, *OTHERS), "reproduce": (*PAPERS, "all"), "trace": ("show",)}
"""What the first word behind a command may be."""
VALUES = {
    ("train", "preset"): TRAINED,
    ("plan", "model"): [*PLANNED, *CONFIGS],
    ("vision", "preset"): VISION,
    ("plan", "cluster"): presets(),
    ("train", "planner.cluster"): presets(),
}
"""What an option may be."""


def rows() -> list[tuple[str, list[str]]]:
    """Return the paper and the cells of every row that says where a part of a paper is."""
    found = []
    for system, page in PAGES.items():
        section = page.split("\n## Parts\n")[1].split(papers_page.MARKS[0])[0]
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        assert lines[0] == "| part | code | command | result | difference |"
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
        found += [(system, each) for each in cells]
    return found


def commands(text: str) -> list[list[str]]:
    """Return the commands in a text, each as its words."""
    return [shlex.split(each)[1:] for each in re.findall(r"`(moesaic [^`]+)`", text)]


@cache
def options_of(*command: str) -> set[str]:
    """Return the options that a command's whole help names."""
    import contextlib
    import io

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([*command, "--help-all" if command == ("train",) else "--help"]) == 0
    return set(re.findall(r"--([\w.-]+)", shown.getvalue()))


@pytest.mark.parametrize(
    ("system", "cells"), rows(), ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_a_row_has_a_command_that_runs(system: str, cells: list[str]) -> None:
    assert len(cells) == 5
    found = commands(cells[2])
    assert found, f"{system}, {cells[0]}: no command"
    for name, *words in found:
        assert name in {*COMMANDS, *LABORATORY}
        head = [name]
        if name in NAMES:
            assert words[0] in NAMES[name]
            head.append(words.pop(0))
        known = options_of(*head) if head[0] != "reproduce" else options_of("reproduce")
        for place, word in enumerate(words):
            if not word.startswith("--"):
                continue
            option = word.removeprefix("--").replace("_", "-")
            assert option in {each.replace("_", "-") for each in known} | {"plan", "preset"}, (
                f"{head}: no --{option}"
            )
            allowed = VALUES.get((name, option))
            assert allowed is None or words[place + 1] in allowed


def test_every_command_that_the_page_names_is_one() -> None:
    for name, *words in commands("\n".join((TEXT, *PAGES.values()))):
        assert name in {*COMMANDS, *LABORATORY}
        if name == "bench" and words:
            assert words[0] in NAMES["bench"]


def test_presets_that_the_page_names_are_all_there_are() -> None:
    section = TEXT.split("\n## Models\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w-]+)`", section))
    stem = {name for name in named if name.startswith("-")}
    short = {
        name
        for name in (*PLANNED, *CONFIGS)
        if name not in named and not any(name.endswith(end) for end in stem)
    }
    assert short <= {"demo", "gpt-small"}


def test_the_pages_say_what_the_results_do() -> None:
    results = read_results()
    for paper, page in PAGES.items():
        assert (
            page.split(papers_page.MARKS[0])[1].split(papers_page.MARKS[1])[0].strip()
            == evidence(paper, results).strip()
        )
    claims = papers_page.CLAIMS.read_text(encoding="utf-8").split(papers_page.CLAIM_MARKS[0])[1]
    assert claims.split(papers_page.CLAIM_MARKS[1])[0].strip() == claims_of(
        results["reproduce"]["claims"]
    )


def test_a_missed_claim_has_a_reason_and_only_missed_claims_have_one() -> None:
    claims = [claim for of_paper in claims_by_paper(read_results()).values() for claim in of_paper]
    assert {claim["name"] for claim in claims if claim["holds"] is False} == set(read_book().missed)
    assert all(claim["target"] > 1 for claim in claims if claim["name"].startswith("papers."))


def test_every_technique_is_simulated_and_has_its_measured_pairs() -> None:
    simulated = {(each.paper, each.name) for each in pays.TECHNIQUES if each.cluster}
    assert {each.paper for each in pays.TECHNIQUES} == set(PAPERS)
    assert all(
        each.plan != each.without or each.shadows for each in pays.TECHNIQUES if each.cluster
    )
    rows = read_results()["pays"]["rows"]
    assert {(row["paper"], row["technique"]) for row in rows} == simulated
    assert {(row["links"], row["width"], row["skew"]) for row in rows} == {
        (links, width, skew) for links in pays.LINKS for width in pays.WIDTHS for skew in pays.SKEWS
    }


def test_pairs_differ_by_one_word_in_the_same_case() -> None:
    rows = [
        {"case": "a", "plan": "s1, linear", "measured_seconds": 2.0, "predicted_seconds": 3.0},
        {"case": "a", "plan": "s1, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
        {"case": "a", "plan": "s2, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
        {"case": "b", "plan": "s1, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
    ]
    assert pairs(rows, "pipelined", "linear") == [(2.0, 1.5)]
    methods = [
        {"cell": 1, "method": "s2, saa", "median_seconds": 2.0},
        {"cell": 1, "method": "s2", "median_seconds": 1.0},
    ]
    assert pairs(methods, "saa", "") == [(0.5, None)]
    on_beds = [
        row | {"cell": bed, "bed": f"{bed} 100mbit"} for bed in ("2x2", "4x4") for row in methods
    ]
    on_beds[2]["median_seconds"] = 4.0
    assert pairs(on_beds, "saa", "", "4x4") == [(0.25, None)]


def test_a_gain_passes_one_between_two_sizes() -> None:
    assert pays.crossovers((10, 1000), (0.5, 1.5)) == [pytest.approx(100)]
    assert pays.crossovers((10, 1000), (1.5, 1.2)) == []
    assert len(pays.crossovers((10, 100, 1000), (0.5, 1.5, 0.5))) == 2
    common = {"least": 0.5, "most": 1.5, "links": 1, "width": 256, "skew": 0}
    rises = {"gains": [0.5, 1.5], "crossovers": [100.0], **common}
    falls = {"gains": [1.5, 0.5], "crossovers": [100.0], **common}
    window = {"gains": [0.5, 1.5, 0.5], "crossovers": [30.0, 300.0], **common}
    assert [crossing(each) for each in (rises, falls, window)] == [
        "from 100",
        "up to 100",
        "from 30 up to 300",
    ]
    assert in_short([rises]) == ("0.50 to 1.50", "width 256: from 100")


def test_what_placement_gains_under_recorded_routing_is_shown_early_and_late() -> None:
    rows: list[dict[str, Any]] = [
        {
            "part": "trained",
            "method": "two_stage",
            "bed": "NetMoE's 2x8",
            "text": "code",
            "step": step,
            "locality": at,
            "predicted_inter_saved": at / 2,
            "predicted_time_ratio": 1 / (1 + at),
        }
        for step, at in ((1, 0.1), (2, 0.2), (98, 0.5), (99, 0.6))
    ]
    times = {"time_ratio": 0.8, "time_ratio_low": 0.625, "time_ratio_high": 1.0}
    rows.append(
        {
            "part": "trained",
            "method": "two_stage",
            "bed": "2x2",
            "text": "code",
            "step": 99,
            **times,
        }
    )
    rows.append({"part": "2x2", "method": "two_stage"})
    early, late = trained(rows).splitlines()[2:]
    assert early == "| code | 1 to 2 | 0.10 to 0.20 | 5 to 10 % | 1.10 to 1.20 |  |"
    assert late == (
        "| code | 98 to 99 | 0.50 to 0.60 | 25 to 30 % | 1.50 to 1.60 | 2x2: 1.25 (1.00 to 1.60) |"
    )
    assert trained(rows[-1:]) == ""


def test_saa_loses_for_few_tokens_and_gains_for_many() -> None:
    """As measured: 0.6 to 0.98 with 48 tokens, 1.1 with 768 and more (published 1.09 and 1.12)."""
    saa = next(each for each in pays.TECHNIQUES if each.name == "SAA over S2")
    bed = pays.TechniqueBed(saa, 1.0)
    assert bed.gain(64, 256, 0.0) < 1 < bed.gain(16384, 256, 0.0)
