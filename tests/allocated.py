"""Counts the bytes of tensors on a CPU as they are made and freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Counts the bytes of living storages that operations made within it, and the most there were
    at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._read: dict[int, int] = {}
        """By storage that is a part of a file: the bytes that were taken of it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.device.type == "cpu":
                storage = local.untyped_storage()
                if function is torch.ops.aten.set_.source_Storage:
                    self._read[storage._cdata] = storage.nbytes()
                elif function is torch.ops.aten.slice.Tensor and storage._cdata in self._read:
                    # safetensors maps a whole tensor, of which a rank keeps a slice
                    taken = min(self._read[storage._cdata], local.nbytes)
                    self._read[storage._cdata] = taken
                self._note(storage)
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            weakref.finalize(storage, self._set, key, None)
        self._set(key, weakref.ref(storage))
        if self.now > self.most:
            # FSDP2 frees storages by resizing them
            for each, (reference, _) in list(self._known.items()):
                self._set(each, reference)
            self.most = max(self.most, self.now)

    def _set(self, key: int, reference: weakref.ref[torch.UntypedStorage] | None) -> None:
        storage = None if reference is None else reference()
        size = 0
        if storage is None:
            self._read.pop(key, None)
        else:
            size = self._read.get(key, storage.nbytes())
        self.now += size - self._known.pop(key, (None, 0))[1]
        if storage is not None and reference is not None:
            self._known[key] = reference, size
