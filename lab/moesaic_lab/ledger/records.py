"""Measured figures and their predictions: `Entry`, and the tables of others' figures that come with the laboratory."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from moesaic.configfile import read_table

Kind = Literal["collectives", "products", "expert stages", "layers", "steps", "memory", "papers", "beds", "trace"]
DATA = "data"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure that somebody measured, and ours."""

    kind: Kind
    what: str
    machine: str
    """A preset, or a bed."""
    measured: float
    predicted: float
    unit: str
    source: str
    """Key of `SOURCES`."""
    why: str = ""
    """Why it is off, as far as anybody knows; empty where it is not, or nobody does."""
    fitted: bool = False
    """A number of the preset rests on it, so it counts as no evidence."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.ratio - 1)


SOURCES = {
    "aiconfigurator": "NVIDIA aiconfigurator, commit 095f58a, Apache-2.0: NCCL by operation, number of GPUs in a node and "
    "bytes; DeepEP's normal kernels with 24 SMs; bf16 products and expert stages, the fastest of vLLM and SGLang",
    "deepep": "DeepEP's README, its second version (V2): 8,192 tokens, the best 8 of 256, dispatch in float8 "
    "and combine in bfloat16",
    "megatron": "Megatron-LM, its baseline of module performance, December 2025",
    "laer": "artifact of LAER-MoE (ASPLOS 2026), Apache-2.0: tokens per rank, expert time and all-to-all time on 32 A100",
    "deepseek": "DeepSeek's profile-data, train.json (figures read from it; the trace has no licence and is not included)",
    "simumax": "SimuMax 1.2 (MooreThreads), its system file for B200: grouped products of Transformer Engine 2.11",
    "steps": "published steps, each named in its row",
    "papers": "the five papers of docs/reproduce.md, with the roles that figures have there",
    "beds": "benchmarks/results/model.json: layers on emulated clusters, with predictions from their profiles",
}
"""Where figures come from."""


def read_figures(name: str) -> list[dict[str, str]]:
    """Return the lines of one of the laboratory's tables of others' figures."""
    with _file(f"{name}.csv").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_published() -> dict[str, Any]:
    """Return layers and steps that others published."""
    found: dict[str, Any] = read_table(_file("published.toml"))
    return found


def counted(entries: Iterable[Entry], kind: str) -> list[Entry]:
    """Return the entries of a kind that are evidence."""
    return [each for each in entries if each.kind == kind and not each.fitted]


def median_error(entries: Iterable[Entry], kind: str) -> float:
    """Return the median error of a kind."""
    return statistics.median(each.error for each in counted(entries, kind))


def worst_error(entries: Iterable[Entry], kind: str) -> float:
    """Return the largest error of a kind."""
    return max(each.error for each in counted(entries, kind))


def _file(name: str) -> Path:
    return Path(str(resources.files("moesaic_lab.ledger").joinpath(DATA, name)))
