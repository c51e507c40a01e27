"""Your own loop: torchrun --nproc-per-node 2 examples/recipes/loop.py"""

import torch
import torch.distributed as dist
from tiny import Tiny, batches

from moesaic import average_gradients, balance_on_step, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups

dist.init_process_group("gloo")
model = Tiny()
mesh = parallelize_model(model, dist.group.WORLD, "auto")
optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
balance_on_step(optimizer, model)
for tokens in batches(mesh.rank, mesh.grid.dp):
    loss = model(tokens)
    loss.backward()
    average_gradients(model, mesh)
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if mesh.rank == 0:
        print(f"loss {loss.item() / mesh.grid.dp:.6f}")
dist.destroy_process_group()
