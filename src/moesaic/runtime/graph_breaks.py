"""Calls that `torch.compile` leaves out of its graphs. Importing this file imports torch's
compiler, which takes seconds."""

from __future__ import annotations

from functools import partial

import torch

outside_graphs = torch.compiler.disable(
    partial.__call__,
    reason="a MoE layer on a mesh runs programs over connections: compile without fullgraph",
)
"""Calls a `partial` and returns its result, outside of the graphs of `torch.compile`."""
