"""Tiny training runs that tests of training and of commands share."""

from __future__ import annotations

import io
import json
import random
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from rich.console import Console

from moesaic.configfile import override
from moesaic.resuming import checksum
from moesaic.train import loop, machine
from moesaic.train.checkpoint import SUMS, load_checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer, TrainResult, train
from moesaic.train.metrics import read_metrics
from moesaic_lab.paper_train.command import task_of

TINY: dict[str, Any] = {
    "steps": 4,
    "batch_size": 2,
    "device": "cpu",
    "threads": 1,
    "precision": "float32",
    "log_every": 1,
    "evaluate": {"every": 100, "sequences": 4},
    "save": {"every": 100},
    "tensorboard": False,
    "model": {
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "seq_len": 16,
        "moe": {"num_experts": 4, "top_k": 2, "hidden": 16},
    },
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
}
"""Configuration of a run of four steps of 32 tokens, as a table."""


def write_text(path: Path, size: int = 6000, seed: int = 0) -> Path:
    """Write a text of `size` letters of random words, drawn from a seed, and return the path."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(40)]
    text = " ".join(draw.choice(words) for _ in range(size))
    path.write_text(text[:size], encoding="utf-8")
    return path


def train_tokenizer(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE that was trained on a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def write_tokenizer(path: Path, vocab_size: int = 300) -> str:
    """Write a tokenizer.json for the texts of `write_text`, and return its path."""
    train_tokenizer("abc bcd cdef defg efgh " * 100, vocab_size).save(str(path))
    return str(path)


def tiny(folder: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a tiny run in `folder / "run"` on `folder / "text.txt"`, with
    (nested) changes applied."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    base = override(TrainConfig(), TINY, source="TINY")
    base = replace(base, out=str(folder / "run"), data=replace(base.data, path=(str(text),)))
    return override(base, changes, source="changes")


def write_config(config: TrainConfig, path: Path) -> Path:
    """Write a configuration for `--config` and return its path."""
    path.write_text(json.dumps(asdict(config)), encoding="utf-8")
    return path


def run_quietly(config: TrainConfig) -> tuple[TrainResult, str]:
    """Train; return the result and the text that a terminal would have shown."""
    screen = io.StringIO()
    result = train(config, console=Console(file=screen, width=200), task=task_of(config))
    return result, screen.getvalue()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that are of one kind."""
    return [line for line in read_metrics(folder) if line["kind"] == kind]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return (step, training loss) for every line of training metrics."""
    return [(line["step"], line["loss"]) for line in lines(folder, "train")]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of a run's newest checkpoint, which must be complete."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    return load_checkpoint(folder / "checkpoints", refuse).model


def seal(checkpoint: Path) -> None:
    """Rewrite the checksums of a checkpoint after a deliberate edit."""
    files = [
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    ]
    sums = [f"{checksum(checkpoint / name)}  {name}\n" for name in sorted(files) if name != SUMS]
    (checkpoint / SUMS).write_text("".join(sums))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two sets of tensors have the same names and equal values."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def signal_after(
    monkeypatch: pytest.MonkeyPatch, step: int, kind: signal.Signals = signal.SIGINT
) -> None:
    """Make the process send itself a signal after `step` training steps."""
    plain = Trainer._step

    def stepping(self: Trainer) -> dict[str, Any]:
        values = plain(self)
        if self.state.step == step:
            signal.raise_signal(kind)
        return values

    monkeypatch.setattr(Trainer, "_step", stepping)


def skip_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the machine's matmul rate to 1 GFLOP/s instead of measuring it, which saves time."""
    for module in (loop, machine):
        monkeypatch.setattr(module, "matmul_flops_per_second", lambda *_, **__: 1e9)
