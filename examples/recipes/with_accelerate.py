"""Accelerate: accelerate launch --cpu --num_processes 2 examples/recipes/with_accelerate.py, or
torchrun."""

import torch
from accelerate import Accelerator
from tiny import Tiny, batches

from moesaic import Mesh, balance_on_step, clip_grad_norm_
from moesaic.parallel import parallelize_model, parameter_groups, prepare_ddp

accelerator = Accelerator(cpu=True)  # starts the process group
tiny = Tiny()
mesh = parallelize_model(tiny, Mesh.create(ep=accelerator.num_processes), "auto")
prepare_ddp(tiny, mesh)  # before `prepare`, which wraps the model by DDP
optimizer = torch.optim.AdamW(parameter_groups(tiny), lr=0.01)
model, optimizer = accelerator.prepare(tiny, optimizer)
balance_on_step(optimizer, model)
for tokens in batches(accelerator.process_index, accelerator.num_processes):
    loss = model(tokens)
    accelerator.backward(loss)
    # in place of accelerator.clip_grad_norm_, which knows no spread experts
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
accelerator.end_training()
