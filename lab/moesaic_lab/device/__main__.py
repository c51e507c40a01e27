"""Run one step of `moesaic bench device --device cuda` in this process, or all steps.

python -m moesaic_lab.device measure gpu_results T32768_H4096    # needs torch, Triton, NumPy
python -m moesaic_lab.device --seconds 540 --keep gpu_results    # all steps
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from moesaic.errors import InputError

PARTS = {
    "compile": "compiled:compile_all",
    "measure": "on_gpu:measure",
    "sonic": "on_gpu:measure_sonic",
    "tune": "on_gpu:tune",
    "profile": "profile:profile",
}
"""By name: a function of this room from a folder and further words to an exit code."""
ROWS = {
    "plans": "ranks:plans_row",
    "training": "ranks:training_row",
    "sharded": "ranks:sharded_row",
    "whole": "whole:layer_row",
    "transformers": "whole:model_row",
    "finetune": "finetune:finetune_row",
}
"""By name: a function of this room that returns the row of this name, or that of the name and a
further word."""


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name and return the exit code."""
    try:
        if not arguments or arguments[0].startswith("-"):
            run = import_module("moesaic_lab.device.benchmark").BENCHMARK.run
            return int(run(["--device", "cuda", *arguments]))
        name, *words = (word for word in arguments if word != "--dry")
        if name not in PARTS | ROWS or not words:
            raise InputError(
                f"{' '.join(arguments)}: write one of {', '.join(PARTS | ROWS)}, and a folder"
            )
        folder, *others = words
        return _run_step(name, Path(folder), others, dry="--dry" in arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run_step(name: str, folder: Path, words: Sequence[str], *, dry: bool) -> int:
    """Run a part, or measure one row for each word (one in all without words); return the exit
    code."""
    if dry:
        from moesaic_lab.device.interpreter import mend_the_interpreter

        mend_the_interpreter()
    folder.mkdir(parents=True, exist_ok=True)
    module, _, function = (PARTS | ROWS)[name].partition(":")
    run = getattr(import_module(f"moesaic_lab.device.{module}"), function)
    if name in PARTS:
        return int(run(folder, *words, dry=dry))

    results = import_module("moesaic_lab.device.results").StepRows(folder, dry=dry)
    if not words:
        return int(not results.attempt(name, partial(run, dry=dry)))
    is_done = [results.attempt(f"{name}.{word}", partial(run, word, dry=dry)) for word in words]
    return int(not all(is_done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
