"""Corrections of Triton's interpreter, which runs kernels on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_the_interpreter() -> None:
    """Patch Triton 3.6's interpreter where it differs from a GPU.

    After the patch loop bounds may be tensors; NumPy 2.4 no longer converts an array of one number to an int. The interpreter
    stores bfloat16 as 16-bit integers. The patch rounds them to nearest, subnormal numbers included, and makes `tl.dot`
    multiply their values.
    """
    import triton
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
