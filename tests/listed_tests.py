"""The list of the tests that there must be, `tests/listed_tests.txt`: how it is read, compared and
written.

`make test-ids` writes it anew. The lines of a file follow its path. Each has the set that a test
belongs to (`test`, `random` or `slow`), the name of its function and, for each case, the first
digits of a checksum of its parameters. `tests/test_listed_tests.py` fails if a listed test is
missing. Tests that the list does not have yet are allowed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("listed_tests.txt")
OF_THE_MACHINE = (
    "test_the_layer_compiles_by_another_triton",
    "test_kernels_run_under_the_interpreter_of_another_triton",
)
"""Functions whose cases depend on what is installed: their parameters are not compared."""
HEAD = (
    "# Tests that must not get lost. `make test-ids` writes this list; only a feature that leaves "
    "shortens it.\n"
)
SKIPPED = "# skipped: "

Case = tuple[str, str, str]
"""The path of a file, the set and the function, and the checksum of the parameters, "" without
any."""


def case_of(kind: str, node: str) -> Case:
    """Return the case of a set and of pytest's id of a test."""
    path, _, test = node.partition("::")
    function, bracket, parameters = test.partition("[")
    if function in OF_THE_MACHINE or not bracket:
        return path, f"{kind} {function}", ""
    return path, f"{kind} {function}", hashlib.sha256(parameters.encode()).hexdigest()[:5]


def kind_of(item: pytest.Item) -> str:
    """Return the set that a test belongs to, as the Makefile's targets divide them."""
    marks = [kind for kind in ("slow", "random") if item.get_closest_marker(kind)]
    return marks[0] if marks else "test"


def cases_of(items: Iterable[pytest.Item]) -> set[Case]:
    """Return the cases of collected tests."""
    return {case_of(kind_of(item), item.nodeid) for item in items}


def written(cases: Iterable[Case]) -> str:
    """Return the text of the list."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, function, checksum in sorted(cases):
        files[path][function].append(checksum)
    blocks = (
        f"\n{path}\n"
        + "".join(
            " ".join([f"  {name}", *filter(None, sums)]) + "\n" for name, sums in functions.items()
        )
        for path, functions in files.items()
    )
    return HEAD + "".join(blocks)


def read(text: str) -> set[Case]:
    """Return the cases of a text of `written`."""
    cases = set()
    path = ""
    for line in filter(None, text.splitlines()):
        if line.startswith("  "):
            kind, function, *sums = line.split()
            cases |= {(path, f"{kind} {function}", checksum) for checksum in sums or [""]}
        elif not line.startswith("#"):
            path = line
    return cases


def missing(
    listed: Collection[Case], found: Collection[Case], skipped: Collection[str] = ()
) -> list[str]:
    """Return a line for each function with cases that are listed and were not found.

    Args:
        listed: the cases that there must be.
        found: the cases that there are.
        skipped: paths of files that could not be imported for lack of a package; their cases are
            not compared.
    """
    lost: Mapping[tuple[str, str], list[str]] = defaultdict(list)
    for path, function, checksum in sorted(set(listed) - set(found)):
        if path not in skipped:
            lost[path, function].append(checksum)
    sizes = [(path, function) for path, function, _ in listed]
    return [
        f"{path} lacks {len(sums)} of {sizes.count((path, function))} cases of {function}"
        for (path, function), sums in lost.items()
    ]


class Collected:
    """A pytest plugin that keeps the cases of a session and the files that it skipped as a whole.

    Attributes:
        cases: of all tests that were collected, also of those that `-m` and `-k` leave out.
        skipped: paths of files for which a package is missing.
    """

    def __init__(self) -> None:
        self.cases: set[Case] = set()
        self.skipped: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that is skipped."""
        if report.skipped:
            self.skipped.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the tests, before options leave some out."""
        self.cases = cases_of(items)


def is_whole(config: pytest.Config) -> bool:
    """Return whether a session collects every file of the tests."""
    options = config.option
    everything = [(ROOT / argument).resolve() for argument in config.args] == [ROOT / "tests"]
    return everything and not (
        options.ignore or options.ignore_glob or options.markexpr.startswith("random")
    )


def collect() -> Collected:
    """Collect the whole suite in this process, without running it; this takes half a minute."""
    found = Collected()
    with redirect_stdout(sys.stderr):
        code = pytest.main(
            ["--collect-only", "-qqq", "-p", "no:xdist", str(ROOT / "tests")], [found]
        )
    if code != pytest.ExitCode.OK:
        sys.exit(f"the tests cannot be collected: pytest ended with {code!r}")
    return found


def collect_apart() -> tuple[set[Case], set[str]]:
    """Return the cases of the whole suite and the files that are skipped as a whole, collected in a
    new process."""
    command = [sys.executable, __file__, "--print"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=500
    )
    skipped = {
        line.removeprefix(SKIPPED) for line in done.stdout.splitlines() if line.startswith(SKIPPED)
    }
    return read(done.stdout), skipped


def main(words: list[str]) -> None:
    """Write the list, with what it says of files that are skipped here; with `--print`, print what
    was found."""
    found = collect()
    if words == ["--print"]:
        sys.stdout.write(
            written(found.cases) + "".join(f"{SKIPPED}{path}\n" for path in sorted(found.skipped))
        )
    else:
        kept = {case for case in read(LIST.read_text("utf-8")) if case[0] in found.skipped}
        LIST.write_text(written(found.cases | kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
