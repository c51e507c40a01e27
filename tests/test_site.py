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
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
