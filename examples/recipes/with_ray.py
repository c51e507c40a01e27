"""Ray Train, two workers that share the experts: python examples/recipes/with_ray.py"""

import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict) -> list[float]:
    """Train on one worker and return the losses; Ray has started torch's process group."""
    sys.path.append(config["folder"])
    from tiny import Tiny, batches

    from moesaic import average_gradients, balance_on_step, clip_grad_norm_
    from moesaic.parallel import parallelize_model, parameter_groups

    model = Tiny()
    mesh = parallelize_model(model, dist.group.WORLD, "auto")
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    balance_on_step(optimizer, model)
    losses = []
    for tokens in batches(mesh.rank, mesh.grid.dp):
        loss = model(tokens)
        loss.backward()
        average_gradients(model, mesh)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / mesh.grid.dp)
    return losses


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(Path(__file__).parent)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    for loss in trainer.fit().return_value:
        print(f"loss {loss:.6f}")
    ray.shutdown()
