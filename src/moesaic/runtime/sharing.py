"""Parameters that the ranks of a tensor group hold alike and use on tokens of their own (Parm's S1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moesaic.comm.collectives import share
from moesaic.comm.transport import AbstractTransport


@contextmanager
def shared_parameters(module: nn.Module, transport: AbstractTransport, group: tuple[int, ...]) -> Iterator[None]:
    """Let a module's parameters be used on different tokens by the ranks of a group: their gradients are summed."""
    held = [(part, name, value) for part in module.modules() for name, value in part._parameters.items()]
    try:
        for part, name, value in held:
            if value is not None and value.requires_grad and torch.is_grad_enabled():
                part._parameters[name] = share(transport, group, value)  # type: ignore[assignment]
        yield
    finally:
        for part, name, value in held:
            part._parameters[name] = value
