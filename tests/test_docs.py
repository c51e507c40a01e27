"""Documentation and results agree with each other and with the code."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from forked import Forked
from moesaic.cli.main import COMMANDS, LABORATORY, main
from moesaic.configfile import read_table
from moesaic.planner.cluster import ClusterSpec, Device, Link, presets
from moesaic.planner.plan_files import write_plan
from moesaic.program.plan import Plan
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic_lab import performance_page, timeline_picture
from moesaic_lab.bench import BENCHMARKS, OTHERS
from moesaic_lab.front import blocks_of
from moesaic_testbed import refusal
from parsing import ParsedError, parse_only
from places import pages as printed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
STALE = {"fuzz", "gpu"}
"""The only results that may wait, for a GPU or an idle hour; others are measured with the change
that outdates them."""
DOCS = ROOT / "docs"
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "lab/README.md", "tests/regressions.md")
    ),
    *sorted(DOCS.glob("*.md")),
]


def test_performance_page_is_what_the_results_say() -> None:
    assert performance_page.main(["--check"]) == 0, "run make docs and commit docs/performance.md"


def test_the_picture_of_a_timeline_is_what_is_simulated() -> None:
    text = timeline_picture.PICTURE.read_text(encoding="utf-8")
    for name, timeline in timeline_picture.timelines().items():
        assert timeline_picture.title(name, timeline) in text, (
            "run make docs and commit docs/images/timeline.svg"
        )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_have_the_one_shape(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"machine", "versions", "date", "rows", "claims"} <= set(result)
    assert "stale" not in result or path.stem in STALE
    for claim in result["claims"]:
        assert {"name", "value", "unit", "target", "op", "holds"} <= set(claim)
        assert claim["value"] is not None or claim["reason"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    if page.name == "log.md":  # names files as they were called then
        return
    for path in re.findall(r"`((?:src|lab|benchmarks|docs|examples|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


TEXTS = [
    page
    for page in [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]
    if page.name != "log.md"
]


def test_files_that_pages_and_docstrings_name_exist() -> None:
    """A file may be named by the end of its path; what begins with a folder that we do not have is
    somebody else's."""
    files = [
        path.relative_to(ROOT).parts
        for top in ("src", "lab", "docs", "tests", "examples")
        for path in (ROOT / top).rglob("*.*")
    ]
    ends = {"/".join(parts[at:]) for parts in files for at in range(len(parts))}
    named = {
        (path, text.name)
        for text in TEXTS
        for path in re.findall(
            r"(?<![\w./{<*-])((?:\w+/)+\w+\.(?:py|md))\b",
            re.sub(r"```python\n.*?```", "", text.read_text("utf-8"), flags=re.DOTALL),
        )
    }
    ours = {path for path in named if any(path[0].split("/")[0] in parts[:-1] for parts in files)}
    assert {(path, where) for path, where in ours if path not in ends} == set()


def test_tests_that_pages_name_exist() -> None:
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    named = {
        (name, page.name)
        for page in PAGES
        if page.name != "log.md"
        for name in re.findall(r"::(test_\w+)", page.read_text("utf-8"))
    }
    assert len(named) > 20
    assert {(name, page) for name, page in named if name not in written} == set()


def test_advice_to_install_names_folders_and_extras_of_the_repository() -> None:
    """No registry has the package, so its name after `pip install` would be advice that fails."""
    projects = {at: read_table(ROOT / at / "pyproject.toml")["project"] for at in (".", "./lab")}
    named = {
        (*extra, text.name)
        for text in TEXTS
        for extra in re.findall(r"""["'](\.|\./lab)\[(\w+)\]["']""", text.read_text("utf-8"))
    }
    assert len(named) > 20
    assert {
        each for each in named if each[1] not in projects[each[0]]["optional-dependencies"]
    } == set()
    by_name = re.compile(r"""pip install [^`\n]*["' ]moesaic\b""")
    assert [text.name for text in TEXTS if by_name.search(text.read_text("utf-8"))] == []


def test_errata_that_are_cited_are_listed() -> None:
    listed = set(
        re.findall(
            r"^\| ([FNPST]\d) \|", (ROOT / "docs" / "papers.md").read_text("utf-8"), re.MULTILINE
        )
    )
    cited = {
        number
        for text in TEXTS
        for numbers in re.findall(
            r"\berrat(?:a|um) ((?:[FNPST]\d(?: to | and |, )?)+)", text.read_text("utf-8")
        )
        for number in re.findall(r"[FNPST]\d", numbers)
    }
    assert len(cited) >= 8
    assert cited <= listed


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(
        f"`{command}`" in readme or f"moesaic {command}" in readme
        for command in [*COMMANDS, *LABORATORY]
    )


def written(page: Path) -> str:
    """Return the part of a page that people wrote: without the spans, or the whole page, that a
    program writes."""
    text = page.read_text("utf-8")
    if "writes this page; do not edit it" in text:
        return ""
    return re.sub(r"<!-- (\w+): [^\n]*-->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)


def test_the_pages_are_short() -> None:
    words = {
        str(page): len(written(page).split())
        for page in DOCS.rglob("*.md")
        if page.name != "log.md"
    }
    assert sum(words.values()) <= 48_600, sorted(words.items(), key=lambda item: -item[1])


def test_code_of_pages_fits_their_column() -> None:
    wide = [
        (page.name, line)
        for page in PAGES
        if page.name != "log.md"
        for code in re.findall(
            r"```(?:python|bash|toml)\n(.*?)```", page.read_text("utf-8"), re.DOTALL
        )
        for line in code.splitlines()
        if len(line) > 88
    ]
    assert wide == []


def test_every_benchmark_that_a_page_names_exists() -> None:
    known = {*BENCHMARKS, *OTHERS}
    for page in PAGES:
        if page.name != "log.md":
            named = re.findall(r"\bmoesaic bench ([a-z][\w-]*)", page.read_text("utf-8"))
            assert {*named} <= known, page


def test_every_result_has_a_command_on_the_page_of_benchmarks() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .+ \| `moesaic ([\w ]+)",
        (DOCS / "benchmarks.md").read_text("utf-8"),
        re.MULTILINE,
    )
    named = {*BENCHMARKS, *OTHERS}
    for result, words in rows:
        command, *what = words.split()
        assert command in LABORATORY, result
        assert command != "bench" or what[0] in named, result
    unlisted = [
        path.stem
        for path in RESULTS
        if not path.stem.startswith(tuple(result for result, _ in rows))
    ]
    assert unlisted == []


def test_every_router_of_the_layer_page_is_one() -> None:
    page = (ROOT / "docs" / "layer.md").read_text(encoding="utf-8")
    table = page[page.index("## Routers") :].split("\n## ", 1)[0]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(names) > 8
    assert set(names) <= {*ROUTERS, *ON_MESH}


PROGRAMS = sorted(
    path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("test_")
)


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda path: path.stem)
def test_examples_run(example: Path) -> None:
    command = Forked([str(example)], {})
    out, err = command.communicate(timeout=300)
    assert command.returncode == 0, err
    assert "tokens per expert" in out


BLOCKS = {page: blocks for page in PAGES if (blocks := blocks_of(page))}


@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_block_of_a_page_runs_as_a_file_of_its_own(page, tmp_path, monkeypatch):
    """Files of one page lie in one folder and run in order, those for several ranks under
    torchrun."""
    monkeypatch.chdir(tmp_path)
    for ranks, name, code in BLOCKS[page]:
        if "import cluster" in code and refusal() is not None:
            break  # the files that follow use this one
        if page.name == "start.md" and ranks:  # is on the README, see below
            continue
        (tmp_path / name).write_text(code, encoding="utf-8")
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            if ranks
            else []
        )
        imports = ["moesaic.transformers"] if "import moesaic.transformers" in code else []
        command = Forked([*launcher, str(tmp_path / name)], {}, imports)
        out, err = command.communicate(timeout=300)
        assert command.returncode == 0, f"{name}:\n{code}\n{out}\n{err}"


OF_LAB = ("benchmark", "traces.command", "reproduce.command", "vision.train")
"""Modules of the laboratory that parse words."""
OF_A_READER = {("show", "--plan.all-to-all", "ring")}
"""Commands that need the code which the page around them adds."""


NO_SUCH = re.compile("unknown argument|did you mean")
"""What is wrong with a command between backquotes, which may leave words out."""


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that commands of pages read, in which no command runs."""
    names = [f"moesaic.cli.{name.replace('-', '_')}" for name in COMMANDS]
    names += [f"moesaic_lab.{name}" for name in OF_LAB]
    for module in map(import_module, names):
        parse_only(module, monkeypatch)
    for name in ("my.toml", *(f"runs/{run}/config.json" for run in ("x", "gpt", "stages"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}" if name.endswith("json") else "")
    planning = printed.blocks((DOCS / "planning.md").read_text("utf-8"))
    model = next(block.text for block in planning if block.language == "toml")
    (tmp_path / "gpt.toml").write_text(model)
    write_plan(Plan(), tmp_path / "plan.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_a_page_has_flags_and_values_that_there_are(page_folder, capsys):
    """Of fenced and indented blocks, those of numbered lists too, and between backquotes, where
    some only name a command or a flag."""
    wrong = []
    for block in (block for page in PAGES for block in printed.blocks(page.read_text("utf-8"))):
        for words in printed.commands_in(block):
            told = tuple(word for word in words if word != "...")
            told = told[: told.index("--")] if "--" in told else told
            ours = told[told.index("moesaic") + 1 :] if "moesaic" in told else ()
            is_name = not ours or (block.language == "inline" and len(ours) < 3)
            if is_name or ours[0] in ("testbed", "--help") or ours in OF_A_READER:
                continue
            try:
                code = main(ours)
            except ParsedError:
                continue
            said = capsys.readouterr().err
            if code and (block.language != "inline" or NO_SUCH.search(said)):
                wrong.append((ours, said))
    assert wrong == [], "\n".join(map(str, wrong))


FIRST_RUN = ("README.md", "start.md")
"""Pages whose first run goes to the preset's own folder, which no other page may take."""


def test_runs_that_commands_of_a_page_read_are_made_there_before() -> None:
    """A reader who types a page from its beginning finds every run folder that a command reads, and
    finds none taken that a command makes."""
    not_made = []
    taken = []
    for page in PAGES:
        text = page.read_text("utf-8")
        made = {*re.findall(r'^out = "(runs/\w+)"', text, re.MULTILINE)}
        for block in printed.blocks(text):
            if block.language in ("inline", "text"):  # text: what a program prints
                continue
            for words in printed.commands_in(block):
                pairs = pairwise(words)
                made |= {word for flag, word in pairs if flag in ("--out", "--keep")}
                made |= {"runs/vision"} if "vision" in words else set()  # its default
                read = {each[0] for word in words if (each := re.match(r"runs/\w+", word))}
                not_made += [(page.name, folder) for folder in sorted(read - made)]
                if "--preset" in words and "train" in words and "--out" not in words:
                    taken.append(page.name)
    assert not_made == []
    assert sorted(set(taken)) == sorted(FIRST_RUN)


def test_a_run_that_a_page_resumes_has_steps_left() -> None:
    """A run that the page did not stop is at its end, and more steps are given."""
    resumed = [
        (page.name, words)
        for page in PAGES
        for block in printed.blocks(page.read_text("utf-8"))
        if block.language not in ("inline", "text")
        for words in printed.commands_in(block)
        if "resume" in words
    ]
    assert len(resumed) > 1
    assert [(page, words) for page, words in resumed if "--steps" not in words] == []


def test_the_page_of_planning_lists_every_preset_of_a_cluster() -> None:
    text = (DOCS / "planning.md").read_text("utf-8").split("\n## The cluster\n")[1]
    listed = {*re.findall(r"`([\w-]+)`", text.split("```toml")[0])}
    assert {*presets()} <= listed


def test_the_page_of_planning_names_the_fields_that_a_cluster_needs() -> None:
    """And that they suffice."""
    text = (DOCS / "planning.md").read_text("utf-8").split("\n## The cluster\n")[1]
    told = {*re.findall(r"`(\w+)`", text.split("Required are ")[1].split(". ")[0])}
    needed = {
        each.name
        for kind in (ClusterSpec, Device, Link)
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }
    assert told == needed - {"device"}  # whose fields are told


def test_several_machines_meet_by_a_backend() -> None:
    """torchrun's own default, static, would take every machine for the first, and wait."""
    alone = [
        (text.name, before)
        for text in TEXTS
        for before in re.findall(r"(.{0,80})--rdzv-endpoint", text.read_text("utf-8"), re.DOTALL)
        if "--rdzv-backend c10d" not in before
    ]
    assert alone == []


def _is_module(package: str, name: str) -> bool:
    """Return whether a package has a module of that name."""
    return (
        hasattr(import_module(package), "__path__") and find_spec(f"{package}.{name}") is not None
    )


def test_code_of_pages_imports_names_that_there_are() -> None:
    """Also that of blocks that are parts of the package, which `test_every_python_block...` does
    not run."""
    missing = []
    for page in PAGES:
        if page.name == "log.md":
            continue
        codes = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        own = {name for code in codes for name in re.findall(r"^# src/(\S+)\.py", code)}
        for module, names in re.findall(
            r"^ *from (moesaic[\w.]*) import (\([^)]*\)|[^\n(]+)", "\n".join(codes), re.MULTILINE
        ):
            if module.replace(".", "/") in own:
                continue
            found = import_module(module)
            for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)):
                is_own = f"{module}.{name}".replace(".", "/") in own
                if not is_own and not hasattr(found, name) and not _is_module(module, name):
                    missing.append((page.name, module, name))
    assert missing == []


def test_commands_are_found_in_every_kind_of_block() -> None:
    page = """Look at `moesaic show --plan.chunks 2`.

```bash
pip install ".[train]"  # once
```

1. Search.

        moesaic plan --model a \\
            --cluster b

    It prints:

        speed: 1
2. Train:

        torchrun ... -m moesaic train

```python
moesaic = "no command"
```

    moesaic report RUN
"""
    assert [" ".join(words) for words in printed.commands(page)] == [
        "moesaic show --plan.chunks 2",
        "pip install .[train]",
        "moesaic plan --model a --cluster b",
        "torchrun ... -m moesaic train",
        "moesaic report RUN",
    ]


def test_the_file_for_several_ranks_is_one_on_both_first_pages() -> None:
    (file, of_start) = (
        [code for ranks, _, code in BLOCKS[ROOT / page] if ranks]
        for page in ("README.md", "docs/start.md")
    )
    assert file == of_start
    assert len(file) == 1


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_performance_page_is_short_and_says_what_is_missed() -> None:
    text = performance_page.PAGE.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if line and not line.startswith("<!--")]) <= 155
    claim = {"name": "x", "value": 2.0, "reason": "", "op": "<=", "target": 1.0, "holds": False}
    result = {"claims": [claim], "date": "today", "machine": {"cpu": "a CPU", "cores": 2}}
    found = performance_page.section(["one"], {"one": result})
    assert "Missed: `x`." in found
    assert "Stale" not in found
    text = (
        "before\n<!-- claims: one -->\n<!-- end of claims -->\n<!-- claims: others -->\nold<!-- "
        "end of claims -->\n"
    )
    stale = performance_page.page(
        text, {"one": {**result, "stale": "it changed"}, "two": {**result, "stale": "it too"}}
    )
    assert "**Stale:** `one.json`, it changed." in stale
    assert "Further figures are in `two.json` (stale)." in stale
    assert performance_page.page(stale, {}).startswith(
        "before\n<!-- claims: one -->\n\nEvery target holds. Not measured."
    )


def test_claims_that_hold_alike_are_one_line_with_the_worst() -> None:
    def claim(name: str, value: float, target: float = 2) -> dict[str, object]:
        return {
            "name": name,
            "value": value,
            "target": target,
            "op": "<=",
            "holds": value <= target,
        }

    claims = [
        claim("a.x.time", 1),
        claim("a.y.time", 1.5),
        claim("a.z.time", 3),
        claim("a.v.time", 0.5, 1),
    ]
    lines = [performance_page.line(alike) for alike in performance_page.families(claims)]
    assert lines[0] == ["`a.y.time` (the worst of 2 with this target)", "1.5", "<= 2", "yes"]
    assert [cells[0] for cells in lines[1:]] == ["`a.z.time`", "`a.v.time`"]


def _named_packages(project: Path, extra: str) -> set[str]:
    """Return the packages that an install of a project with an extra names, without versions."""
    table = read_table(project / "pyproject.toml")["project"]
    names: set[str] = set()
    for word in [*table["dependencies"], *(table["optional-dependencies"][extra] if extra else [])]:
        name, _, extras = re.split(r"[<>=; ]", word)[0].partition("[")
        if name == "moesaic":
            names |= set[str]().union(
                *(_named_packages(ROOT, each) for each in extras.rstrip("]").split(","))
            )
        elif "python_version <" not in word:
            names.add(name.lower())
    return names


def test_the_page_on_security_lists_what_an_install_brings() -> None:
    """No install of the library brings a web framework."""
    section = (
        (ROOT / "docs" / "security.md")
        .read_text(encoding="utf-8")
        .partition("## What an install brings")[2]
    )
    rows = re.findall(r"^\| `(\./lab|\.)(?:\[(\w+)\])?` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 5
    above = _named_packages(ROOT, "")
    for project, extra, cell in rows:
        told = {
            word.lower()
            for word in re.sub(r"\(.*?\)|those( of [a-z ]+)?", "", cell).replace(",", " ").split()
        }
        found = _named_packages(ROOT / project, extra)
        assert told <= found, (project, extra)
        assert found - told <= above, (project, extra)
        above |= found
        assert project != "." or "django" not in found


def test_code_of_a_page_stays_in_its_block() -> None:
    """A line without its indentation, right below indented code, is shown as text."""
    fallen = []
    for page in PAGES:
        lines = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL).splitlines()
        is_code = False
        for before, line in zip(["", *lines], lines):
            if is_code and line and not line.startswith("    "):
                fallen.append((page.name, line))
            starts = line.startswith("    ") and not before.strip()
            is_code = line.startswith("    ") and (is_code or starts)
            in_list = re.match(r"\s*(?:[-*]|\d+\.) ", line)
            is_code = is_code and not in_list
    assert fallen == []


def test_tables_of_flags_have_those_of_the_command_above_them(capsys) -> None:
    """The last command that a page names before the table is the one whose flags it lists."""
    missing = []
    command = "|".join([*COMMANDS, *LABORATORY])
    for page in PAGES:
        text = page.read_text("utf-8")
        for table in re.finditer(r"^\| (?:option|flag) \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
            cells = re.findall(r"^\| ([^|]*)\|", table[0], re.MULTILINE)
            flags = {flag for cell in cells for flag in re.findall(r"`(--[\w.-]+)", cell)}
            named = re.findall(rf"moesaic ((?:{command})\b(?: run\b)?)", text[: table.start()])
            if not flags or not named:
                continue
            words = named[-1].split()
            assert main([*words, "--help-all" if words == ["train"] else "--help"]) == 0
            there = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
            missing += [(page.name, words, flag) for flag in sorted(flags - there)]
    assert missing == []
