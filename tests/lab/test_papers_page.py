"""The pages of the papers: rows have commands that there are, and the evidence is that of the
committed results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import COMMANDS, LABORATORY, main
from moesaic.configfile import read_table
from moesaic.planner.cluster import presets
from moesaic.planner.presets import CONFIGS
from moesaic.planner.presets import PRESETS as PLANNED
from moesaic.train.presets import PRESETS as TRAINED
from moesaic_lab import papers_page, pays, pays_page
from moesaic_lab.bench import BENCHMARKS, OTHERS
from moesaic_lab.headlines import OFF, made
from moesaic_lab.paper_pairs import pairs
from moesaic_lab.paper_tables import bounds, by_load, trained
from moesaic_lab.papers_page import (
    claims_by_paper,
    claims_of,
    deciding,
    page,
    read_results,
    simulated,
)
from moesaic_lab.pays_page import crossing
from moesaic_lab.reproduce.records import PAPERS, PLACEHOLDER, page_of, read_book
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
ON_JOHNNY = next(each for each in pays.TECHNIQUES if each.paper == "fastermoe")
VENUES = [f"{each.venue} {each.year}" for each in read_book().publications.values()]


def rows() -> list[tuple[str, list[str]]]:
    """Return the paper and the cells of every row that says where a part of a paper is."""
    found = []
    for system, text in PAGES.items():
        section = text.split("\n## Parts\n")[1].split(papers_page.MARKS[0])[0]
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
    for paper, text in PAGES.items():
        assert text == page(paper, results)
    claims = papers_page.CLAIMS.read_text(encoding="utf-8").split(papers_page.CLAIM_MARKS[0])[1]
    assert claims.split(papers_page.CLAIM_MARKS[1])[0].strip() == claims_of(
        results["reproduce"]["claims"], simulated(results)
    )
    table = papers_page.DECIDING.read_text(encoding="utf-8").split(papers_page.MARKS[0])[1]
    assert table.split(papers_page.MARKS[1])[0].strip() == deciding(results)


def test_a_missed_claim_has_a_reason_and_only_missed_claims_have_one() -> None:
    claims = [claim for of_paper in claims_by_paper(read_results()).values() for claim in of_paper]
    assert {claim["name"] for claim in claims if claim["holds"] is False} == set(read_book().missed)
    headlines = [claim for claim in claims if claim["name"].startswith("papers.")]
    assert len(headlines) >= 12
    assert {(claim["op"], claim["target"]) for claim in headlines} == {("<=", OFF)}


def test_every_technique_is_simulated_and_has_its_measured_pairs() -> None:
    simulated = {(each.paper, each.name) for each in pays.TECHNIQUES if each.cluster}
    assert {each.paper for each in pays.TECHNIQUES} == set(PAPERS)
    assert all(each.plan != each.without or each.shadows for each in pays.TECHNIQUES if each.at)
    rows = read_results()["pays"]["rows"]
    found = [(row["paper"], row["technique"], row["axis"]) for row in rows]
    assert set(found) == {(*each, axis) for each in simulated for axis in pays_page.AXES}
    assert len(found) == len(set(found))


def test_published_gains_stand_on_the_axes_that_there_are() -> None:
    for technique in pays.TECHNIQUES:
        places = set(technique.published) - {"cells"}
        assert places <= set(pays_page.AXES)
        gain = pays_page.published(technique)
        assert (gain is None) == (not technique.published)
    placed = [each for each in pays.TECHNIQUES if len(each.published) > 1]
    assert {each.paper for each in placed} == set(PAPERS) - {"netmoe"}


def test_pairs_differ_by_one_word_in_the_same_case() -> None:
    rows = [
        {"case": "a", "plan": "s1, linear", "measured_seconds": 2.0, "predicted_seconds": 3.0},
        {"case": "a", "plan": "s1, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
        {"case": "a", "plan": "s2, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
        {"case": "b", "plan": "s1, pipelined", "measured_seconds": 1.0, "predicted_seconds": 2.0},
    ]
    assert pairs(rows, "pipelined", "linear") == [2.0]
    methods = [
        {"cell": 1, "method": "s2, saa", "median_seconds": 2.0},
        {"cell": 1, "method": "s2", "median_seconds": 1.0},
    ]
    assert pairs(methods, "saa", "") == [0.5]
    on_beds = [
        row | {"cell": bed, "bed": f"{bed} 100mbit"} for bed in ("2x2", "4x4") for row in methods
    ]
    on_beds[2]["median_seconds"] = 4.0
    assert pairs(on_beds, "saa", "", "4x4") == [0.25]


def test_a_gain_passes_one_between_two_places() -> None:
    assert pays.crossovers((0.2, 0.6), (0.5, 1.5)) == [pytest.approx(0.4)]
    assert pays.crossovers((10, 1000), (1.5, 1.2)) == []
    assert len(pays.crossovers((10, 100, 1000), (0.5, 1.5, 0.5))) == 2
    common = {"least": 0.5, "most": 1.5, "axis": "tokens"}
    rises = {"gains": [0.5, 1.5], "crossovers": [100.0], **common}
    falls = {"gains": [1.5, 0.5], "crossovers": [0.25], **common, "axis": "share"}
    window = {"gains": [0.5, 1.5, 0.5], "crossovers": [30.0, 3000.0], **common}
    assert [crossing(each) for each in (rises, falls, window)] == [
        "from 100",
        "up to 25%",
        "from 30 up to 3,000",
    ]


def test_what_devices_of_a_node_share_they_share_in_smaller_nodes_too() -> None:
    at = replace(ON_JOHNNY.at, ranks=2, products=4.0)
    spec = pays.cluster("fastermoe-johnny", at)
    assert (spec.nodes, spec.devices_per_node) == (8, 2)
    assert [link.devices for link in spec.links] == [1, 1, 2]
    assert spec.device.tflops.of("fp32") == 4 * 11.5e12


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
    small = replace(saa.at, tokens=64, width=256, hidden=512)
    gains = [
        pays.TechniqueBed(saa, replace(small, tokens=tokens)).found()["gain"]
        for tokens in (64, 16384)
    ]
    assert gains[0] < 1 < gains[1]


CODE = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|!\[[^\]]*\]\([^)]*\)|\*[^*\n]+\*, ")
ITEM = r"[IVX]+(?:-[A-Z])?\b|[A-C]\.\d+|\d+(?:\.\d+)?\b"
REFERENCE = re.compile(
    rf"\b(sections?|tables?|figures?|fig\.|eq\.|equations?|algorithm|appendix) "
    rf"((?:{ITEM})(?:(?:,| and| to|, and) (?:{ITEM}))*)",
    re.IGNORECASE,
)
NAME = re.compile(r"\b[123]DH\b|[A-Za-z_][\w^./+-]*")
NUMBER = re.compile(r"\d[\d,.]*")
KINDS = {"table": "Table", "fig.": "figure", "equation": "eq.", "algorithm": "Algorithm"}


def references(text: str) -> set[str]:
    """Return the places of a paper that a text names, e.g. "Table IV"."""
    found = set()
    for kind, items in REFERENCE.findall(text):
        word = kind.lower().rstrip("s")
        word = KINDS.get(word, word)
        names = re.findall(ITEM, items)
        for first, last in re.findall(r"(\d+) to (\d+)", items):
            names += map(str, range(int(first), int(last)))
        found |= {f"{word} {name}" for name in names}
    return found


def loose_numbers(text: str) -> list[str]:
    """Return the numbers in a text that have no source: no placeholder, code, name or place."""
    for pattern in (CODE, PLACEHOLDER, REFERENCE, NAME):
        text = pattern.sub(" ", text)
    return [number.rstrip(".,") for number in NUMBER.findall(text)]


def settings(table: dict[str, Any]) -> set[str]:
    """Return the numbers of the settings that a paper's quotes describe, such as 16 GPUs."""
    groups = [*table["group"], *table.get("quote", ())]
    described = " ".join(group["what"] for group in groups)
    named = " ".join(name.replace(".", " ") for group in groups for name in group["cells"])
    return set(re.findall(r"\d[\d.]*", described.replace(",", "") + " " + named))


def table_of(paper: str, name: str) -> dict[str, Any]:
    return read_table(ROOT / "lab" / "moesaic_lab" / "reproduce" / "data" / paper / f"{name}.toml")


def texts(paper: str) -> Iterator[str]:
    """Yield all texts of a paper's page that people wrote. Assumptions say that they are ours."""
    yield page_of(paper)
    words = table_of(paper, "words")
    yield from words["unexplained"]
    yield from words.get("missed", {}).values()
    yield from (each[key] for each in words.get("headline", ()) for key in ("what",))
    yield from (each.get("why", "") for each in words.get("headline", ()))
    for comparison, headline in made():
        if comparison.paper == paper:
            yield headline.what


@pytest.mark.parametrize("paper", PAPERS)
def test_every_number_of_a_page_is_a_quote_or_a_result(paper: str) -> None:
    known = settings(table_of(paper, "quotes"))
    loose = [
        (number, text[:80])
        for text in texts(paper)
        for number in loose_numbers(text)
        if number.replace(",", "") not in known
    ]
    assert loose == []


@pytest.mark.parametrize("paper", PAPERS)
def test_every_place_that_a_page_names_stands_in_the_quotes(paper: str) -> None:
    table = table_of(paper, "quotes")
    known = {*table["places"]}
    known |= {each["place"] for each in [*table["group"], *table.get("quote", ())]}
    known |= {place for each in known for place in references(each)}
    known |= {place.replace("appendix", "section") for place in known}
    named = references(PAGES[paper])
    assert named - known == set()


@pytest.mark.parametrize("paper", PAPERS)
def test_statements_of_findings_quote_the_paper(paper: str) -> None:
    quotes = table_of(paper, "quotes")
    groups = [*quotes["group"], *quotes.get("quote", ())]
    known = settings(quotes)
    known |= {f"{value:g}" for g in groups for value in g["cells"].values() if value != "."}
    for finding in read_results()["reproduce"]["papers"][paper]["findings"]:
        if not finding["statement"].startswith("loads of"):
            loose = {each.replace(",", "") for each in loose_numbers(finding["statement"])}
            assert loose <= known, finding["statement"]


def test_a_number_without_a_source_is_found() -> None:
    assert loose_numbers("S1 and GPT-2 of section 5.3, eq. 1, 11 to 14: {a.b:.2f} x, 2DH") == []
    assert loose_numbers("published 1.67, 39 % of `x 3`") == ["1.67", "39"]
    assert references("section III-B, Tables 7 and 11, eq. 1, 11 to 13") == {
        "section III-B",
        *(f"Table {n}" for n in (7, 11)),
        *(f"eq. {n}" for n in (1, 11, 12, 13)),
    }


def test_every_citation_of_a_paper_names_its_first_author() -> None:
    publications = read_book().publications
    cited = re.compile(r"([A-Z]\w+) et al\.,? [^.;]{0,80}?(" + "|".join(VENUES) + r")\)?")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]
    sources += [*(ROOT / "docs").rglob("papers*.md")]
    by_venue = {
        f"{each.venue} {each.year}": each.short.split()[0] for each in publications.values()
    }
    found = [
        (path.name, author, venue)
        for path in sources
        for author, venue in cited.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 15
    assert [each for each in found if by_venue[each[2]] != each[1]] == []


def balanced(case: str, gains: dict[str, float]) -> list[dict[str, Any]]:
    shared = {"part": "bed", "case": case, "bed": "2x2 133mbit", "max_vio": 1.0}
    return [
        {**shared, "method": name, "plain_over_this": gain, "plain_over_this_95": [gain, gain]}
        for name, gain in gains.items()
    ]


def test_gains_by_load_are_under_one_rule_and_synthetic_loads_stand_apart() -> None:
    gains = {"plain ep": 1, "shadow, published": 2, "shadow": 3, "smart schedule": 4}
    rows = [
        row for case in ("2x2-1", "laer") for row in balanced(case, {**gains, "smart + shadow": 5})
    ]
    synthetic, recorded = by_load(rows)
    assert synthetic.splitlines()[0] == "### By load: a synthetic Zipf law"
    assert recorded.splitlines()[0] == "### By load: recorded loads"
    for text, case in ((synthetic, "2x2-1"), (recorded, "laer")):
        (line,) = (each for each in text.splitlines() if each.startswith(f"| {case} "))
        assert re.findall(r"(\d)\.00 \(", line) == ["3", "4", "5", "2"]


def test_a_saving_bounds_a_gain_for_each_model_by_its_own() -> None:
    rows = [
        {"cell": "netmoe.change.16.M", "published": -42.94, "ours": -50.0},
        {"cell": "netmoe.change.16.XL", "published": None, "ours": -20.0},
        {"cell": "netmoe.scatter.2", "published": 1.0, "ours": 1.0},
    ]
    assert bounds(rows).splitlines()[-2:] == [
        "| 2 | M | 42.9 % | 1.75 | 50.0 % | 2.00 |",
        "| 2 | XL |  |  | 20.0 % | 1.25 |",
    ]
