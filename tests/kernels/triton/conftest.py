"""Runs these tests on a GPU, or under Triton's interpreter in a separate process.

Triton chooses its interpreter when it is imported, and other tests import Triton through torch.
`test_triton_interpreter.py` therefore starts a second pytest in this folder with
`TRITON_INTERPRET=1`. Without a GPU and without the interpreter, the files that run kernels are not
collected.
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
    "test_triton_interpreter.py",
    "test_triton_tiles.py",
    "test_triton_compiled.py",
    "test_triton_versions.py",
    "test_triton_devices.py",
)
"""Tests that start other tests and tests that run no kernel: always collected, but not in the
second pytest."""

if IS_INTERPRETED:
    collect_ignore = list(UNINTERPRETED)
elif not CAN_RUN:
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name not in UNINTERPRETED
    ]


def refuse_constants_that_hold_tensors() -> None:
    """Let Triton's interpreter refuse `constant * tensor`, where the constant is a `tl.constexpr`.

    The interpreter makes of it a constant that holds a tensor. From Triton 3.7 on, such a constant
    cannot be the argument of a call; in 3.6 it can. `tensor * constant` is a tensor everywhere, and
    in compiled kernels both are.
    """
    import triton.language as tl

    plain = tl.constexpr.__init__

    def checked(self: tl.constexpr, value: object) -> None:
        if isinstance(value, tl.tensor):
            raise TypeError(
                "a constant to the left of a tensor in a kernel: write the tensor first"
            )
        plain(self, value)

    tl.constexpr.__init__ = checked


if CAN_RUN and IS_INTERPRETED:
    from moesaic_lab.device.interpreter import mend_the_interpreter

    mend_the_interpreter()
    refuse_constants_that_hold_tensors()


@pytest.fixture
def device() -> str:
    """The device of the tensors; the interpreter runs on CPU tensors."""
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture
def interpreted() -> bool:
    """Whether kernels run under the interpreter."""
    return IS_INTERPRETED
