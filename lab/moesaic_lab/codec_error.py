"""Accuracy and size of each codec: relative L2 error, and bytes relative to those of the
uncompressed rows.

Gaussian rows, and heavy-tailed ones (Student's t with 2 degrees of freedom: a few values are far
above the others, as in the activations of large models), in float32 and bfloat16. The error is that
of one encode and decode; `codec_convergence` measures its effect on training.

    moesaic bench codec_error --json benchmarks/results/codec_error.json
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.codecs import CODECS
from moesaic.kernels.codecs import codec_named
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, summary_of
from moesaic_lab.claims import Claim

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("gaussian", "heavy-tailed")


@dataclass(frozen=True, kw_only=True)
class CodecErrorOptions(BenchmarkOptions):
    """Command-line options."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the rows."""
    rows: int = 1024
    """Rows per message."""
    dim: int = 1024
    """Width of a row."""


def one_row(name: str, kind: str, dtype: str, options: CodecErrorOptions) -> dict[str, Any]:
    """Return a codec's mean relative error, its largest error over its bound, and its relative
    size."""
    codec = codec_named(name)
    errors = []
    of_bound = []
    for seed in options.seeds:
        rows = draw(kind, options.rows, options.dim, seed).to(DTYPES[dtype])
        encoded = codec.encode(rows)
        decoded = codec.decode(encoded, options.rows, options.dim, rows.dtype)
        error = decoded.double() - rows.double()
        errors.append(float(error.norm() / rows.double().norm()))
        bound = codec.error_bound(rows)
        # A value that must be exact, with a bound of 0, would divide by 0.
        shares = torch.where(bound > 0, error.abs() / bound, 0.0)
        of_bound.append(float(shares.max()))
    num_bytes = codec.num_bytes(options.rows, options.dim, DTYPES[dtype])
    return {
        "dtype": dtype,
        "rows": kind,
        "codec": name,
        "relative_l2_error": statistics.mean(errors),
        "error_over_bound": max(of_bound),
        "bytes_ratio": num_bytes / (options.rows * options.dim * DTYPES[dtype].itemsize),
    }


def draw(kind: str, rows: int, dim: int, seed: int) -> Tensor:
    """Return random rows, (rows, dim) float64.

    Heavy-tailed values are Student's t with 2 degrees of freedom: a normal draw over the root of
    the mean of 2 squared normal draws.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        return normal
    draws = torch.randn(2, rows, dim, generator=generator, dtype=torch.float64)
    squares = draws.square().sum(0)
    return normal / (squares / 2).sqrt()


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the figures that the codecs' page quotes."""
    float32 = [row for row in rows if row["dtype"] == "float32"]
    error = {(row["codec"], row["rows"]): row["relative_l2_error"] for row in float32}
    result = [
        Claim(name=f"codec_error.{name}.{kind}", value=error[name, kind])
        for name in CODECS
        if name != "none"
        for kind in KINDS
    ]
    largest = max(row["error_over_bound"] for row in rows)
    int8 = next(row for row in float32 if row["codec"] == "int8")
    ratio = error["zfp", "gaussian"] / error["int8", "gaussian"]
    return [
        *result,
        Claim(name="codec_error.largest_error_over_bound", value=largest, target=1.0),
        Claim(name="codec_error.int8_bytes_ratio", value=int8["bytes_ratio"], target=0.26),
        Claim(name="codec_error.zfp_over_int8_gaussian", value=ratio),
    ]


def measure(options: CodecErrorOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Encode and decode with every codec."""
    names = [name for name in CODECS if name != "none"]
    return [
        one_row(name, kind, dtype, options) for dtype in DTYPES for kind in KINDS for name in names
    ]


BENCHMARK = Benchmark(
    name="codec_error",
    description="Measure error and bytes of each codec.",
    options=CodecErrorOptions,
    notes=summary_of(__doc__),
    measure=measure,
    claims=claims,
    columns=(Shown(title="one encode and decode"),),
    packages=("torch", "numpy", "zfpy"),
)
