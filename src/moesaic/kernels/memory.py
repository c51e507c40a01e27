"""Large results on huge pages: on a CPU the first touch of a fresh gradient can cost as much as a matrix product.

An allocator hands every block above some 32 MiB back to the system when it is freed, so each step's expert gradients are
touched for the first time, one page fault per 4 KiB. Asking for 2 MiB pages (Linux, where transparent huge pages are at
`madvise`, the usual setting) makes that 5 times cheaper: docs/kernels.md has the figures. It is advice: where it is not
taken, nothing changes. A program that calls `keep_freed_memory()` once has the cost only once.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21
FROM_BYTES = 4 * HUGE_PAGE_BYTES
"""Smaller tensors come from memory that the allocator keeps."""
_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, on huge pages where it is large and on a CPU."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    num_bytes = out.numel() * out.element_size()
    if device.type == "cpu" and num_bytes >= FROM_BYTES:
        advise = _madvise()
        if advise is not None:
            start = -(-out.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
            advise(start, (out.data_ptr() + num_bytes - start) // _PAGE_BYTES * _PAGE_BYTES, _MADV_HUGEPAGE)
    return out


def keep_freed_memory() -> bool:
    """Tell the C library's allocator to keep what this process frees, for the next allocation of that size.

    It changes the whole process: memory that was used once is not given back to the system, and large tensors, gradients
    above all, cost no page fault from the second step on. A training program calls it once, at its start.

    Returns:
        Whether the allocator took it (glibc does).
    """
    change = _function("mallopt", ctypes.c_int, ctypes.c_int)
    return change is not None and all([change(_M_MMAP_THRESHOLD, 2**30), change(_M_TRIM_THRESHOLD, 2**31 - 1)])


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the C library's function; None where there is none."""
    return _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _function(name: str, *types: type) -> Callable[..., int] | None:
    """Return a function of the C library that returns an int; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    found: Callable[..., int] = function
    return found


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers of the host on a device; the host does not wait for a GPU."""
    there = torch.from_numpy(numbers)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)
