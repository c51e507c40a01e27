"""Two pipeline stages, in each the experts over two ranks: torchrun --nproc-per-node 4
examples/recipes/pipeline.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Tiny, batches
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from moesaic import average_gradients, balance_on_step, clip_grad_norm_, set_loss_scale
from moesaic.parallel import parallelize_model, parameter_groups

MICRO_BATCHES = 2


def loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


dist.init_process_group("gloo")
world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
whole = Tiny()
stage = world.get_local_rank("pp")
parts = [
    nn.Sequential(whole.embedding, whole.blocks[0]),
    nn.Sequential(whole.blocks[1], whole.head),
]
model = parts[stage]
mesh = parallelize_model(model, world["ep"])  # the ranks of this stage
set_loss_scale(model, 1.0)  # the schedule divides by the number of micro-batches
pipe = Schedule1F1B(
    PipelineStage(model, stage, 2, torch.device("cpu"), group=world["pp"].get_group()),
    MICRO_BATCHES,
    loss_fn=loss_of,
)
optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
balance_on_step(optimizer, model)
for tokens in batches(mesh.rank, mesh.grid.dp):
    losses: list[Tensor] = []
    if stage == 0:
        pipe.step(tokens[:, :-1])
    else:
        pipe.step(target=tokens, losses=losses)
    average_gradients(model, mesh)
    clip_grad_norm_(model, 1.0, mesh=mesh, group=dist.group.WORLD)  # of both stages
    optimizer.step()
    optimizer.zero_grad()
    loss = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"loss {loss.item() / mesh.grid.dp:.6f}")
dist.destroy_process_group()
