"""A small model trained in pipeline stages under 1F1B and interleaved 1F1B, against the same run on one process, in float64.

Compared are every step's loss and gradient norm, the validation loss, and all parameters at the end, relative to the largest
value of each tensor. Both schedules run on two and on four stages, combined with expert, tensor and data parallelism.

    moesaic bench stages --json benchmarks/results/stages.json
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.train.checkpoint import load_checkpoint
from moesaic.train.config import DataConfig, MeshConfig, TrainConfig
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.training import changes, trained_on

MESHES: tuple[tuple[int, MeshConfig], ...] = (
    (2, MeshConfig(pp=(2,))),
    (4, MeshConfig(pp=(2,), ep=2)),
    (4, MeshConfig(pp=(4,))),
    (4, MeshConfig(pp=(2, 2))),
    (4, MeshConfig(pp=(4, 2))),
    (4, MeshConfig(pp=(2, 2), tp=2, etp=2, sequence_parallel=True)),
    (8, MeshConfig(pp=(4, 2), ep=2)),
)
"""Number of ranks, and their mesh."""
WORST = 1e-9


@dataclass(frozen=True, kw_only=True)
class StagesOptions(BenchmarkOptions):
    """Length of the runs."""

    steps: int = 3
    """Optimizer steps of each run."""


def configuration(folder: Path, name: str, steps: int, mesh: MeshConfig) -> TrainConfig:
    """Return the configuration of a run: nine layers, every second one sparse, two auxiliary losses."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(" ".join(str(number * number) for number in range(4000)), encoding="utf-8")
    moe = MoEConfig(num_experts=8, top_k=2, hidden=32, losses=("load_balance_global_batch:0.01", "z_loss:0.001"))
    return TrainConfig(
        out=str(folder / name), steps=steps, batch_size=4, accumulation=4, precision="float64", device="cpu:1", log_every=1,
        evaluate=(steps, 7), trackers=(), mesh=mesh, data=DataConfig(path=(str(text),)),
        model=ModelConfig(ffn="moe:2", dim=32, num_layers=9, num_heads=2, seq_len=32, moe=moe),
    )  # fmt: skip


def trained(folder: Path, name: str, steps: int, world: int, mesh: MeshConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Train on `world` processes; return all losses and gradient norms, and the parameters at the end."""
    config = configuration(folder, name, steps, mesh)
    lines = trained_on(world, config)
    figures = [line[key] for line in lines for key in ("loss", "grad_norm", "val_loss") if key in line]
    return figures, load_checkpoint(Path(config.out) / "checkpoints", print).model


def row(mesh: MeshConfig, world: int, found: Any, expected: Any) -> dict[str, Any]:
    """Return the row of a run: its largest relative differences. `found` and `expected` are results of `trained`."""
    (figures, tensors), (expected_figures, expected_tensors) = found, expected
    assert tensors.keys() == expected_tensors.keys()
    scales = {name: max(float(tensor.abs().max()), 1e-30) for name, tensor in expected_tensors.items()}
    errors = {name: float((tensors[name] - tensor).abs().max()) for name, tensor in expected_tensors.items()}
    return {
        "ranks": world, "mesh": changes(mesh),
        "schedule": "interleaved 1F1B" if mesh.parts_per_stage > 1 else "1F1B",
        "figures": max(abs(a - b) / abs(b) for a, b in zip(figures, expected_figures, strict=True)),
        "parameters": max(errors[name] / scales[name] for name in errors),
    }  # fmt: skip


def measure(options: StagesOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train on one process, then in stages on every mesh."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, steps, rows = Path(name), options.steps, []
        told("one process")
        expected = trained(folder, "one", steps, 1, MeshConfig())
        for number, (world, mesh) in enumerate(MESHES):
            told(f"{number + 1} of {len(MESHES)}")
            rows.append(row(mesh, world, trained(folder, str(number), steps, world, mesh), expected))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claim: the largest relative difference of any run."""
    worst = max(max(each["figures"], each["parameters"]) for each in rows)
    return [Claim(name="pp.worst", value=worst, unit="1", target=WORST, op="<=")]


BENCHMARK = Benchmark(
    name="stages", description="Train the same model in pipeline stages and on one process.", options=StagesOptions,
    notes=notes_of(__doc__), measure=measure, claims=claims,
    columns=(Shown(title="largest relative difference to one process"),),
)  # fmt: skip
