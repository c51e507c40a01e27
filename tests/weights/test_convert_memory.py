"""Converting a checkpoint from each format and into each holds less than the largest tensor and a
buffer in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

import transformers

import moesaic
from moesaic.weights import layout
from moesaic.weights.checkpoint import FORMATS

BUFFER = 4 * 2**20
"""Bytes that are moved at once here: a quarter of the usual, so that a quarter of the tensor
does."""


def save_mixtral(folder: Path, hidden: int, intermediate: int) -> None:
    """Save a random Mixtral of one layer in the hub's files."""
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )


def resident(which: str) -> int:
    """Return a figure of this process's memory in bytes: "VmRSS" now, "VmHWM" at the peak."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{which}:")
    ]
    return int(line.split()[1]) * 1024


def convert_all(folder: Path) -> int:
    """Convert both models through all formats and back; return by how much the larger one raises
    the peak memory."""
    layout.BUFFER = BUFFER
    first, *others = FORMATS
    for name in ("tiny", "large"):
        base = resident("VmRSS")
        (folder / name).rename(folder / f"{name}-{first}")
        for source, to in pairwise((first, *others, first)):
            moesaic.convert(
                folder / f"{name}-{source}", folder / f"{name}-{to}", to=to, logits=False
            )
            shutil.rmtree(folder / f"{name}-{source}")
    return resident("VmHWM") - base


@pytest.mark.random
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory of a process is read on Linux only"
)
def test_memory_stays_below_the_largest_tensor(tmp_path: Path) -> None:
    """The largest tensor has nine times a buffer's bytes: a program that held a tensor whole, and a
    copy, would be over."""
    hidden = 512
    intermediate = 1152
    largest = 8 * 2 * intermediate * hidden * 4
    assert largest > 8 * BUFFER
    save_mixtral(tmp_path / "tiny", 32, 24)
    save_mixtral(tmp_path / "large", hidden, intermediate)
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= largest


if __name__ == "__main__":
    print(convert_all(Path(sys.argv[1])))
