"""Run one part of `moesaic bench gpu` in its own process: layers, compiled or profile.

The part `layers` measures the twelve layers of SonicMoE's paper, forward and backward, against other implementations. It
needs only torch, Triton and a CUDA device, and compares with liger-kernel if that can be imported. An interrupted run
continues where it stopped.

    PYTHONPATH=src:lab python -m moesaic_lab.gpu layers --folder gpu_results --out benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from moesaic.errors import InputError

PARTS = ("compiled", "profile")
"""Modules of this package with a function `write`, which writes a file of results."""


def main() -> int:
    """Run one part and return the exit code. (Without tyro: borrowed GPU machines often have no package besides torch.)"""
    parser = argparse.ArgumentParser(description="A part of the benchmark of one GPU.")
    parser.add_argument("part", choices=("layers", *PARTS))
    parser.add_argument("--out", default="-", help='file of the results; "-" for standard output (layers only)')
    parser.add_argument("--dry", action="store_true", help="test that everything runs, on the CPU")
    parser.add_argument("--layers", nargs="*", default=[], help="names or parts of names; all layers by default")
    parser.add_argument(
        "--stages", nargs="*", default=[], help="any of check, tune, measure, sonic; the first three by default"
    )
    parser.add_argument("--folder", type=Path, default=Path("gpu_results"), help="folder of tiles.json and rows.json")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each implementation")
    parser.add_argument("--seconds", type=float, default=1500.0, help="start nothing new after so many seconds")
    parser.add_argument("--products", nargs="*", default=[], help="products to search tiles for; all by default")
    arguments = parser.parse_args()
    if arguments.part in PARTS:
        code: int = import_module(f"moesaic_lab.gpu.{arguments.part}").write(Path(arguments.out), dry=arguments.dry)
        return code
    from moesaic_lab.gpu.run import STAGES, GpuOptions, measure

    try:
        options = GpuOptions(
            layers=tuple(arguments.layers), stages=tuple(arguments.stages) or STAGES, folder=arguments.folder,
            repeats=arguments.repeats, seconds=arguments.seconds, products=tuple(arguments.products), dry=arguments.dry,
        )  # fmt: skip
        if options.dry:
            from moesaic_lab.gpu.interpreter import mend_the_interpreter

            mend_the_interpreter()
        measure(options).write(arguments.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
