"""`moesaic demo`: trains a sparse and a dense model in a few minutes, compares them, samples, and
writes a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.cli.sample import SampleOptions, continuations
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.files import kind_of

if TYPE_CHECKING:
    from moesaic.train.loop import TrainResult


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `moesaic demo`."""

    model: Literal["gpt", "vision"] = "gpt"
    """gpt continues Python source; vision classifies digits and needs the package moesaic-lab."""
    out: str = "runs/demo"
    """Folder for the two runs and the report; replaces an earlier demo in the same folder."""
    steps: int | None = None
    """Optimizer steps of each model; None for the number in the preset."""
    prompt: str = "def solve(equation, symbol):\n"
    """Text that the trained sparse model continues."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("prompt: give at least one character")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    description = (
        "Train a sparse and a dense model with equally many active parameters, compare them, "
        "sample from the sparse one, and write a report."
    )
    options = parse(DemoOptions, arguments, prog="moesaic demo", description=description)
    if options.model == "vision":
        return _vision(options)
    from moesaic.report.page import write_report
    from moesaic.train.loop import train
    from moesaic.train.presets import preset

    report = Path(options.out) / "report.html"
    kind = kind_of(report)
    if kind not in (None, "a file"):
        raise InputError(
            f"{report}: is {kind}, and the report is a file: delete it, or choose --out"
        )
    console = Console()
    results: dict[str, TrainResult] = {}
    start = preset("demo")
    for ffn in ("moe", "dense"):
        config = replace(
            start,
            out=str(Path(options.out) / ffn),
            existing="replace",
            steps=options.steps or start.steps,
            model=override(start.model, {"ffn": ffn}, source=ffn),
        )
        results[ffn] = train(config, console=console)
        if results[ffn].was_stopped:
            return 0
    console.print(_comparison(results["moe"], results["dense"]))
    console.rule("a sample of the sparse model")
    sample = SampleOptions(run=str(results["moe"].folder), prompt=(options.prompt,))
    console.print(options.prompt + continuations(sample)[0], markup=False, highlight=False)
    console.rule()
    folders = [result.folder for result in results.values()]
    # typed: whether the user typed the path, which may then be a link
    page = write_report(folders, report, typed=False)
    console.print(f"the report: {page}", soft_wrap=True, highlight=False)
    return 0


def _vision(options: DemoOptions) -> int:
    """Train the sparse and the dense image classifier with `moesaic vision`; returns the exit
    code."""
    from moesaic.cli.main import main

    steps = ("--steps", str(options.steps)) if options.steps else ()
    codes = []
    for ffn in ("moe", "dense"):
        out = str(Path(options.out) / ffn)
        codes.append(main(["vision", "--ffn", ffn, "--out", out, *steps]))
    return max(codes)


def _comparison(moe: TrainResult, dense: TrainResult) -> Table:
    """Return the table that compares the sparse model with the dense one."""
    table = Table(title="same tokens, same active parameters")
    for column in ("model", "validation loss, nats", "training seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, result in (("sparse (MoE)", moe), ("dense", dense)):
        table.add_row(name, f"{result.val_nats_per_byte:.4f}", f"{result.seconds:.0f}")
    assert dense.val_nats_per_byte is not None, "a run that was not stopped has been evaluated"
    assert moe.val_nats_per_byte is not None, "a run that was not stopped has been evaluated"
    gain = dense.val_nats_per_byte - moe.val_nats_per_byte
    table.add_row("gain of the sparse model", f"{gain:.4f}", "")
    return table
