"""The documentation site: it builds without a warning, has few guides, and no page is wider than a
window or a phone."""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moesaic
import moesaic.transformers
from moesaic_lab.site import on_config

ROOT = Path(__file__).resolve().parent.parent
NAVIGATION = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
BROWSER = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
WIDTHS = (1400, 390)
"""Of a desktop's window and a phone's, in pixels."""
DRIVER = """<!doctype html><body><script>
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;height:800px;width:${width}px`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await new Promise(done => setTimeout(done, 100));
  const found = JSON.stringify([page, width, frame.contentDocument.scrollingElement.scrollWidth]);
  frame.remove();
  await fetch("/found", {method: "POST", body: found});
}
(async () => {
  for (const page of PAGES) await Promise.all(WIDTHS.map(width => measure(page, width)));
})();
</script></body>"""
"""Opens every page in a frame of each width, which is a window of its own for style sheets, and
sends back how wide it is."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. Quiet, mkdocs would count no warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


SPANS = {"a", "strong", "em", "sup", "sub", "abbr", "summary"}
"""Elements whose text belongs to the line around it."""
NO_TEXT = {"code", "pre", "script", "style", "svg"}
"""Elements that show markup on purpose, or nothing."""
NO_END = {"br", "hr", "img", "input", "link", "meta", "path", "source"}
MARKUP = (
    r"^\|.*\|",
    r"^#+ ",
    r"^[-*+] ",
    r"(?<=[.:;]) [-*] ",
    r"^\d+\. ",
    r"(?<=[.:;]) \d+\. ",
    r"\*\*|__|`",
    r"\]\(",
    r"^(moesaic|torchrun|python3?|pip) .*--?[a-z]",
)
"""What Markdown leaves where it has taken no table, heading, list, emphasis, code, link or command
for one. A list or a command that follows on a line of its paragraph counts too."""
CODE_COLUMNS = 88
"""Columns of a block of code in a window of 1280 pixels."""


class Shown(HTMLParser):
    """The lines of a page that a reader sees outside of code, and its blocks of code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        text = page.read_text("utf-8")
        self.open: list[str] = []
        self.text = ""
        self.code = ""
        self.feed(text[text.index("<article") : text.index("</article>")])

    def handle_starttag(self, tag: str, attributes: object) -> None:
        """Begin a new line at every element that is a block."""
        if tag not in NO_END:
            self.open.append(tag)
        if tag == "pre":
            self.code += "\n"
        if tag not in SPANS | NO_TEXT:
            self.text += "\n"
        if tag == "code" and "pre" not in self.open:
            self.text += "\N{OBJECT REPLACEMENT CHARACTER}"

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        while self.open and self.open.pop() != tag:
            pass
        if tag not in SPANS | NO_TEXT:
            self.text += "\n"

    def handle_data(self, data: str) -> None:
        """Add text to the lines or to the code."""
        if "pre" in self.open:
            self.code += data
        elif not NO_TEXT & set(self.open):
            self.text += data


def shown(site: Path) -> dict[str, Shown]:
    """Return what every page of the site shows."""
    return {
        page.parent.relative_to(site).as_posix(): Shown(page)
        for page in sorted(site.rglob("index.html"))
    }


def test_no_page_shows_markup(site: Path) -> None:
    found = [
        (name, line.strip())
        for name, page in shown(site).items()
        for line in page.text.splitlines()
        if any(re.search(markup, line.strip()) for markup in MARKUP)
    ]
    assert found == []


UNITS = (
    r"s|ms|us|ns|minutes?|hours?|seconds?|milliseconds?|microseconds?|days?|[kKMGT]i?B|bytes?|bits?"
    r"|[kKMGT]?bit/s|[kKMG]i?B/s|[MGT]?FLOPs?|[MGT]FLOP/s|TFLOPS?|[a-z]+/s|%|percent|USD|EUR"
    r"|dollars?|euros?|times|ratios?|shares?|over|factor|errors?|speed-?ups?|gains?|regret"
    r"|correlation|r2|perplexity|loss|losses|accuracy"
)
"""Units, currencies and words for ratios, as a regular expression."""
COUNTED = (
    r"counts?|numbers?|unit|date|version|tokens?|ranks?|layers?|experts?|nodes?|devices?|GPUs?"
    r"|cards?|machines?|cores?|steps?|sequences?|heads?|parameters?|rows?|cases?|tests?|chunks?"
    r"|stages?|runs?|messages?|seeds?|inputs?|figures|kernels?|launches|registers|operators|modules"
    r"|sources?|plans?|copies|faults?|micro-batch(es)?|width|dim|hidden|top.?k|k|size|sizes|dp|ep|tp"
    r"|pp|edp|etp|MaxVio|exponent|capability|table|section|equation|Python|torch|#"
)
"""What the title of a column may count, as a regular expression."""
A_NUMBER = re.compile(r"[\s<>=\u2264\u2265~+-]*\d[\d.,]*(\s*to\s*[\d.,]+)?\s*")


class Tables(HTMLParser):
    """The tables of a page: the text between the heading or table before and it, and its rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[list[str]]]] = []
        self._before = ""
        self._rows: list[list[str]] = []
        self._is_cell = False
        self.feed(text[text.index("<article") : text.index("</article>")])

    def handle_starttag(self, tag: str, attributes: object) -> None:
        """Begin a table, a row or a cell; a heading begins new text."""
        if tag in {"h1", "h2", "h3", "h4"}:
            self._before = ""
        elif tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"th", "td"}:
            self._rows[-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        """End a table or a cell."""
        if tag == "table":
            self.tables.append((self._before, self._rows))
            self._before = ""
        elif tag in {"th", "td"}:
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        """Add text to the cell, or to what stands before the next table."""
        if self._is_cell:
            self._rows[-1][-1] += data
        else:
            self._before += data


def without_unit(tables: Tables) -> list[str]:
    """Return the titles of columns of numbers of which nothing says what they count or measure:
    neither the title, nor the first column's, nor a column of units, nor the text before the
    table."""
    found = []
    for before, (titles, *rows) in tables.tables:
        if "unit" in titles:
            continue
        for place, title in enumerate(titles):
            cells = [row[place] for row in rows if place < len(row) and row[place].strip()]
            numbers = [each for each in cells if A_NUMBER.fullmatch(each)]
            if len(numbers) * 2 <= len(cells):
                continue
            if not names(f"{UNITS}|{COUNTED}", f"{title} {titles[0]}") and not names(UNITS, before):
                found.append(title)
    return found


def names(words: str, text: str) -> bool:
    """Return whether a text has one of some words."""
    return re.search(rf"(?<!\w)({words})(?!\w)", text, re.IGNORECASE) is not None


def test_every_column_of_numbers_names_its_unit(site: Path) -> None:
    found = {
        page.parent.relative_to(site).as_posix(): missing
        for page in sorted(site.rglob("index.html"))
        if (missing := without_unit(Tables(page.read_text("utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("before", "title", "missing"),
    [
        ("", "memory", ["memory"]),
        ("", "memory, GiB", []),
        ("Memory in GiB", "most", []),
        ("Of one card.", "price", ["price"]),
        ("", "price, USD", []),
    ],
)
def test_a_column_without_a_unit_is_found(before: str, title: str, missing: list[str]) -> None:
    page = f"""<article><h2>A page</h2><p>{before}</p><table><tr><th>what</th><th>{title}</th></tr>
        <tr><td>one</td><td>1.5</td></tr><tr><td>two</td><td>7</td></tr></table></article>"""
    assert without_unit(Tables(page)) == missing


def test_markup_that_was_not_taken_for_it_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        "<article><p>Look at the plan:\n3. <strong>Train</strong>, with this</p>\n"
        "<p>moesaic plan --model demo</p><p>so: - one</p><details>\n| a | b |\n</details>"
        "<pre><code>| right |\n- here</code></pre><p>a <code>**</code> b</p></article>",
        encoding="utf-8",
    )
    lines = [line.strip() for line in shown(tmp_path)["."].text.splitlines()]
    found = [line for line in lines if any(re.search(markup, line) for markup in MARKUP)]
    assert found == ["3. Train, with this", "moesaic plan --model demo", "so: - one", "| a | b |"]
    assert shown(tmp_path)["."].code == "\n| right |\n- here"


def test_no_line_of_code_is_cut_at_the_right(site: Path) -> None:
    wide = [
        (name, line)
        for name, page in shown(site).items()
        for line in page.code.splitlines()
        if len(line) > CODE_COLUMNS
    ]
    assert wide == []


def test_every_page_is_in_the_navigation() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"log.md"} == set(re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE))


def test_there_are_four_sections_and_few_guides() -> None:
    sections = dict(re.findall(r"^  - (\w+):\n((?:      - .+\n?)+)", NAVIGATION, re.MULTILINE))
    assert list(sections) == ["Learn", "Use", "Reference", "Evidence"]
    assert len((sections["Learn"] + sections["Use"]).splitlines()) <= 14


def test_the_front_has_three_doors(site: Path) -> None:
    front = (site / "index.html").read_text("utf-8")
    cards = front.split('class="grid cards"')[1].split("</div>")[0]
    assert re.findall(r"<strong>(.+?)</strong>", cards) == [
        "My layer",
        "My transformers model",
        "My cluster",
    ]


@pytest.mark.parametrize("address", ["", "https://example.org/somebody/moesaic"])
def test_links_to_the_repository_come_from_the_project_file(tmp_path: Path, address: str) -> None:
    project = tmp_path / "pyproject.toml"
    urls = f'[project.urls]\nRepository = "{address}"\n' if address else ""
    project.write_text(f'[project]\nname = "moesaic"\n{urls}', encoding="utf-8")
    config = on_config(SimpleNamespace(repo_url=None, repo_name=None, edit_uri=None), project)
    assert (config.repo_url or "") == address
    assert config.repo_name == ("somebody/moesaic" if address else None)
    assert config.edit_uri == ("edit/main/docs/" if address else None)


class Site(SimpleHTTPRequestHandler):
    """Serves the site without its search, which would read the whole index in every frame, and
    takes what the driver found."""

    found: queue.Queue[list[Any]]

    def do_GET(self) -> None:
        """Send a file of the site, or nothing for the search's worker."""
        if "workers/search" in self.path:
            self.send_error(404)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Keep one page's name, its window's width and its own."""
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH")
def test_no_page_is_wider_than_its_window(site: Path, tmp_path: Path) -> None:
    pages = sorted(
        page.relative_to(site).as_posix()
        for page in site.rglob("*.html")
        if page.name != "404.html"
    )
    driver = DRIVER.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "driver.html").write_text(driver, encoding="utf-8")
    handler = type("Handler", (Site,), {"found": queue.Queue()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={tmp_path}",
    ]
    command = [
        str(BROWSER),
        *words,
        "--window-size=1500,900",
        f"http://127.0.0.1:{server.server_port}/driver.html",
    ]
    browser = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        found = [handler.found.get(timeout=120) for _ in range(len(pages) * len(WIDTHS))]
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()
        (site / "driver.html").unlink()
    assert [(page, width, wide) for page, width, wide in found if wide > width] == []


def test_every_public_name_has_its_reference(site: Path) -> None:
    """A name that a page lists under a module that only imports it would be left out silently."""
    pages = (path.read_text("utf-8") for path in (site / "reference").rglob("*.html"))
    shown = {found for page in pages for found in re.findall(r'id="(moesaic\.[\w.]+)"', page)}
    public = {
        f"{value.__module__}.{name}"
        for module in (moesaic, moesaic.transformers)
        for name, value in ((name, getattr(module, name)) for name in module.__all__)
        if hasattr(value, "__module__")
    }
    assert public
    assert sorted(public - shown) == []
