"""How much memory a step holds at once: bytes of all tensors alive, watched operation by operation.

`bench/device_memory.py` counts the same by torch's profiler, which takes a second to start in each of many ranks that
share two cores, and writes on their output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Watches the storages that operations make. What was there before counts nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most bytes that were alive at once."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _tensors((args, kwargs or {})):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive:
                self._known[ref.cdata] = ref  # held, so that nothing new gets its address
        result = function(*args, **(kwargs or {}))
        self._prune()
        for value in _tensors(result):
            ref = StorageWeakRef(value.untyped_storage())
            if ref.cdata not in self._alive and ref.cdata not in self._known:
                self._alive[ref.cdata] = (ref, value.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def _prune(self) -> None:
        """Forget the storages that are gone."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a call had alive at once, beyond those that were there before.

    Bytes that no operation of torch made, as of a library's own buffers, are not counted, for nobody.

    Args:
        call: what is watched, forward and backward of it on the calling thread.
    """
    with Alive() as alive:
        call()
    return alive.peak_bytes


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []
