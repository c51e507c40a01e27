"""Count what makes the code tiring to read, and trace the call path from the layer to the
transport.

Tokens are those of Python's `tokenize` without comments, docstrings, line ends and indentation;
tokens per line divides them by the lines that hold one. The call path is traced at run time, on one
of two ranks. It begins at `MoE.__call__` of a second call and ends with the first transfer that
carries rows of tokens. `benchmarks/house.toml` holds what each figure may be at most.

    moesaic bench house --json benchmarks/results/house.json
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from moesaic.configfile import read_table
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, notes_of
from moesaic_lab.claims import ROOT, Claim
from moesaic_lab.import_graph import cycles, functions, nodes, upward

MAXIMA = Path("benchmarks") / "house.toml"
PACKAGES = ("src/moesaic", "lab/moesaic_lab", "lab/moesaic_testbed")
COUNTED = ("src", "lab", "examples")
"""Folders whose assignments, calls and functions are counted."""
MOST_LINES = 60
"""Lines that a function may have."""
MOST_POSITIONAL = 6
"""Positional arguments that a call may have."""
DIM = 64
TOKENS = 48
"""Width and tokens of the traced layer."""
MANY_BYTES = 8 * 4 * DIM
"""Size from which a message must hold token rows: eight rows exceed all counts and losses that
ranks exchange before."""
STEP = (
    "finetune/staged.py",
    "finetune/stages.py",
    "interleaved.py",
    "planner/fewer_machines.py",
    "planner/in_flight.py",
    "planner/pipeline.py",
    "planner/plan_race.py",
    "planner/search.py",
    "planner/simulated_plans.py",
    "planner/split.py",
    "program/stage_cuts.py",
    "runtime/gathered_units.py",
    "runtime/paused_calls.py",
    "runtime/torch_state.py",
    "train/better_split.py",
    "train/holding.py",
    "train/pipeline.py",
    "train/schedule.py",
    "transformers/in_flight.py",
)
"""Files of what a step adds to a layer: pipeline stages, micro-batches in flight, parameters held
sharded or replicated, and the search over them."""
LAYER = "layer.py"
"""File of the layer whose call starts the path."""
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_LINE_ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)


def tokens_and_lines(text: str) -> tuple[int, int]:
    """Return the number of tokens of code in a Python source, and of the lines on which one
    begins."""
    tokens = 0
    lines: set[int] = set()
    last = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # A string that begins a statement is a docstring, or documents the line above.
        is_prose = token.type == tokenize.STRING and last in _LINE_ENDS
        if token.type not in _LAYOUT and not is_prose:
            tokens += 1
            lines.add(token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.ENCODING):
            last = token.type
    return tokens, len(lines)


def is_parallel(node: ast.AST) -> bool:
    """Return whether a node is an assignment like `a, b = x, y`. Chained ones and unpacked results
    are none."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if len(node.targets) > 1 or not isinstance(target, ast.Tuple):
        return False
    has_starred = any(isinstance(each, ast.Starred) for each in (*target.elts, *node.value.elts))
    return len(target.elts) == len(node.value.elts) and not has_starred


def is_long_call(node: ast.AST) -> bool:
    """Return whether a node is a call with more positional arguments than a reader can tell
    apart."""
    return isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL


def long_functions(path: Path) -> list[str]:
    """Return the names of a file's functions that have too many lines."""
    return [
        node.name for node in functions(path) if (node.end_lineno or 0) - node.lineno >= MOST_LINES
    ]


def modules_behind(imports: str) -> int:
    """Return how many modules of the package an import statement loads in a new process."""
    code = (
        f"import sys\n{imports}\nprint(sum(name.partition('.')[0] == 'moesaic' for name in "
        "sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure(root: Path = ROOT) -> dict[str, float]:
    """Return the figures of a repository by name."""
    tokens = {}
    lines = {}
    for folder in ("src", "lab"):
        texts = [path.read_text(encoding="utf-8") for path in (root / folder).rglob("*.py")]
        counts = [tokens_and_lines(text) for text in texts]
        tokens[folder] = sum(num_tokens for num_tokens, _ in counts)
        lines[folder] = sum(num_lines for _, num_lines in counts)
    files = [path for folder in COUNTED for path in sorted((root / folder).rglob("*.py"))]
    step = [(root / PACKAGES[0] / name).read_text(encoding="utf-8") for name in STEP]
    circles = [circle for package in PACKAGES for circle in cycles(root / package)]
    trace = trace_path(root / PACKAGES[0])
    return {
        "tokens_per_line": round(tokens["src"] / lines["src"], 2),
        "tokens_per_line_of_lab": round(tokens["lab"] / lines["lab"], 2),
        "tokens": tokens["src"],
        "tokens_of_lab": tokens["lab"],
        "tokens_of_step": sum(tokens_and_lines(text)[0] for text in step),
        "parallel_assignments": _count(is_parallel, files),
        "calls_over_six_positional": _count(is_long_call, files),
        "functions_over_60_lines": sum(len(long_functions(path)) for path in files),
        "upward_imports": len(upward(root / PACKAGES[0])) + len(circles),
        "modules_behind_moe": modules_behind("from moesaic import MoE"),
        "path_files": len(trace.files),
        "path_frames": trace.depth,
    }


def _count(counts: Callable[[ast.AST], bool], files: Iterable[Path]) -> int:
    """Return how many nodes of the files' syntax trees count."""
    return sum(counts(node) for path in files for node in nodes(path))


def maxima(root: Path = ROOT) -> dict[str, float]:
    """Return what each figure may be at most, from the repository's own file."""
    return read_table(root / MAXIMA)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per figure, with its maximum."""
    return [
        Claim(name=f"house.{row['name']}", value=row["value"], target=row["most"]) for row in rows
    ]


def _rows() -> list[dict[str, Any]]:
    """Return the rows of all figures."""
    most = maxima()
    figures = measure()
    rows = []
    for name, value in figures.items():
        rows.append({"name": name, "value": value, "most": most[name]})
    return rows


@dataclass
class PathTrace:
    """A profiling hook that records which files' functions are called until rows leave the rank."""

    package: Path
    """The folder whose files are traced."""
    files: list[str] = field(default_factory=list)
    """Files in the order of the first call into each."""
    depth: int = 0
    """Frames of the package from `MoE.__call__` to the first rows that leave the rank."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call; this is the signature that `sys.setprofile` requires."""
        if event != "call" or frame.f_code.co_name.startswith("<"):  # "<lambda>", "<listcomp>"
            return
        file = self._file(frame)
        if file is not None and file not in self.files:
            self.files.append(file)

    def stop(self) -> None:
        """End the trace and count the frames of the package up to the layer's call."""
        running: object = sys.getprofile()
        if running is not self:  # of another rank, or ended
            return
        sys.setprofile(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = self._file(frame)
            if file is not None:
                self.depth += 1
            if file == LAYER and frame.f_code.co_name == "__call__":
                return
            frame = frame.f_back

    def _file(self, frame: FrameType) -> str | None:
        """Return the file of a frame inside the package; None for another."""
        path = Path(frame.f_code.co_filename)
        return path.relative_to(self.package).as_posix() if self.package in path.parents else None


def trace_path(package: Path) -> PathTrace:
    """Run a layer on two ranks and trace rank 0's second call, from `MoE.forward` until rows leave
    the rank."""
    import torch

    from moesaic.comm.loopback import run_ranks
    from moesaic.comm.mesh import Mesh
    from moesaic.comm.transport import AbstractTransport, Handle, Transfer
    from moesaic.layer import MoE
    from moesaic.program.grid import Grid
    from moesaic.program.plan import Plan
    from moesaic_lab.recorder import AbstractPassing

    trace = PathTrace(package)

    class Watched(AbstractPassing):
        """A transport that ends the trace when it sends the first rows."""

        def issue(self, transfer: Transfer) -> Handle:
            sizes = [tensor.nbytes for tensor in transfer.sends.values()]
            if max(sizes, default=0) >= MANY_BYTES:
                trace.stop()
            return super().issue(transfer)

    def rank(transport: AbstractTransport) -> None:
        layer = MoE(DIM, DIM // 2, 4, 2)
        layer.parallelize(Mesh(Grid(world=2, ep=2), Watched(transport)), Plan())
        x = torch.randn(TOKENS, DIM, requires_grad=True)
        layer(x).sum().backward()  # the first call makes what later calls reuse
        if transport.rank == 0:
            sys.setprofile(trace)
        layer(x).sum().backward()

    run_ranks(2, rank)
    return trace


BENCHMARK: Benchmark[BenchmarkOptions, None, list[dict[str, Any]]] = Benchmark(
    name="house",
    description=(
        "Count tokens, assignments, calls, functions and imports, and trace the path from the "
        "layer to the transport."
    ),
    options=BenchmarkOptions,
    notes=notes_of(__doc__),
    claims=claims,
    packages=(),
    is_proof=True,
    measure=lambda options, cases, told: _rows(),
    columns=(),
)
