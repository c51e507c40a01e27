"""Runs these tests where Triton can run: on a GPU, or under its interpreter in a process of its own.

Triton decides when it is imported whether it interprets, and other tests import it through torch: `test_triton_interpreter.py`
starts a second pytest in this folder with `TRITON_INTERPRET=1`. With neither, the other files here are not collected.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = HAS_TRITON and (IS_INTERPRETED or torch.cuda.is_available())
UNINTERPRETED = ("test_triton_interpreter.py", "test_triton_tiles.py", "test_triton_compiled.py")
"""The test that starts the others, and tests that run no kernel: collected always, but not a second time."""

if IS_INTERPRETED:
    collect_ignore = list(UNINTERPRETED)
elif not CAN_RUN:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in UNINTERPRETED]


def mend_the_interpreter() -> None:
    """Make Triton 3.6's interpreter do what a GPU does.

    Loop bounds may be tensors: NumPy 2.4 no longer turns an array of one number into an int. bfloat16, which it keeps as
    16-bit integers, is rounded to nearest, subnormal numbers included, and multiplied as numbers in `tl.dot`.
    """
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot
    handle, bfloat16, float32 = interpreter.TensorHandle, triton.language.bfloat16, triton.language.float32

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != bfloat16:
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), float32)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) == (bfloat16, float32):
            return widened(source)
        if (source.dtype.scalar, to.scalar) == (float32, bfloat16):
            values = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            return handle(values.view(torch.int16).numpy().view(np.uint16), bfloat16)
        return cast(self, source, to)

    interpreter._patch_lang_tensor = patched
    builder.cast_impl = cast_impl
    builder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)


if CAN_RUN and IS_INTERPRETED:
    import triton

    mend_the_interpreter()


@pytest.fixture
def device() -> str:
    """Where tensors live: the interpreter takes those of the CPU."""
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture
def interpreted() -> bool:
    """Whether kernels run under the interpreter."""
    return IS_INTERPRETED
