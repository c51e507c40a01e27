"""Measure the code base: lines, files, ambiguous class names, import cycles, and the call path from layer to transport.

The call path is traced at run time, on one of two ranks. It begins at `MoE.forward` of a second call and ends with the first
transfer that carries rows of tokens. It lists the files of the functions that are entered. A return is a call from another
file that passes the tokens back to a file in which they have been before.

    moesaic bench house --json benchmarks/results/house.json
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.tables import Column

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "wheel_lines": 40_000, "wheel_files": 290, "python_lines": 49_000, "path_files": 20, "path_returns": 4,
    "names_with_two_meanings": 8, "cycles": 0,
}  # fmt: skip
"""Upper limit of each figure."""
DIM, TOKENS = 64, 48
"""Width and tokens of the traced layer. No other matrix in it has this width and at least as many rows."""
MANY_BYTES = 8 * 4 * DIM
"""Size from which a message must hold token rows: eight rows exceed all counts and losses that ranks exchange before."""


def measure(package: Path, others: Iterable[Path]) -> list[dict[str, Any]]:
    """Return a row per figure, followed by rows with their details.

    Args:
        package: the folder of the library.
        others: folders with the repository's other Python code, tests excluded.
    """
    files = sorted(package.rglob("*.py"))
    elsewhere = [path for folder in others for path in sorted(folder.rglob("*.py"))]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*files, *elsewhere)}
    twice, circles, trace = names_with_two_meanings([*files, *elsewhere]), cycles(package), trace_path(package)
    figures = {
        "wheel_lines": sum(lines[path] for path in files), "wheel_files": len(files),
        "python_lines": sum(lines.values()), "path_files": len(trace.files), "path_returns": len(trace.returns),
        "names_with_two_meanings": len(twice), "cycles": len(circles),
    }  # fmt: skip
    parts: dict[str, list[int]] = defaultdict(list)
    for path in files:
        parts[path.relative_to(package).parts[0]].append(lines[path])
    rows: list[dict[str, Any]] = [{"what": "figure", "name": name, "value": value} for name, value in figures.items()]
    rows += [{"what": "part", "name": part, "lines": sum(of), "files": len(of)} for part, of in parts.items()]
    rows += [{"what": "step", "name": place, "number": number} for number, place in enumerate(trace.steps, 1)]
    rows += [{"what": "file", "name": name, "number": number} for number, name in enumerate(trace.files, 1)]
    rows += [{"what": "class", "name": name, "files": ", ".join(places)} for name, places in twice.items()]
    return rows + [{"what": "cycle", "name": " <-> ".join(names)} for names in circles]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per figure, with its upper limit."""
    figures = {row["name"]: row["value"] for row in rows if row["what"] == "figure"}
    return [
        Claim(name=f"house.{name}", value=value, unit="1", target=TARGETS[name], op="<=")
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


def imports(package: Path) -> dict[str, set[str]]:
    """Return the import graph of a package: for each module, the package's modules that it imports.

    Imports inside functions and those for type checking count too.
    """
    root = package.parent
    modules = {_module(path, root): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = inside[: len(inside) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                targets |= {f"{source}.{a.name}" if f"{source}.{a.name}" in modules else source for a in node.names}
        graph[name] = (targets & set(modules)) - {name}
    return graph


def cycles(package: Path) -> list[list[str]]:
    """Return the groups of modules, and of folders below the package, that import each other in a cycle."""
    of_files = imports(package)
    face = package.name
    of_files = {name: targets - {face} for name, targets in of_files.items() if name != face}
    folders = {name: _folder(name, package) for name in of_files}
    of_folders: dict[str, set[str]] = defaultdict(set)
    for name, targets in of_files.items():
        of_folders[folders[name]] |= {folders[target] for target in targets} - {folders[name]}
    return [*_circles(of_files), *(each for each in _circles(of_folders) if not set(each) <= set(of_files))]


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, package: Path) -> str:
    """Return a module's folder, as a path with a trailing slash; a file at the top of the package counts as its own folder."""
    path = package.parent.joinpath(*module.split("."))
    parts = module.split(".") if path.is_dir() else module.split(".")[:-1]
    return module if len(parts) == 1 else "/".join(parts) + "/"


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have at least two nodes."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), set()) - seen:
                seen.add(target)
                waiting.append(target)
        reached[start] = seen
    groups = {frozenset(b for b in graph if b in reached[a] and a in reached[b]) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


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

    def _holds_tokens(self, frame: FrameType) -> bool:
        """Return whether an argument is the tokens or a collection that contains them."""
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            members = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
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
            isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == DIM and value.shape[-2] >= TOKENS
        )

    trace = PathTrace(package, is_tokens)

    class Watched(AbstractPassing):
        """A transport that ends the trace when it sends the first rows."""

        def issue(self, transfer: Transfer) -> Handle:
            if max((tensor.nbytes for tensor in transfer.sends.values()), default=0) >= MANY_BYTES:
                sys.setprofile(None)
            return super().issue(transfer)

    def rank(transport: AbstractTransport) -> None:
        layer = MoE(DIM, DIM // 2, 4, 2)
        layer.parallelize(Mesh(Grid(world=2, ep=2), Watched(transport)), Plan())
        x = torch.randn(TOKENS, DIM, requires_grad=True)
        layer(x).sum().backward()
        if transport.rank == 0:
            sys.setprofile(trace)
        layer(x).sum().backward()
        sys.setprofile(None)

    run_ranks(2, rank)
    return trace


BENCHMARK: Benchmark[BenchmarkOptions, None, list[dict[str, Any]]] = Benchmark(
    name="house", description="Count lines, files, names, import cycles, and trace the path from the layer to the transport.",
    options=BenchmarkOptions, notes=notes_of(__doc__), claims=claims, packages=(),
    measure=lambda options, cases, told: measure(ROOT / "src" / "moesaic", [ROOT / "lab", ROOT / "examples"]),
    columns=tuple(
        Shown(title=title, where={"what": (what,)}, columns=[Column(key=key, title=key, is_text=True) for key in keys])
        for title, what, keys in (
            ("Parts", "part", ("name", "lines", "files")), ("Where the tokens go", "step", ("name", "number")),
            ("Files on the path", "file", ("name", "number")), ("Names with two meanings", "class", ("name", "files")),
            ("Import cycles", "cycle", ("name",)),
        )
    ),
)  # fmt: skip
