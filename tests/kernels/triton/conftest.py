"""Runs these tests where Triton can run: on a GPU, or under its interpreter in a process of its own.

Triton decides when it is imported whether it interprets, and other tests import it through torch: `test_triton_interpreter.py`
starts a second pytest in this folder with `TRITON_INTERPRET=1`. With neither, the other files here are not collected.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = HAS_TRITON and (IS_INTERPRETED or torch.cuda.is_available())
UNINTERPRETED = (
    "test_triton_interpreter.py", "test_triton_tiles.py", "test_triton_compiled.py", "test_triton_versions.py",
)  # fmt: skip
"""The tests that start others, and tests that run no kernel: collected always, but not a second time."""

if IS_INTERPRETED:
    collect_ignore = list(UNINTERPRETED)
elif not CAN_RUN:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in UNINTERPRETED]


if CAN_RUN and IS_INTERPRETED:
    from moesaic_lab.gpu.interpreter import mend_the_interpreter

    mend_the_interpreter()


@pytest.fixture
def device() -> str:
    """Where tensors live: the interpreter takes those of the CPU."""
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture
def interpreted() -> bool:
    """Whether kernels run under the interpreter."""
    return IS_INTERPRETED
