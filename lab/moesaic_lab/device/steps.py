"""The steps of `moesaic bench device --device cuda`: all figures of one GPU, those of most worth
first.

Each step runs in its own process under a deadline. A step that crashes, hangs or leaves the GPU in
error loses only its own figures. Results are written to one folder as soon as they are known, and
steps that ended well are not run again by a later call on the same kind of GPU. If a program or a
package is missing, the step's row says so; `lab/wheels.sh` downloads the packages. In a dry run
every step runs on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from moesaic.errors import InputError, to_install
from moesaic_lab.claims import ROOT, Claim, Measurement
from moesaic_lab.device.shapes import LAYERS
from moesaic_lab.device.shapes import claims as layer_claims

Row = dict[str, Any]
"""A step's outcome, or what it has measured, as plain data."""
SECONDS = 540.0
"""Time limit of one call: borrowed GPUs often allow ten minutes per command. A later call goes
on."""
FILES = (
    "gpu.json",
    "rows.json",
    "tiles.json",
    "compiled.json",
    "cluster.json",
    "tests.txt",
    "ncu.csv",
    "triton",
)
TUNED = ("T40960_H768_I256", "T32768_H4096_I512_E128")
"""Two layers, at both ends of the range of shapes, for which tiles are searched. Other layers use
default tiles, except for products that fall under the same key."""
FIRST = (
    "T8192_H2048_I768_E128_K8",
    "T8192_H4096_I14336_E8_K2",
    "T8192_H2880_I2880_E128_K4",
    "T32768_H4096_I1024_E128_K8",
)
"""The layers that are measured before the others, beside SonicMoE's kernels: those of three models
that people train, and one of SonicMoE's paper."""
PRODUCTS = ("up", "down", "down_grad", "rows_grad", "weight_grad", "weight_grad_down")
SANITIZERS = ("memcheck", "racecheck")
"""Tools of compute-sanitizer that are run, for accesses out of bounds and for races in shared
memory."""
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
"""Models of transformers that are measured."""
KERNEL_TESTS = "tests/kernels/triton"
CHECKS = "tests/runtime/test_on_gpu.py"
"""Tests of the kernels; and of whole layers: results, host waits by torch's detector, graphs, ranks
that share the GPU."""
ODD_SIZES = (
    f"{KERNEL_TESTS}/test_triton_mlp.py",
    f"{KERNEL_TESTS}/test_triton_choose.py",
    "-k",
    "gradients or not_sent or nan or odd_rows",
)
"""What the sanitizer watches: layers no size of which is a multiple of a tile, copies that are not
sent, and logits of NaN."""
NOTES = (
    "One process per step; a step that did not end well says why. Layers: SwiGLU, bfloat16, "
    "forward 6 T H I K and backward 12 T H I K FLOPs, router excluded, sorting of copies "
    "included; random router. Ways run in turn, median over the repeats by CUDA events, the host "
    "ahead of the GPU as in training. activation_gib: held between forward and backward, the "
    "layer's input included. Published figures were measured on an H100 by SonicMoE's authors. "
    "Plans, training, sharded, finetune: four NCCL ranks on the one GPU, largest error against "
    "one process. whole, transformers: wall time of forward and backward."
)


class Figure(NamedTuple):
    """A figure of a row that becomes a claim."""

    row: str
    key: str
    target: float | None
    """The largest value at which the claim holds."""
    unit: str = "1"


FIGURES = {
    "plans.worst_error": Figure("plans", "worst", 1e-5),
    "training.worst_difference_of_a_loss": Figure("training", "worst", 1e-3),
    "sharded.worst_error": Figure("sharded", "worst", 1e-4),
    "finetune.worst_difference_of_a_loss": Figure("finetune", "worst", 1e-5),
    "finetune.one_process": Figure("finetune", "one_peak_gib", 24.0, "GiB"),
    "finetune.fullest_of_four": Figure("finetune", "four_peak_gib", 9.0, "GiB"),
    "whole.eager_ms": Figure("whole", "eager_ms", None, "ms"),
    "whole.eager_host_ms": Figure("whole", "eager_host_ms", 1.5, "ms"),
    "whole.compiled_ms": Figure("whole", "compiled_ms", None, "ms"),
    "whole.replayed_ms": Figure("whole", "replayed_ms", None, "ms"),
} | {
    f"transformers.{family}.over_grouped_mm": Figure(
        f"transformers.{family}", "over_grouped_mm", target
    )
    for family, target in zip(FAMILIES, (0.75, None, None))
}
"""By the name of a claim."""


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
    """Program or Python package that the step requires."""


@dataclass
class StepOutcome:
    """How a step ended."""

    step: str
    seconds: float
    ended: str
    """"ok", or the reason for the failure, in one line."""
    tail: list[str] = field(default_factory=list)
    """Last lines of the output of a step that failed."""
    what: str = "step"


PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-o",
    "addopts=",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-p",
    "moesaic_lab.device.failures",
)
"""The command of the tests, of which one that fails says so in few lines."""
COUNTING = (
    *("ncu", "--clock-control", "none", "--csv"),
    *("--section", "SpeedOfLight", "--section", "MemoryWorkloadAnalysis"),
    *("--kernel-name", "regex:_up_kernel|_rows_kernel|_outer_kernel|_sum_tokens_kernel"),
    *("--launch-count", "8"),
)
"""The command of the profiler, before that of the tests."""


def steps(folder: Path, *, dry: bool) -> list[GpuStep]:
    """Return the steps in order; in a dry run those on tiny layers.

    Args:
        folder: folder of the results.
        dry: whether there is no GPU.
    """
    if not dry:
        return _gpu_steps(folder)
    # Triton's interpreter is slow.
    return [replace(step, seconds=5 * step.seconds) for step in _dry_steps(folder)]


def _gpu_steps(folder: Path) -> list[GpuStep]:
    """Return the steps on a GPU."""
    make = _Steps(folder, dry=False)
    layers = [layer.name for layer in LAYERS]
    return [
        *make.measurements(layers, [KERNEL_TESTS, "-n", "8"]),
        *make.tuning(TUNED, PRODUCTS),
        *make.profiles(),
    ]


def _dry_steps(folder: Path) -> list[GpuStep]:
    """Return the steps without a GPU."""
    make = _Steps(folder, dry=True)
    return [
        *make.measurements(["T24"], ["tests/kernels/triton/test_triton_sort.py"]),
        *make.tuning(["T24"], PRODUCTS[:1]),
        *make.profiles(),
    ]


@dataclass(frozen=True)
class _Steps:
    """Makes steps whose results go to a folder. Times are limits in seconds; `words` are further
    words of a step's command, and `needs` is as in `GpuStep`."""

    folder: Path
    dry: bool

    def measurements(self, layers: Sequence[str], kernel_tests: Sequence[str]) -> list[GpuStep]:
        """Return the steps that test and measure the layers: a few important layers, the parts that
        measure other things, then the other layers.

        Args:
            layers: names of the layers.
            kernel_tests: arguments of pytest that choose the kernels' tests.
        """
        by_layer = {name: self._part("measure", 60, name, name=f"layer.{name}") for name in layers}
        first = [name for name in FIRST if name in layers]
        if not first:  # the tiny layer of a dry run
            first = list(layers)
        return [
            self._part("compile", 110, background=True),
            self._tests("checks", 60, CHECKS),
            self._part("whole", 60),
            *(by_layer[name] for name in first),
            self._part("sonic", 180, *first, needs="sonicmoe"),
            self._part("transformers", 60, *FAMILIES, needs="transformers"),
            self._part("plans", 60),
            self._part("training", 60),
            self._part("sharded", 60, needs="transformers"),
            self._part("finetune", 150, needs="peft"),
            *(step for name, step in by_layer.items() if name not in first),
            self._tests("tests", 120, *kernel_tests),
        ]

    def tuning(self, layers: Sequence[str], products: Sequence[str]) -> list[GpuStep]:
        """Return the steps that search tiles for products of layers."""
        search_seconds = "9"  # of the step's 14: the rest is for its start and its last candidate
        return [
            self._part("tune", 14, layer, product, search_seconds, name=f"tune.{layer}.{product}")
            for layer, product in itertools.product(layers, products)
        ]

    def profiles(self) -> list[GpuStep]:
        """Return the steps that watch kernels by other programs."""
        planned = [self._part("profile", 30)]
        for tool in SANITIZERS:
            prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
            planned.append(
                self._tests(tool, 30, *ODD_SIZES, prefix=prefix, needs="compute-sanitizer")
            )
        ncu = self._tests("ncu", 30, *ODD_SIZES, prefix=COUNTING, needs="ncu")
        return [*planned, replace(ncu, output="ncu.csv")]

    def _part(
        self,
        step: str,
        seconds: float,
        *words: str,
        name: str = "",
        needs: str = "",
        background: bool = False,
    ) -> GpuStep:
        """Return a step of `moesaic_lab.device`."""
        python = (sys.executable, "-m", "moesaic_lab.device", step)
        dry = ("--dry",) if self.dry else ()
        return GpuStep(
            name=name or step,
            command=(*python, str(self.folder.resolve()), *words, *dry),
            seconds=seconds,
            needs=needs,
            background=background,
        )

    def _tests(
        self,
        name: str,
        seconds: float,
        *words: str,
        prefix: Sequence[str] = (),
        needs: str = "pytest",
    ) -> GpuStep:
        """Return a step that runs tests, under another program if `prefix` is the beginning of its
        command."""
        return GpuStep(
            name=name,
            command=(*prefix, *PYTEST, *words),
            seconds=seconds,
            output="tests.txt",
            needs=needs,
        )


def require(*, dry: bool) -> None:
    """Refuse a machine without a GPU, unless in a dry run, or without Triton.

    Raises:
        InputError: if so.
    """
    import torch

    if not torch.cuda.is_available() and not dry:
        raise InputError(
            "--device cuda needs a CUDA device, and torch finds none: run it on a machine "
            "with a GPU, or give --dry"
        )
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"--device cuda needs Triton: {to_install('.[gpu]')}")


def run(
    folder: Path,
    *,
    dry: bool,
    seconds: float = SECONDS,
    only: str | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Run all steps that have not ended well before, and return all rows; `gpu.json` is rewritten
    after each step.

    Args:
        folder: folder of the results.
        dry: run without a GPU.
        seconds: time limit; after it no step starts and running steps are killed.
        only: beginnings of names of steps, separated by commas; None for all.
        told: called with each step's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes = _earlier(folder)
    in_background = list[_Running]()
    planned = steps(folder, dry=dry)
    if only:
        beginnings = tuple(only.split(","))
        planned = [step for step in planned if step.name.startswith(beginnings)]
    environment = _environment(folder, dry=dry)
    with tempfile.TemporaryDirectory() as scratch:
        for step in planned:
            earlier = outcomes.get(step.name)
            if earlier is not None and earlier.ended == "ok":
                continue
            told(step.name)
            started = _start(step, folder, Path(scratch), environment, deadline)
            if isinstance(started, StepOutcome):
                outcomes[step.name] = started
            elif step.background:
                in_background.append(started)
                continue
            else:
                outcomes[step.name] = started.end()
            _write(folder, outcomes, dry)
        for running in in_background:
            outcomes[running.step.name] = running.end()
    return _write(folder, outcomes, dry)


def _environment(folder: Path, *, dry: bool) -> dict[str, str]:
    """Return the environment variables of the steps' processes."""
    python_path = [str(ROOT / "src"), str(ROOT / "lab")]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(python_path)
    # a later call finds what this one compiled
    environment["TRITON_CACHE_DIR"] = str(folder.resolve() / "triton")
    environment["PYTHONUNBUFFERED"] = "1"
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    return environment


@dataclass
class _Running:
    """A step that was started. Times are those of `time.monotonic`."""

    step: GpuStep
    process: subprocess.Popen[bytes]
    log: Path
    """The file of the step's output."""
    began: float
    until: float
    """When the step is killed."""
    file: IO[bytes]
    """The open log."""

    def end(self) -> StepOutcome:
        """Wait for the process until its deadline, then kill it and all processes that it
        started."""
        try:
            code = self.process.wait(max(self.until - time.monotonic(), 0.1))
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {time.monotonic() - self.began:.0f} s, its limit"
        with suppress(ProcessLookupError):
            # each step has its own session, so this also kills its children
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.file.close()
        outcome = StepOutcome(self.step.name, time.monotonic() - self.began, ended)
        if ended != "ok":
            outcome.tail = self.log.read_text(errors="replace").splitlines()[-12:]
        return outcome


def _start(
    step: GpuStep, folder: Path, scratch: Path, environment: Mapping[str, str], deadline: float
) -> _Running | StepOutcome:
    """Start a step, or say why it cannot run.

    Args:
        step: the step.
        folder: folder of the results.
        scratch: folder for the output of steps that keep none.
        environment: variables of the process.
        deadline: time of `time.monotonic` at which the step is killed at the latest.
    """
    now = time.monotonic()
    if now > deadline:
        return StepOutcome(step.name, 0.0, "not begun: no time was left")
    is_program = bool(step.needs) and shutil.which(step.needs) is not None
    if step.needs and not is_program and importlib.util.find_spec(step.needs) is None:
        return StepOutcome(step.name, 0.0, f"not begun: {step.needs} is not installed")
    log = folder / step.output if step.output else scratch / f"{step.name}.txt"
    own_environment = dict(environment)
    if step.name == "compile":  # this step needs the compiler, not the interpreter
        own_environment.pop("TRITON_INTERPRET", None)
    file = log.open("ab")
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=own_environment,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return _Running(step, process, log, now, min(now + step.seconds, deadline), file)


def _earlier(folder: Path) -> dict[str, StepOutcome]:
    """Return how the steps of an earlier call ended; none if it was on another kind of GPU."""
    earlier = _read(folder / "gpu.json")
    if earlier.get("machine", {}).get("gpu") != _gpu():
        return {}
    return {row["step"]: StepOutcome(**row) for row in earlier["rows"] if row.get("what") == "step"}


def _write(folder: Path, outcomes: Mapping[str, StepOutcome], dry: bool) -> list[Row]:
    """Write `gpu.json` and return its rows.

    What ended without a row of its own gets one that says how it ended.
    """
    rows: dict[str, Row] = _read(folder / "rows.json").get("rows", {})
    for step_name, outcome in outcomes.items():
        if outcome.ended == "ok":
            continue
        names = [step_name.removeprefix("layer.")]
        if step_name == "sonic":  # the one step that writes several rows
            names = [f"sonic.{layer}" for layer in FIRST]
        last_line = " ".join(outcome.tail[-1:])[:200]
        for name in names:
            if name not in rows:
                rows[name] = {"name": name, "error": f"{outcome.ended}; {last_line}"}
    all_rows = [*map(asdict, outcomes.values()), *rows.values()]
    Measurement(
        rows=all_rows,
        claims=claims(all_rows),
        packages=("torch", "triton", "liger_kernel", "transformers"),
        notes=("A DRY RUN: no figure is of a GPU. " if dry else "") + NOTES,
        machine={"gpu": _gpu()},
    ).write(str(folder / "gpu.json"))
    return all_rows


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about layers, steps and whole models; a claim without a value has a
    reason."""
    by_name = {row["name"]: row for row in rows if "name" in row}
    ended = {row["step"]: row["ended"] for row in rows if row.get("what") == "step"}
    return [*layer_claims(list(LAYERS), by_name), *_figure_claims(by_name), *_test_claims(ended)]


def _figure_claims(by_name: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return a claim for each of `FIGURES`, from the rows by name."""
    all_claims = []
    for name, figure in FIGURES.items():
        row = by_name.get(figure.row, {})
        value = row.get(figure.key)
        # what could not run has its reason under its own key, such as "compiled_absent"
        method = figure.key.split("_")[0]
        absent = row.get(f"{method}_absent", "not run")
        reason = "" if value is not None else row.get("error", absent)
        all_claims.append(
            Claim(
                name=f"gpu.{name}",
                value=value,
                unit=figure.unit,
                target=figure.target,
                reason=reason,
            )
        )
    return all_claims


def _test_claims(ended: Mapping[str, str]) -> list[Claim]:
    """Return a claim that each step of tests passed, from how the steps ended, by name."""
    all_claims = []
    for name in ("tests", "checks", *SANITIZERS):
        end = ended.get(name, "the step did not run to its end")
        is_known = name in ended and not end.startswith(("not begun", "ended after"))
        all_claims.append(
            Claim(
                name=f"gpu.{name}_failed",
                value=float(end != "ok") if is_known else None,
                target=0,
                reason="" if is_known else end,
            )
        )
    return all_claims


def _gpu() -> str:
    """Return name, driver version, memory, clock and power limit of the GPU as nvidia-smi reports
    them; "" without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    command = ("nvidia-smi", query, "--format=csv,noheader")
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    ).stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is missing or truncated."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or truncated by a killed step
        return {}
    return content
