"""`moesaic demo`: the whole product in a few minutes: train sparse and dense, compare, sample, report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.cli.sample import SampleOptions, continuation

if TYPE_CHECKING:
    from moesaic.train.loop import TrainResult


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """How the demo runs."""

    out: str = "runs/demo"
    """Folder of the two runs and the report; an earlier demo there is replaced."""
    steps: int | None = None
    """Optimizer steps of each model; None takes the presets'."""
    prompt: str = "def read_file(path):\n"
    """What the sparse model continues in the end."""


def run(arguments: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    description = "Train a sparse and a dense GPT on Python source, compare them, sample, write the report."
    options = parse(DemoOptions, arguments, prog="moesaic demo", description=description)
    from moesaic.report.page import write_report
    from moesaic.train.loop import train
    from moesaic.train.presets import demo, demo_dense

    console = Console()
    results: dict[str, TrainResult] = {}
    for name, preset in (("moe", demo()), ("dense", demo_dense())):
        config = replace(
            preset, out=str(Path(options.out) / name), existing="replace", steps=options.steps or preset.steps
        )
        results[name] = train(config, console=console)
        if results[name].was_stopped:
            return 0
    console.print(_comparison(results["moe"], results["dense"]))
    folder = results["moe"].folder
    sample = SampleOptions(run=str(folder), prompt=options.prompt)
    console.rule("a sample of the sparse model")
    console.print(sample.prompt + continuation(sample), markup=False, highlight=False)
    console.rule()
    page = write_report([results["moe"].folder, results["dense"].folder], Path(options.out) / "report.html")
    console.print(f"the report: {page}", soft_wrap=True, highlight=False)
    return 0


def _comparison(moe: TrainResult, dense: TrainResult) -> Table:
    table = Table(title="same tokens, same active parameters")
    for column in ("model", "validation nats/byte", "training seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, result in (("sparse (MoE)", moe), ("dense", dense)):
        table.add_row(name, f"{result.val_nats_per_byte:.4f}", f"{result.seconds:.0f}")
    assert dense.val_nats_per_byte is not None, "a run that was not stopped has been evaluated"
    assert moe.val_nats_per_byte is not None, "a run that was not stopped has been evaluated"
    gain = dense.val_nats_per_byte - moe.val_nats_per_byte
    table.add_row("gain of the sparse model", f"{gain:.4f}", "")
    return table
