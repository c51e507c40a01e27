"""Test the promise of docs/extending.md: each kind of part takes one new file and one registry
line, and then works.

The code blocks for each part are installed in a fresh copy of the package, as the page says, and
the touched files are counted. The contract tests that CONTRIBUTING.md names for this kind of part
run against the copy. Parts that move bytes are simulated on 2, 4 and 8 nodes of a cluster under
even routing, in two ways. The first is the planner's: a few ranks represent all ranks that are
known to behave identically. The second simulates every row of every rank. The ratio of the two
times says whether the planner can be trusted with a part that it has never seen.

    moesaic bench extending --json benchmarks/results/extending.json
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import read_cluster
from moesaic.planner.loads import decided, simulate_even
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, uniform_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import ROOT, Claim

KINDS = {
    "router": "A router",
    "all-to-all": "An all-to-all",
    "codec": "A codec",
    "schedule": "A schedule",
    "replication policy": "A balancing policy",
    "expert kernel": "An expert kernel",
}
"""Each kind of part: its row in CONTRIBUTING.md's table, and the heading in docs/extending.md above
its code."""
FIELDS = {
    "all-to-all": "all_to_all",
    "codec": "codec",
    "schedule": "schedule",
    "replication policy": "replication",
}
"""For each kind of part that moves bytes, the plan field that selects such a part by name."""
NODES = (2, 4, 8)
CLUSTER = "25gbe"
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "lab",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ExtendingOptions(BenchmarkOptions):
    """Options of `moesaic bench extending`."""

    tests: bool = True
    """Run the contract tests, which take minutes."""


@dataclass(frozen=True, kw_only=True)
class RegistryLine:
    """One entry that a part adds to a registry, which is a dict in a module of the package."""

    path: str
    """Path of the registry's file, relative to the root of the repository."""
    registry: str
    """Name of the dict."""
    imports: str
    """Import lines that the entry needs; "" for none."""
    entry: str
    """Text of the entry, `"name": value,`, on one or several lines."""

    @property
    def name(self) -> str:
        """Key of the entry."""
        return re.match(r'"([\w-]+)":', self.entry).group(1)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Extension:
    """A part as docs/extending.md shows it."""

    kind: str
    """Key of `KINDS`."""
    path: str
    """Path of the part's new file, relative to the root of the repository."""
    code: str
    """Content of that file."""
    lines: tuple[RegistryLine, ...]
    """Registry entries that make the part known."""


def extensions(page: str) -> list[Extension]:
    """Return the parts for which `page`, the text of docs/extending.md, has a file and an entry, in
    the order of `KINDS`."""
    parts = []
    for kind, heading in KINDS.items():
        _, _, after_heading = page.partition(f"\n## {heading}\n")
        section, _, _ = after_heading.partition("\n## ")
        blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)

        # A block begins with a comment: "# FILE" for a whole file, "# FILE, in DICT" for an entry.
        files = [block for block in blocks if re.match(r"# \S+\.py\n", block)]
        lines = [_line(block) for block in blocks if re.match(r"# \S+\.py, in \w+\n", block)]
        if files and lines:
            assert len(files) == 1, f"{heading}: one file a part, the page shows {len(files)}"
            path = files[0].split("\n", 1)[0].removeprefix("# ")
            code = files[0]
            parts.append(Extension(kind=kind, path=path, code=code, lines=tuple(lines)))
    return parts


def _line(block: str) -> RegistryLine:
    """Return the registry line of a block of documentation."""
    head, body = block.split("\n", 1)
    path, registry = head.removeprefix("# ").split(", in ")
    imports = "".join(
        f"{line}\n" for line in body.splitlines() if re.match(r"(from|import) ", line)
    )
    return RegistryLine(
        path=path, registry=registry, imports=imports, entry=body.removeprefix(imports).strip()
    )


def install(extension: Extension, root: Path) -> None:
    """Add a part's file and registry entries to the copy of the repository at `root`."""
    path = root / extension.path
    assert not path.exists(), f"{extension.path} is there already"
    path.write_text(extension.code, encoding="utf-8")
    for line in extension.lines:
        file = root / line.path
        file.write_text(_with(file.read_text(encoding="utf-8"), line), encoding="utf-8")


def _with(text: str, line: RegistryLine) -> str:
    """Return a module's text with an entry appended to one of its dicts and the entry's imports
    after the module's own."""
    rows = text.splitlines(keepends=True)
    module = ast.parse(text)
    literals = []
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if line.registry in map(ast.unparse, targets):
                literals.append(node.value)
    assert len(literals) == 1, f"{line.path} has {len(literals)} dicts named {line.registry}"
    (registry,) = literals

    # The entry goes before the dict's closing brace.
    last = (registry.end_lineno or 0) - 1
    brace = (registry.end_col_offset or 0) - 1
    before = "".join(rows[:last]) + rows[last][:brace]
    comma = "" if before.rstrip().endswith((",", "{")) else ", "
    rest = rows[last][brace:] + "".join(rows[last + 1 :])

    # The imports go after the module's last one.
    num_head = max(
        node.end_lineno or 0
        for node in module.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    head = "".join(rows[:num_head])
    body = before[len(head) :]
    return f"{head}{line.imports}{body}{comma}{line.entry}{rest}"


def copy_of_repository(target: Path) -> None:
    """Copy the files that a part may touch or that its tests read to `target`."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skip)
        else:
            shutil.copy(source, target / name)


def sources(root: Path) -> dict[Path, bytes]:
    """Return the content of every Python file of the package at `root`, by path."""
    return {path: path.read_bytes() for path in (root / "src").rglob("*.py")}


def contracts(kind: str, guide: str) -> list[str]:
    """Return the tests that CONTRIBUTING.md names for a kind of part."""
    row = next(line for line in guide.splitlines() if line.startswith(f"| {kind} |"))
    _, last_cell, _ = row.rsplit("|", 2)
    paths = re.findall(r"`(tests/[\w/.]+)`", last_cell)
    assert paths, f"CONTRIBUTING.md names no test for {kind}"
    return paths


def run_in(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy of the repository at `root`, with its package on the path, and return
    the finished process."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'lab'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def checked(extension: Extension, *, tests: bool) -> Rows:
    """Install a part in a copy of the repository and test it there.

    Returns:
        A row per mesh on which the part was simulated; a single row for a part that moves no bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_of_repository(root)
        before = sources(root)
        install(extension, root)
        touched = sources(root).items() - before.items()
        row: dict[str, Any] = {
            "kind": extension.kind,
            "name": extension.lines[0].name,
            "files_touched": len(touched),
            "tests_passed": None,
            "tests_failed": None,
            "first_failure": "",
        }
        if tests:
            guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
            row |= tested(root, contracts(extension.kind, guide))
        if extension.kind not in FIELDS:
            return [row]

        # Another process imports the copy of the package, which has the part.
        field = FIELDS[extension.kind]
        done = run_in(root, "-m", "moesaic_lab.extending", field, str(row["name"]))
        if done.returncode:
            raise InputError(
                f"{extension.kind} {row['name']} cannot be simulated: "
                f"{done.stderr.strip().splitlines()[-1]}"
            )
        return [row | times for times in json.loads(done.stdout)]


def tested(root: Path, paths: list[str]) -> dict[str, Any]:
    """Run contract tests in a copy and return the numbers that passed and failed, and the first
    that failed."""
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow")
    done = run_in(root, *pytest, *paths)
    # pytest ends with a line such as "1 failed, 20 passed, 1 error in 3.21s".
    last_line = done.stdout.strip().splitlines()[-1]
    passed = sum(map(int, re.findall(r"(\d+) passed", last_line)))
    failed = sum(map(int, re.findall(r"(\d+) (?:failed|error)", last_line)))
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        raise InputError(
            f"{' '.join(paths)} did not run: {(done.stdout + done.stderr).strip().splitlines()[-1]}"
        )
    return {
        "tests_passed": passed,
        "tests_failed": failed,
        "first_failure": first.group(1) if first else "",
    }


def simulated(field: str, value: str) -> Rows:
    """Simulate a plan whose `field` is `value` under even routing, in both ways.

    Returns:
        Two rows, forward and backward, per mesh on which the plan compiles.

    Raises:
        InputError: if the plan compiles on no mesh of one of `NODES`; the message gives the reason.
    """
    rows = Rows()
    for nodes in NODES:
        spec = read_cluster(CLUSTER, nodes=nodes)
        simulator = Simulator(spec)
        world = nodes * spec.devices_per_node
        refusal = ""
        num_before = len(rows)
        layer = Workload(
            tokens=4096, num_experts=2 * world, top_k=2, dim=1024, hidden=2816, dtype="bf16"
        )
        for tp in (1, 2):
            grid = Grid(
                world=world, tp=tp, ep=world // tp, etp=tp, ranks_per_node=spec.devices_per_node
            )
            try:
                compiled = compile_plan(Plan(**{field: value}), grid)  # type: ignore[arg-type]
            except InputError as error:
                refusal = str(error)
                continue
            counts = uniform_counts(grid.dp, layer)
            runs, replicated = decided(simulator, compiled, layer, counts)
            even = simulate_even(simulator, compiled, layer)
            programs = {"forward": runs.forward, "backward": runs.backward}
            for (direction, program), even_pass in zip(programs.items(), even):
                sizes = sizes_of(
                    program,
                    layer,
                    runs.grid,
                    counts,
                    replicated=replicated,
                    shapes=runs.shapes(layer.num_experts),
                )
                exact_seconds = simulator.run(program, layer, runs.grid, sizes=sizes).seconds
                even_seconds = even_pass.seconds
                rows.append(
                    {
                        "nodes": nodes,
                        "tp": tp,
                        "pass": direction,
                        "even_ms": 1e3 * even_seconds,
                        "exact_ms": 1e3 * exact_seconds,
                        "even_over_exact": even_seconds / exact_seconds,
                    }
                )
        if len(rows) == num_before:
            raise InputError(
                f"plan.{field}={value} compiles on no mesh of {nodes} nodes: {refusal}"
            )
    return rows


def claims(rows: Rows) -> list[Claim]:
    """Return claims on the worst simulation ratio, the files touched and the failed contract
    tests."""
    ratios = [row["even_over_exact"] for row in rows if row.get("even_over_exact") is not None]
    # A ratio of 0.5 is as wrong as one of 2.
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    failed = [row["tests_failed"] for row in rows]
    # None passed where tests were left out, and 0 where none was found; if all failed, they ran
    is_tested = all(row["tests_passed"] or row["tests_failed"] for row in rows)
    reason = "" if is_tested else "--no-tests"
    failures = sum(failed) if is_tested else None
    touched = max(row["files_touched"] for row in rows)
    return [
        Claim(name="extending.worst_even_over_exact", value=max(worst, 1 / worst), target=1.01),
        Claim(name="extending.files_touched", value=touched, unit="files", target=2),
        Claim(
            name="extending.contract_tests_failed",
            value=failures,
            unit="tests",
            target=0,
            reason=reason,
        ),
    ]


COLUMNS = (
    *("kind", "name", "files_touched", "tests_passed", "tests_failed"),
    *("nodes", "tp", "pass", "even_ms", "exact_ms", "even_over_exact"),
)


def cases(options: ExtendingOptions) -> list[Extension]:
    """Return the parts that docs/extending.md shows.

    Raises:
        InputError: if a kind of part is missing.
    """
    parts = extensions((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    missing = [kind for kind in KINDS if kind not in [part.kind for part in parts]]
    if missing:
        raise InputError(
            f"docs/extending.md shows no whole file, with its line, of: {', '.join(missing)}"
        )
    return parts


def measure(options: ExtendingOptions, cases: list[Extension], told: Told) -> Rows:
    """Install, test and simulate one part after another."""
    rows = Rows()
    for part in cases:
        told(part.kind)
        rows += checked(part, tests=options.tests)
    return rows


BENCHMARK = Benchmark(
    name="extending",
    description=(
        "Add the parts that docs/extending.md shows, and check that they work as it promises."
    ),
    options=ExtendingOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=(Shown(title="extending", columns=COLUMNS, group_by=("kind",)),),
    is_proof=True,
)

if __name__ == "__main__":  # in a copy of the package: one plan field and its value
    print(json.dumps(simulated(*sys.argv[1:])))
