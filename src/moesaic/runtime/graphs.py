"""Calls that `torch.compile` leaves out of its graphs. Importing this file imports torch's compiler, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


@torch.compiler.disable(reason="a MoE layer on a mesh runs programs over connections: compile without fullgraph")
def outside_graphs(function: Callable[..., T], *args: object) -> T:
    """Call a function and return its result, outside of the graphs of `torch.compile`."""
    return function(*args)
