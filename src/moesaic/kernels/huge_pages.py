"""Large tensors on huge pages: on a CPU the page faults of a fresh gradient can cost as much as a
matrix product.

The C allocator returns every freed block above some 32 MiB to the system. Each step's expert
gradients are therefore fresh memory, with one page fault per 4 KiB. Asking for 2 MiB pages makes
that 5 times cheaper (docs/kernels.md has the figures). It needs Linux with transparent huge pages
set to `madvise`, the usual setting; elsewhere nothing changes. A program that calls
`keep_freed_memory()` pays for the page faults only once.
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
"""The least size of a tensor on huge pages; smaller tensors come from memory that the allocator
keeps."""
_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor; large ones on a CPU are on huge pages."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    num_bytes = out.numel() * out.element_size()
    if device.type == "cpu" and num_bytes >= FROM_BYTES:
        advise = _madvise()
        if advise is not None:
            # madvise takes whole pages: the first that starts in the tensor to the last that ends
            # in it
            first_page = (out.data_ptr() + _PAGE_BYTES - 1) // _PAGE_BYTES  # rounded up
            end_page = (out.data_ptr() + num_bytes) // _PAGE_BYTES
            length = (end_page - first_page) * _PAGE_BYTES
            advise(first_page * _PAGE_BYTES, length, _MADV_HUGEPAGE)
    return out


def keep_freed_memory() -> bool:
    """Tell the C allocator to keep memory that this process frees and to reuse it for later
    allocations.

    This affects the whole process: freed memory is not returned to the system, and large tensors,
    such as gradients, cost no page faults from the second step on. A training program calls it
    once, at its start.

    Returns:
        Whether the allocator supports it (glibc does).
    """
    mallopt = _function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is None:
        return False
    # blocks of less than 1 GiB come from the heap, whose free end is given back from 2 GiB on, the
    # most that an int holds; each call returns 1 if it took effect
    keeps_large = mallopt(_M_MMAP_THRESHOLD, 2**30)
    keeps_free = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(keeps_large and keeps_free)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the C library's `madvise`; None if it is missing."""
    return _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _function(name: str, *argtypes: type) -> Callable[..., int] | None:
    """Return a function of the C library that returns an int; None if it is missing or the system
    is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = argtypes
    function.restype = ctypes.c_int
    typed: Callable[..., int] = function
    return typed


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers from the host to a device, without waiting for a GPU."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    # only a copy from pinned memory runs beside the host
    return tensor.pin_memory().to(device, non_blocking=True)
