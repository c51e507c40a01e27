"""DeepSpeed's engine, ZeRO 0 to 3, with experts on every rank: torchrun --nproc-per-node 2
examples/recipes/with_deepspeed.py

A stage other than 2 is the first argument. Experts stay whole: DeepSpeed's engine does not support
those of `parallelize`.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from tiny import Tiny, batches

from moesaic import LoadBalance, collect_losses

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
model = Tiny()
for block in model.blocks:
    # a mean over sequences, whatever rank they are on
    block.moe.losses = (LoadBalance(0.01, level="sequence"),)
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
rank = dist.get_rank()
ranks = dist.get_world_size()
for tokens in batches(rank, ranks):
    loss = engine(tokens.to(engine.device))
    # DeepSpeed scales and divides the loss that it is given
    engine.backward(loss + sum(collect_losses(model)))
    engine.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"loss {loss.item() / ranks:.6f}", flush=True)
dist.destroy_process_group()
