"""Buffers whose precision must not follow the model's: a step of 0.001 on a bias of 0.5 is lost in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class KeepsFloat32(nn.Module):
    """A module whose `float32_buffers` stay float32 under `.bfloat16()`, `.half()` and `.to(dtype)`; devices do follow."""

    float32_buffers: tuple[str, ...] = ()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {name: self.get_buffer(name) for name in self.float32_buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self
