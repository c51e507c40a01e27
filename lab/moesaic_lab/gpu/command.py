"""`moesaic bench gpu`: all figures of one GPU in one command of nine minutes.

Each step runs in its own process under a deadline. A step that crashes, hangs or leaves the GPU in error loses only its own
figures. Results are written to one folder as soon as they are known: at most seven files, listed in `FILES`. Scratch files and
Triton's cache go to a temporary folder. With `--dry` every step runs on a CPU, under Triton's interpreter. The command needs
torch and Triton. If pytest, liger-kernel, sonic-moe, compute-sanitizer or ncu is missing, the results give that as a reason;
it is not an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from moesaic.errors import InputError
from moesaic_lab.claims import Claim, Measurement
from moesaic_lab.gpu.shapes import LAYERS, claims

SECONDS = 540.0
"""Time limit of the whole command: borrowed GPUs often allow ten minutes per command."""
FILES = ("gpu.json", "rows.json", "tiles.json", "compiled.json", "cluster.json", "tests.txt", "ncu.csv")
TUNED = ("T40960_H768_I256", "T32768_H4096_I512_E128")
"""Two layers, at both ends of the range of shapes, for which tiles are searched. Other layers use default tiles, except for
products that fall under the same key."""
PRODUCTS = ("up", "down", "down_grad", "rows_grad", "weight_grad", "weight_grad_down")
SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer that are run, for accesses out of bounds and for races in shared memory."""
CHECKS = "tests/runtime/test_on_gpu.py"
"""Tests of whole layers: results, host waits, graphs, and meshes of ranks that share the GPU."""
NOTES = "One process per step; a step that did not end well is named with its reason in the row `steps`."
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class GpuStep:
    """One step of the benchmark: a command that runs in its own process."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """Time limit of the step; the deadline of the whole command can end it earlier."""
    output: str = ""
    """File in the results folder to which the step's output is appended; "" for none."""
    background: bool = False
    """Whether the next step starts without waiting for this one. Set for steps that need no GPU."""
    needs: str = ""
    """Program that the step requires."""
    package: str = ""
    """Python package that the step requires."""


@dataclass
class StepOutcome:
    """How a step ended."""

    name: str
    seconds: float
    ended: str
    """"ok", or the reason for the failure, in one line."""
    tail: list[str] = field(default_factory=list)
    """Last lines of the output of a step that failed."""


def steps(folder: Path, scratch: Path, *, dry: bool) -> list[GpuStep]:
    """Return the steps in order.

    Args:
        folder: folder of the results.
        scratch: folder of temporary files.
        dry: return the steps that test the benchmark without a GPU, on tiny layers.
    """
    python, extra = sys.executable, ("--dry",) if dry else ()

    def part(name: str, out: Path) -> tuple[str, ...]:
        return python, "-m", "moesaic_lab.gpu", name, "--out", str(out), *extra

    def layer(*words: str) -> tuple[str, ...]:
        return *part("layers", scratch / "part.json"), "--folder", str(folder), *words

    pytest = (python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short")
    tests = "tests/kernels/triton/test_triton_top_k.py" if dry else "tests/kernels/triton"
    layers = ["T24"] if dry else [layer.name for layer in LAYERS]
    planned = [
        GpuStep(name="compile", command=part("compiled", folder / "compiled.json"), seconds=100, background=True),
        GpuStep(name="tests", command=(*pytest, tests, *(() if dry else ("-n", "8"))), seconds=100, output="tests.txt"),
        GpuStep(name="checks", command=(*pytest, CHECKS), seconds=60, output="tests.txt"),
    ]
    for tool in SANITIZERS:
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *layer("--stages", "check"))
        planned.append(GpuStep(name=tool, command=command, seconds=30, output="tests.txt", needs="compute-sanitizer"))
    planned.append(GpuStep(name="profile", command=part("profile", folder / "cluster.json"), seconds=30))
    tuned, per_product = (("T24",), 60.0) if dry else (TUNED, 14.0)
    for name, product in itertools.product(tuned, PRODUCTS[:1] if dry else PRODUCTS):
        command = layer("--stages", "tune", "--layers", name, "--products", product, "--seconds", str(per_product - 5))
        planned.append(GpuStep(name=f"tune.{name}.{product}", command=command, seconds=per_product))
    for name in layers:
        command = layer("--stages", "measure", "--layers", name, "--repeats", "2" if dry else "20")
        planned.append(GpuStep(name=f"layer.{name}", command=command, seconds=60))
    sections = ("--section", "SpeedOfLight", "--section", "MemoryWorkloadAnalysis")
    ncu = ("ncu", "--clock-control", "none", "--csv", *sections)
    counted = ("--kernel-name", "regex:_up_kernel|_rows_kernel|_outer_kernel|_sum_tokens_kernel", "--launch-count", "8")
    command = (*ncu, *counted, *layer("--stages", "check"))
    planned.append(GpuStep(name="ncu", command=command, seconds=40, output="ncu.csv", needs="ncu"))
    command = layer("--stages", "sonic", "--layers", *layers)
    planned.append(GpuStep(name="sonic", command=command, seconds=120, package="sonicmoe"))
    # Triton's interpreter is slow.
    return [replace(step, seconds=5 * step.seconds) for step in planned] if dry else planned


def run(folder: Path, *, dry: bool, seconds: float = SECONDS) -> Measurement:
    """Run all steps and return their results; `gpu.json` in the folder is rewritten after each step.

    Args:
        folder: folder of the results.
        dry: run without a GPU.
        seconds: time limit; after it no step starts and running steps are killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + seconds, list[StepOutcome]()
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT / "lab"), os.environ.get("PYTHONPATH")))),
            "TRITON_CACHE_DIR": str(Path(scratch) / "triton"), "PYTHONUNBUFFERED": "1",
        } | ({"TRITON_INTERPRET": "1"} if dry else {})  # fmt: skip
        background: list[_Running] = []
        planned = steps(folder, Path(scratch), dry=dry)
        for output in {step.output for step in planned if step.output}:
            (folder / output).unlink(missing_ok=True)
        for step in planned:
            running = _start(step, folder, Path(scratch), environment, deadline)
            if isinstance(running, StepOutcome):
                outcomes.append(running)
            elif step.background:
                background.append(running)
            else:
                outcomes.append(running.end())
            merged(folder, outcomes, dry=dry).write(str(folder / "gpu.json"))
        outcomes += [running.end() for running in background]
    results = merged(folder, outcomes, dry=dry)
    results.write(str(folder / "gpu.json"))
    return results


@dataclass
class _Running:
    step: GpuStep
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    until: float
    file: IO[bytes]

    def end(self) -> StepOutcome:
        """Wait for the process until its deadline, then kill it and all processes that it started."""
        try:
            code = self.process.wait(max(self.until - time.monotonic(), 0.1))
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {time.monotonic() - self.began:.0f} s, its limit"
        with suppress(ProcessLookupError):
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # each step has its own session, so this also kills its children
        self.process.wait()
        self.file.close()
        tail = self.log.read_text(errors="replace").splitlines()[-12:]
        return StepOutcome(self.step.name, time.monotonic() - self.began, ended, [] if ended == "ok" else tail)


def _start(
    step: GpuStep, folder: Path, scratch: Path, environment: dict[str, str], deadline: float
) -> _Running | StepOutcome:
    now = time.monotonic()
    if now > deadline:
        return StepOutcome(step.name, 0.0, "not begun: no time was left")
    if step.needs and shutil.which(step.needs) is None:
        return StepOutcome(step.name, 0.0, f"not begun: the program {step.needs} is not installed")
    if step.package and importlib.util.find_spec(step.package) is None:
        return StepOutcome(step.name, 0.0, f"not begun: the package {step.package} is not installed")
    log = folder / step.output if step.output else scratch / f"{step.name}.txt"
    own = environment
    if step.name == "compile":  # this step needs the compiler, not the interpreter
        own = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
    file = log.open("ab")
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    return _Running(step, process, log, now, min(now + step.seconds, deadline), file)


def merged(folder: Path, outcomes: Sequence[StepOutcome], *, dry: bool = False) -> Measurement:
    """Return rows and claims of all results in the folder.

    A layer whose process ended without writing a row gets a row that says how the process ended.
    """
    rows: dict[str, dict[str, Any]] = _read(folder / "rows.json").get("rows", {})
    for outcome in outcomes:
        name = outcome.name.removeprefix("layer.")
        if outcome.name.startswith("layer.") and name not in rows and outcome.ended != "ok":
            rows[name] = {"name": name, "error": f"its process: {outcome.ended}; {' '.join(outcome.tail[-1:])[:200]}"}
    outcomes_by_name = {outcome.name: outcome for outcome in outcomes}
    other_claims = list[Claim]()
    for name in ("tests", "checks", *SANITIZERS):
        step = outcomes_by_name.get(name)
        is_known = step is not None and not step.ended.startswith(("not begun", "ended after"))
        reason = "" if is_known else "the step did not run to its end" if step is None else step.ended
        value = float(step is not None and step.ended != "ok") if is_known else None
        other_claims.append(Claim(name=f"gpu.{name}_failed", value=value, target=0, reason=reason))
    described = rows.get("dense", {})
    return Measurement(
        rows=[{"name": "steps", "steps": [asdict(outcome) for outcome in outcomes]}, *rows.values()],
        claims=[*claims(list(LAYERS), rows), *other_claims], packages=("torch", "triton", "liger_kernel"),
        notes=("A DRY RUN: no figure is of a GPU. " if dry else "") + NOTES,
        machine={"gpu": _gpu(), "dense_tflops": described.get("tflops")},
    )  # fmt: skip


def _gpu() -> str:
    """Return name, driver version, memory, clock and power limit of the GPU as nvidia-smi reports them; "" without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    command = ("nvidia-smi", query, "--format=csv,noheader")
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or truncated by a killed step
        return {}
    return content


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an `InputError` of one line."""
        raise InputError(f"{message}; --help lists all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code, 0 even if steps failed. (Without tyro: the machine may have only torch.)"""
    parser = _Parser(prog="moesaic bench gpu", description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_results"), help=f"folder of the results: {', '.join(FILES)}"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the whole command")
    parser.add_argument("--dry", action="store_true", help="test that every step runs, on a CPU")
    options = parser.parse_args(arguments)
    measurement = run(options.out, dry=options.dry, seconds=options.seconds)
    for step in measurement.rows[0]["steps"]:
        print(f"{step['name']:<44} {step['seconds']:6.1f} s  {step['ended']}")
    measured = [claim for claim in measurement.claims if claim.value is not None]
    print(f"{len(measured)} of {len(measurement.claims)} figures; {options.out / 'gpu.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
