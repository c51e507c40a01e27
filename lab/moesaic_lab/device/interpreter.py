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

    Half of the interpreter's time goes into two habits that the patch takes from it: each call of a function inside a kernel
    patches Triton's language anew, and each sum of integers is checked for an overflow by a second one of 64 bits.
    """
    import triton
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    patch_language, numpy_dtype, numpy_dtypes = (
        interpreter._patch_lang,
        interpreter._get_np_dtype,
        {},
    )
    cast, dot = builder.cast_impl, builder.create_dot
    handle, bfloat16, float32 = (
        interpreter.TensorHandle,
        triton.language.bfloat16,
        triton.language.float32,
    )

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

    def patched_once(function: Any) -> Any:
        languages = (triton.language, triton.language.core)
        used = [
            each
            for each in function.__globals__.values()
            if any(each is language for language in languages)
        ]
        if any(triton.language.core.is_builtin(language.load) for language in used):
            return patch_language(function)
        return interpreter._LangPatchScope()

    def cached_numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    interpreter._patch_lang_tensor = patched
    interpreter._patch_lang, interpreter._get_np_dtype = patched_once, cached_numpy_dtype
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    builder.cast_impl = cast_impl
    builder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)
