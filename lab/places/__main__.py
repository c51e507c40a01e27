"""`python3 -m places [PLACE ...]`: run the smoke test in these places, or in all, print the table
and write it."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from places.place import PLACES, Place
from places.table import exit_code, render
from places.visit import visit

ROOT = Path(__file__).resolve().parents[2]


def main(
    words: Sequence[str] | None = None, *, root: Path = ROOT, places: Sequence[Place] = PLACES
) -> int:
    """Run the places that a command line names; return the exit code."""
    names = [place.name for place in places]
    parser = argparse.ArgumentParser(prog="places", description=__doc__)
    parser.add_argument("place", nargs="*", help=f"of {', '.join(names)}; without one, all")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the folders of places that passed, gigabytes each",
    )
    given = parser.parse_args(words)
    unknown = [name for name in given.place if name not in names]
    if unknown:
        print(
            f"places: no place is named {', '.join(unknown)}: take some of {', '.join(names)}",
            file=sys.stderr,
        )
        return 2
    out = root / "build" / "places"
    out.mkdir(parents=True, exist_ok=True)
    commit = git(root, "rev-parse", "HEAD").strip()
    title = heading(root, commit)
    judged = []
    for place in places:
        if not given.place or place.name in given.place:
            judged += visit(place, root, commit, out, keep=given.keep)
    table = render([each.row for each in judged], title)
    (out / "table.txt").write_text(table, encoding="utf-8")
    print(f"\n{table}", flush=True)
    return exit_code(judged)


def heading(root: Path, commit: str) -> str:
    """Return what was tried: the commit, and whether the working tree has more."""
    changed = git(root, "status", "--porcelain").strip()
    more = ", without the changes that are not committed" if changed else ""
    return f"Moesaic {commit[:12]}{more}"


def git(root: Path, *words: str) -> str:
    """Return what git prints."""
    return subprocess.run(
        ["git", *words], cwd=root, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    # a step's processes end too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
