"""Train a Swin Transformer V2 on 8x8 images of digits, with MoE layers and dense, in turn: accuracy and time per step.

Needs scikit-learn: pip install "./lab[vision]".
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic import balance_on_step
from moesaic_lab.vision.config import PRESETS
from moesaic_lab.vision.data import ImageBatches, Images, load_digits
from moesaic_lab.vision.swin import SwinMoE


class Trainee:
    """A model with its optimizer, and what was seen of it."""

    def __init__(self, model: SwinMoE, steps: int, rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
        balance_on_step(self.optimizer, model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=steps, pct_start=0.1)
        self.seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train on one batch and return its loss."""
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        return loss.item()

    @torch.no_grad()
    def accuracy(self, images: Images) -> float:
        """Return the share of images that are recognised."""
        self.model.eval()
        right = (self.model(images.pixels).argmax(1) == images.labels).float().mean().item()
        self.model.train()
        return right


def main() -> None:
    """Train both, one step each in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of each model")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, val = load_digits()
    batches = ImageBatches(train, arguments.batch_size, arguments.seed)
    config = PRESETS["digits"]
    models = {}
    for name, shape in (("moe", config), ("dense", replace(config, ffn="dense"))):
        torch.manual_seed(arguments.seed)
        models[name] = Trainee(SwinMoE(shape), arguments.steps, arguments.rate)
        model = models[name].model
        print(f"{name:5s}  {model.num_parameters():,} parameters, {model.num_active_parameters():,} of them active")
    for step in range(arguments.steps):
        batch = batches.get(step)
        losses = {name: trainee.step(*batch) for name, trainee in models.items()}
        if step % 50 == 0:
            print(f"step {step:4d}  " + "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    for name, trainee in models.items():
        print(f"{name:5s}  accuracy {trainee.accuracy(val):.4f} on {len(val)} images that were not trained on")
    ratios = torch.tensor(models["moe"].seconds) / torch.tensor(models["dense"].seconds)
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    print(f"a step of moe takes {middle:.2f} times as long as one of dense (quartiles {low:.2f} to {high:.2f})")
    moe = models["moe"].model
    moe(val.pixels)  # in training mode, which counts
    for layer in moe.moe_layers():
        print("tokens per expert:", layer.step_counts.tolist())


if __name__ == "__main__":
    main()
