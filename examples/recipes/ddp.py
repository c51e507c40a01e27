"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/recipes/ddp.py"""

import torch
import torch.distributed as dist
from tiny import Tiny, batches
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moesaic import balance_on_step, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups, prepare_ddp

dist.init_process_group("gloo")
tiny = Tiny()
world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
mesh = parallelize_model(tiny, world)
prepare_ddp(tiny, mesh)  # DDP leaves experts alone; they average themselves
model = DistributedDataParallel(tiny)
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
