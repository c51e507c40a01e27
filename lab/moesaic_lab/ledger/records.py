"""`Entry`, a measured figure with its prediction, and the tables of others' figures that come with
the laboratory."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from moesaic.configfile import read_table

Kind = Literal[
    "collectives",
    "products",
    "expert stages",
    "own products",
    "own stages",
    "own layers",
    "layers",
    "steps",
    "memory",
    "papers",
    "beds",
    "trace",
]
DATA = "data"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A measured figure and its prediction."""

    kind: Kind
    what: str
    """Description of the figure."""
    machine: str
    """Name of a preset, an emulated cluster or a paper."""
    measured: float
    predicted: float
    unit: str
    source: str
    """Key of `SOURCES`, or a description of the source."""
    why: str = ""
    """Why the prediction is off, if it is and the reason is known."""
    system: str = ""
    """System whose figure it is, if one source has figures of several or one system has several
    sources."""
    fitted: bool = False
    """Whether a number of the preset was fitted to this figure, which therefore is no evidence."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.ratio - 1)


SOURCES = {
    "aiconfigurator": "NVIDIA aiconfigurator, commit 095f58a, Apache-2.0: NCCL by operation, "
    "number of GPUs in a node and bytes; DeepEP's normal kernels with 24 SMs; "
    "bf16 products and expert stages, the fastest of vLLM and SGLang",
    "own": "this library's kernels at commit d03c1216 on one NVIDIA H200, `moesaic_lab.gpu "
    "layers`, 26 November 2026: bf16, SwiGLU, random routing, kernel times",
    "deepep": "DeepEP's README, its second version (V2): 8,192 tokens, the best 8 of 256, dispatch "
    "in float8 and combine in bfloat16",
    "megatron": "Megatron-LM, its baseline of module performance, December 2025",
    "laer": (
        "artifact of LAER-MoE (ASPLOS 2026), Apache-2.0: tokens per rank, expert time and "
        "all-to-all time on 32 A100"
    ),
    "deepseek": (
        "DeepSeek's profile-data, train.json (figures read from it; the trace has no licence and "
        "is not included)"
    ),
    "simumax": (
        "SimuMax 1.2 (MooreThreads), its system file for B200: grouped products of Transformer "
        "Engine 2.11"
    ),
    "steps": "published steps, each named in its row",
    "papers": "the five papers of docs/reproduce.md, with the roles that figures have there",
    "beds": (
        "benchmarks/results/model.json: layers on emulated clusters, with predictions from their "
        "profiles"
    ),
}
"""Sources of the figures, by short name."""


def read_figures(name: str) -> list[dict[str, str]]:
    """Return the rows of the table `name` of others' figures."""
    with _file(f"{name}.csv").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_published() -> dict[str, Any]:
    """Return the layers, steps and further figures of `published.toml`."""
    published: dict[str, Any] = read_table(_file("published.toml"))
    return published


def counted(entries: Iterable[Entry], kind: str) -> list[Entry]:
    """Return the entries of a kind that count as evidence, since no number was fitted to them."""
    return [each for each in entries if each.kind == kind and not each.fitted]


def median_error(entries: Iterable[Entry], kind: str) -> float:
    """Return the median error of a kind's entries that count as evidence."""
    return statistics.median(each.error for each in counted(entries, kind))


def worst_error(entries: Iterable[Entry], kind: str) -> float:
    """Return the largest error of a kind's entries that count as evidence."""
    return max(each.error for each in counted(entries, kind))


def _file(name: str) -> Path:
    """Return the path of a file with published figures."""
    return Path(str(resources.files("moesaic_lab.ledger").joinpath(DATA, name)))
