"""Small hand-written run folders for the tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def layer(load: list[int], violation: float, dead: int = 0, dropped: int = 0) -> dict[str, Any]:
    return {
        "tokens_per_expert": load,
        "max_violation": violation,
        "variation": 0.1,
        "dead_experts": dead,
        "entropy": 0.9,
        "needed_capacity_factor": 1 + violation,
        "dropped": dropped,
    }


def train_line(
    step: int, loss: float, speed: float, layers: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "loss": loss, "grad_norm": 0.5, "lr": 0.01}
    return (
        line
        | {"tokens_per_second": speed, "mfu": speed / 1000, "seconds": step / 2, "layers": layers}
        | more
    )


def eval_line(step: int, per_token: float, per_byte: float | None = None) -> dict[str, Any]:
    per_byte = per_token if per_byte is None else per_byte
    return {
        "kind": "eval",
        "step": step,
        "val_loss": per_token,
        "val_nats_per_byte": per_byte,
        "seconds": step / 2,
    }


def write_run(folder: Path, lines: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True)
    whole = {
        "out": str(folder),
        "batch_size": 4,
        "accumulation": 2,
        "model": {"ffn": "moe", "seq_len": 8},
    } | config
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return folder


def sparse_run(folder: Path) -> Path:
    """Write a run with two layers of four experts, three train lines and two evaluations."""
    lines = [
        train_line(
            10,
            3.0,
            100.0,
            [layer([4, 0, 4, 4], 0.4, dead=1), layer([3, 3, 3, 3], 0.0)],
            load_balance=1.5,
        ),
        eval_line(10, 2.5),
        train_line(
            20,
            2.0,
            300.0,
            [layer([6, 2, 2, 2], 1.0, dropped=3), layer([3, 3, 3, 3], 0.0)],
            load_balance=1.25,
        ),
        train_line(
            30, 1.5, 200.0, [layer([3, 3, 4, 2], 0.5, dead=0), layer([6, 0, 3, 3], 0.9, dead=1)]
        ),
        eval_line(30, 2.75),
    ]
    return write_run(folder, lines)


def dense_run(folder: Path) -> Path:
    lines = [train_line(step, 4.0 - step / 10, 400.0, []) for step in (10, 20, 30)]
    return write_run(
        folder,
        [*lines, eval_line(30, 2.875)],
        model={"ffn": "dense", "seq_len": 8},
        data={"path": [], "val": ["a"]},
    )
