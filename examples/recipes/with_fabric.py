"""Lightning Fabric: torchrun --nproc-per-node 2 examples/recipes/with_fabric.py"""

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from tiny import Tiny, batches

from moesaic import Mesh, balance_on_step, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups, prepare_ddp

local, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=local, num_nodes=world // local)
fabric.launch()
tiny = Tiny()
mesh = parallelize_model(tiny, Mesh.create(ep=fabric.world_size), "auto")
prepare_ddp(tiny, mesh)  # before `setup`, which wraps the model by DDP
optimizer = torch.optim.AdamW(parameter_groups(tiny), lr=0.01)
# moving would undo what prepare_ddp set up
model, optimizer = fabric.setup(tiny, optimizer, move_to_device=False)
balance_on_step(optimizer, model)
for tokens in batches(fabric.global_rank, fabric.world_size):
    loss = model(tokens)
    fabric.backward(loss)
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item():.6f}")
dist.destroy_process_group()
