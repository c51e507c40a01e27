"""Measure the code base: lines of code, statements, ambiguous class names, and the call path from the layer to the transport.

Lines of code are those that are not blank and hold no comment, docstring or import. Statements are nodes of the syntax tree.
The call path is traced at run time, on one of two ranks. It begins at `MoE.__call__` of a second call and ends with the first
transfer that carries rows of tokens. It lists the files of the functions that are entered. A return is a call from another
file that passes the tokens back to a file in which they have been before.

    moesaic bench house --json benchmarks/results/house.json
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, notes_of
from moesaic_lab.claims import Claim

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "lab", "examples", "tests")
TARGETS = {
    "code_lines": 25_000, "code_lines_with_lab": 39_000, "lab_code_lines": 13_500, "tests_code_lines": 28_000,
    "statements": 26_000, "formatter_off": 404, "path_frames": 10, "path_files": 12, "path_returns": 2,
    "names_with_two_meanings": 8,
}  # fmt: skip
"""Upper limit of each figure. Lines and statements are those of `src`, unless the name says otherwise; `code_lines_with_lab`
is `src`, `lab` and `examples`."""
DIM, TOKENS = 64, 48
"""Width and tokens of the traced layer. No other matrix in it has this width and at least as many rows."""
MANY_BYTES = 8 * 4 * DIM
"""Size from which a message must hold token rows: eight rows exceed all counts and losses that ranks exchange before."""
LAYER = "layer.py"
"""File of the layer whose call starts the path."""


@dataclass(frozen=True)
class FileSize:
    """The size of one file."""

    lines: int
    """Lines of code."""
    statements: int
    formatter_off: int
    """Places that the formatter leaves alone."""

    @classmethod
    def of(cls, path: Path) -> FileSize:
        """Count a Python file."""
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        skipped = {
            line
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]
        }
        lines = enumerate(map(str.strip, text.splitlines()), 1)
        return cls(
            lines=sum(
                bool(line) and not line.startswith("#") and number not in skipped
                for number, line in lines
            ),
            statements=sum(isinstance(node, ast.stmt) for node in nodes),
            formatter_off=text.count("# fmt" + ": skip"),
        )


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a node is a string that stands alone: the description of a module, class, function, field or constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def counts(root: Path = ROOT) -> dict[str, dict[Path, FileSize]]:
    """Return the sizes of all Python files of a repository, by folder."""
    return {
        name: {path: FileSize.of(path) for path in sorted((root / name).rglob("*.py"))}
        for name in FOLDERS
    }


def sizes(counted: dict[str, dict[Path, FileSize]]) -> dict[str, int]:
    """Return the figures that are sums over files."""
    lines = {name: sum(file.lines for file in of.values()) for name, of in counted.items()}
    return {
        "code_lines": lines["src"], "code_lines_with_lab": sum(lines[name] for name in FOLDERS[:3]),
        "lab_code_lines": lines["lab"], "tests_code_lines": lines["tests"],
        "statements": sum(file.statements for file in counted["src"].values()),
        "formatter_off": sum(file.formatter_off for name in FOLDERS[:3] for file in counted[name].values()),
    }  # fmt: skip


def measure(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return a row per figure, followed by rows with their details."""
    counted, package = counts(root), root / "src" / "moesaic"
    twice = names_with_two_meanings([path for name in FOLDERS[:3] for path in counted[name]])
    trace = trace_path(package)
    figures = sizes(counted) | {
        "path_frames": trace.depth, "path_files": len(trace.files), "path_returns": len(trace.returns),
        "names_with_two_meanings": len(twice),
    }  # fmt: skip
    parts: dict[str, list[int]] = defaultdict(list)
    for path, file in counted["src"].items():
        parts[path.relative_to(package).parts[0]].append(file.lines)
    rows: list[dict[str, Any]] = [
        {"what": "figure", "name": name, "value": value} for name, value in figures.items()
    ]
    rows += [
        {"what": "part", "name": part, "lines": sum(of), "files": len(of)}
        for part, of in parts.items()
    ]
    rows += [
        {"what": "step", "name": place, "number": number}
        for number, place in enumerate(trace.steps, 1)
    ]
    rows += [
        {"what": "file", "name": name, "number": number}
        for number, name in enumerate(trace.files, 1)
    ]
    return rows + [
        {"what": "class", "name": name, "files": ", ".join(places)}
        for name, places in twice.items()
    ]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per figure, with its upper limit."""
    figures = {row["name"]: row["value"] for row in rows if row["what"] == "figure"}
    return [
        Claim(name=f"house.{name}", value=value, target=TARGETS[name])
        for name, value in figures.items()
    ]


def names_with_two_meanings(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the names shared by several public top-level classes, each with the files that define such a class."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name[node.name].append("/".join(path.parts[-2:]))
    return {name: places for name, places in sorted(by_name.items()) if len(places) > 1}


@dataclass
class PathTrace:
    """A profiling hook that records which files' functions are called, and which of them receive the tokens."""

    package: Path
    """The folder whose files are traced."""
    is_tokens: Callable[[object], bool]
    """Returns whether an argument is the tokens or some of their rows."""
    files: list[str] = field(default_factory=list)
    """Files in the order of the first call into each."""
    steps: list[str] = field(default_factory=list)
    """Functions that receive the tokens from a caller in another file."""
    returns: list[str] = field(default_factory=list)
    """Those of `steps` in whose file the tokens have been before."""
    depth: int = 0
    """Frames of the package from `MoE.__call__` to the first rows that leave the rank."""
    _visited: set[str] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call; this is the signature that `sys.setprofile` requires."""
        here = self._file(frame) if event == "call" else None
        if here is None or frame.f_code.co_name.startswith("<"):
            return
        if here not in self.files:
            self.files.append(here)
        if not self._holds_tokens(frame):
            return
        caller = frame.f_back
        while caller is not None and self._file(caller) is None:
            caller = caller.f_back
        if caller is None or self._file(caller) != here:
            place = f"{here} {frame.f_code.co_name}"
            self.steps.append(place)
            if here in self._visited:
                self.returns.append(place)
        self._visited.add(here)

    def stop(self) -> None:
        """End the trace and count the frames of the package up to the layer's call."""
        running: object = sys.getprofile()
        if running is not self:  # of another rank, or ended
            return
        sys.setprofile(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self.depth += self._file(frame) is not None
            if self._file(frame) == LAYER and frame.f_code.co_name == "__call__":
                return
            frame = frame.f_back

    def _holds_tokens(self, frame: FrameType) -> bool:
        """Return whether an argument is the tokens or a collection that contains them."""
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            members = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else (value,)
            )
            if any(map(self.is_tokens, members)):
                return True
        return False

    def _file(self, frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        return path.relative_to(self.package).as_posix() if self.package in path.parents else None


def trace_path(package: Path) -> PathTrace:
    """Run a layer on two ranks and trace rank 0's second call, from `MoE.forward` until rows leave the rank."""
    import torch

    from moesaic.comm.loopback import run_ranks
    from moesaic.comm.mesh import Mesh
    from moesaic.comm.transport import AbstractTransport, Handle, Transfer
    from moesaic.layer import MoE
    from moesaic.program.grid import Grid
    from moesaic.program.plan import Plan
    from moesaic_lab.recorder import AbstractPassing

    def is_tokens(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 1
            and value.shape[-1] == DIM
            and value.shape[-2] >= TOKENS
        )

    trace = PathTrace(package, is_tokens)

    class Watched(AbstractPassing):
        """A transport that ends the trace when it sends the first rows."""

        def issue(self, transfer: Transfer) -> Handle:
            if max((tensor.nbytes for tensor in transfer.sends.values()), default=0) >= MANY_BYTES:
                trace.stop()
            return super().issue(transfer)

    def rank(transport: AbstractTransport) -> None:
        layer = MoE(DIM, DIM // 2, 4, 2)
        layer.parallelize(Mesh(Grid(world=2, ep=2), Watched(transport)), Plan())
        x = torch.randn(TOKENS, DIM, requires_grad=True)
        layer(x).sum().backward()
        if transport.rank == 0:
            sys.setprofile(trace)
        layer(x).sum().backward()

    run_ranks(2, rank)
    return trace


BENCHMARK: Benchmark[BenchmarkOptions, None, list[dict[str, Any]]] = Benchmark(
    name="house", description="Count lines, statements and names, and trace the path from the layer to the transport.",
    options=BenchmarkOptions, notes=notes_of(__doc__), claims=claims, packages=(),
    measure=lambda options, cases, told: measure(),
    columns=tuple(
        Shown(title=title, where={"what": (what,)}, columns=keys)
        for title, what, keys in (
            ("Parts", "part", ("name", "lines", "files")), ("Where the tokens go", "step", ("name", "number")),
            ("Files on the path", "file", ("name", "number")), ("Names with two meanings", "class", ("name", "files")),
        )
    ),
)  # fmt: skip
