"""torch.export of a layer with any number of tokens, in one process: python
examples/recipes/export.py

A layer on a mesh talks to other ranks, which no graph holds: export the layer before `parallelize`,
or one that has read the `state_dict()` of it.
"""

import torch
from tiny import DIM

from moesaic import MoE

torch.manual_seed(0)
layer = MoE(DIM, 32, num_experts=8, top_k=2).eval()
tokens = torch.export.Dim("tokens", min=2)
shapes = {"x": {0: tokens}}
rows = (torch.randn(8, DIM),)
program = torch.export.export(layer, rows, dynamic_shapes=shapes, strict=True)
x = torch.randn(21, DIM)
difference = (program.module()(x) - layer(x)).abs().max()
print(f"largest difference {difference:.1e}")
