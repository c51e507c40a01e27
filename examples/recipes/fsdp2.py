"""FSDP2, experts over ep and their copies over the rest: torchrun --nproc-per-node 2
examples/recipes/fsdp2.py"""

import torch
import torch.distributed as dist
from tiny import Tiny, batches

from moesaic import Mesh, balance_on_step, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups

dist.init_process_group("gloo")
model = Tiny()
mesh = parallelize_model(
    model, Mesh.create(ep=2), "auto", fsdp=True
)  # each entry of model.blocks is gathered by itself
optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
balance_on_step(optimizer, model)
for tokens in batches(mesh.rank, mesh.grid.dp):
    loss = model(tokens)
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if mesh.rank == 0:
        print(f"loss {loss.item() / mesh.grid.dp:.6f}")
dist.destroy_process_group()
