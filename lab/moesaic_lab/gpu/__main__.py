"""Parts of `moesaic bench gpu`, each a process of its own: layers, checks, compiled, profile.

Layers are the twelve of SonicMoE's paper, both passes, beside other implementations. They need torch, Triton and a CUDA
device, nothing else; liger-kernel takes part where it can be imported. Cut off, they go on where they stopped.

    PYTHONPATH=src:lab python -m moesaic_lab.gpu layers --folder gpu_results --out benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from moesaic.errors import InputError

PARTS = ("checks", "compiled", "profile")
"""Modules beside this one that write a file."""


def main() -> int:
    """Run a part; returns the exit code. (No tyro: machines replicated for their GPU often have no package beyond torch.)"""
    parser = argparse.ArgumentParser(description="A part of the benchmark of one GPU.")
    parser.add_argument("part", choices=("layers", *PARTS))
    parser.add_argument("--out", default="-", help='write the results there; "-" for standard output, of layers')
    parser.add_argument("--dry", action="store_true", help="on the CPU, without a GPU: does everything run?")
    parser.add_argument("--layers", nargs="*", default=[], help="names of layers, or parts of names; all by default")
    parser.add_argument(
        "--stages", nargs="*", default=[], help="of check, tune, measure, sonic; the first three by default"
    )
    parser.add_argument("--folder", type=Path, default=Path("gpu_results"), help="of tiles.json and rows.json")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds of every way")
    parser.add_argument("--seconds", type=float, default=1500.0, help="begin nothing new after this long")
    parser.add_argument("--products", nargs="*", default=[], help="products whose tiles are searched; all by default")
    given = parser.parse_args()
    if given.part in PARTS:
        code: int = import_module(f"moesaic_lab.gpu.{given.part}").write(Path(given.out), dry=given.dry)
        return code
    from moesaic_lab.gpu.run import STAGES, GpuOptions, measure

    try:
        options = GpuOptions(
            layers=tuple(given.layers), stages=tuple(given.stages) or STAGES, folder=given.folder, repeats=given.repeats,
            seconds=given.seconds, products=tuple(given.products), dry=given.dry,
        )  # fmt: skip
        if options.dry:
            from moesaic_lab.gpu.interpreter import mend_the_interpreter

            mend_the_interpreter()
        measure(options).write(given.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
