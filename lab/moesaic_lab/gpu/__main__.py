"""One MoE layer on one GPU: the twelve layers of SonicMoE's paper, forward and backward, beside other implementations.

Needs torch, Triton and a CUDA device, nothing else; liger-kernel takes part where it can be imported. Cut off, it goes on where
it stopped. `lab/gpu.sh` runs everything, the kernels' tests on the GPU first.

    PYTHONPATH=src:lab python -m moesaic_lab.gpu --folder gpu_results --json benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moesaic.errors import InputError
from moesaic_lab.gpu.run import STAGES, GpuOptions, measure


def main() -> int:
    """Run it; returns the exit code. (No tyro: machines replicated for their GPU often have no package beyond torch.)"""
    parser = argparse.ArgumentParser(description="One MoE layer on one GPU.")
    default = GpuOptions()
    parser.add_argument("--layers", nargs="*", default=[], help="names of layers, or parts of names; all by default")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), help="of check, tune, measure, sonic")
    parser.add_argument("--folder", type=Path, default=default.folder, help="tiles.json and rows.json are kept there")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="timed rounds of every way")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="begin nothing new after this long")
    parser.add_argument("--small", action="store_true", help="tiny layers: does everything run?")
    parser.add_argument("--products", nargs="*", default=[], help="products whose tiles are searched; all by default")
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, under Triton's interpreter: does everything run?"
    )
    parser.add_argument("--json", default="-", help='write the results there; "-" for standard output')
    given = parser.parse_args()
    try:
        options = GpuOptions(
            layers=tuple(given.layers), stages=tuple(given.stages), folder=given.folder, repeats=given.repeats,
            seconds=given.seconds, small=given.small, products=tuple(given.products), dry=given.dry,
        )  # fmt: skip
        if options.dry:
            from moesaic_lab.gpu.interpreter import mend_the_interpreter

            mend_the_interpreter()
        measure(options).write(given.json)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
