"""Corrections of Triton's interpreter, which runs kernels on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_the_interpreter() -> None:
    """Patch the interpreter of Triton 3.6 to 3.9 where it differs from a GPU.

    After the patch loop bounds may be tensors; NumPy 2.4 no longer converts an array of one number
    to an int. The interpreter stores bfloat16 as 16-bit integers. The patch rounds them to nearest,
    subnormal numbers included, and makes `tl.dot` multiply their values. A comparison of two
    scalars stays a mask when it is repeated for a block; 3.9 repeats it as integers.

    Half of the interpreter's time goes into two habits that the patch takes from it: each call of a
    function inside a kernel patches Triton's language anew, and each sum of integers is checked for
    an overflow by a second one of 64 bits.
    """
    from triton.runtime import interpreter

    _take_tensors_as_bounds(interpreter)
    _compute_in_bfloat16(interpreter)
    _keep_masks(interpreter)
    _patch_languages_where_needed(interpreter)
    _cache_dtypes(interpreter)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _take_tensors_as_bounds(interpreter: Any) -> None:
    """Let loop bounds be tensors."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _compute_in_bfloat16(interpreter: Any) -> None:
    """Convert between bfloat16 and float32 by value, and multiply bfloat16 as float32."""
    from triton import language

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast = builder.cast_impl
    dot = builder.create_dot
    bfloat16 = language.bfloat16
    float32 = language.float32

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != bfloat16:
            return operand
        # a bfloat16 is the upper half of the float32 of the same value
        bits = operand.data.astype(np.uint32) << 16
        return handle(bits.view(np.float32), float32)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) == (bfloat16, float32):
            return widened(source)
        if (source.dtype.scalar, to.scalar) == (float32, bfloat16):
            values = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            return handle(values.view(torch.int16).numpy().view(np.uint16), bfloat16)
        return cast(self, source, to)

    builder.cast_impl = cast_impl
    builder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)


def _keep_masks(interpreter: Any) -> None:
    """Keep a comparison of two scalars a mask when it is repeated for a block."""
    from triton import language

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    splat = builder.create_splat

    def create_splat(self: Any, to: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            scalar = handle(scalar.data, language.int1)
        return splat(self, to, scalar)

    builder.create_splat = create_splat


def _patch_languages_where_needed(interpreter: Any) -> None:
    """Patch Triton's language for a function inside a kernel only if it is not patched already."""
    from triton import language

    patch = interpreter._patch_lang

    def patched_once(function: Any) -> Any:
        for value in function.__globals__.values():
            is_language = value is language or value is language.core
            # a patch replaces the builtin `load`
            if is_language and language.core.is_builtin(value.load):
                return patch(function)
        return interpreter._LangPatchScope()  # has nothing to restore after the function

    interpreter._patch_lang = patched_once


def _cache_dtypes(interpreter: Any) -> None:
    """Look the NumPy dtype of each of Triton's dtypes up once."""
    convert = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = convert(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_dtype
