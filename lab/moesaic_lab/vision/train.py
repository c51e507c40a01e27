"""`moesaic vision`: train, fine-tune, probe, time and evaluate an image classifier with MoE layers,
on one or several ranks.

moesaic vision --preset swin-tiny                                        # scikit-learn's digits
torchrun --nproc-per-node 4 -m moesaic vision --preset swin-tiny --ep 2
moesaic vision --preset swinv2-moe-s --images photos \
    --init runs/vision/model.safetensors --freeze-moe
moesaic vision --init runs/vision/model.safetensors --steps 0 \
    --eval-capacity-factor 0.5  # inference
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.cli.arguments import parse
from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.layer import balance_on_step
from moesaic.parallel import clip_grad_norm_, parallelize_layers, parameter_groups, shard_over_data
from moesaic.program.plan import Plan
from moesaic.routing.capacity import Capacity
from moesaic.runtime.data_parallel import average_gradients
from moesaic.train.launch import launch
from moesaic_lab.vision.config import PRESETS, SwinConfig
from moesaic_lab.vision.data import ImageBatches, Images, load_digits, load_folder
from moesaic_lab.vision.swin import SwinMoE

TIMED_STEPS = 10
"""Number of batches over which speed is measured, after the same number to warm up."""


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Model, data, training and ranks."""

    preset: str = "swin-tiny"
    """Model: swin-tiny, swin-tiny-dense, swinv2-s, swinv2-b, swinv2-moe-s or swinv2-moe-b."""
    images: str = ""
    """Folder with a subfolder of pictures per class; by default scikit-learn's digits."""
    out: str = "runs/vision"
    """Folder for the weights and the results."""
    init: str = ""
    """Initial weights of another run, as safetensors. A head with another number of classes is
    initialised anew."""
    steps: int = 1000
    """Optimizer steps; 0 only evaluates."""
    batch_size: int = 64
    """Images per step, over all ranks."""
    lr: float = 3e-3
    """Peak learning rate."""
    seed: int = 0
    """Seed of initialisation and data order."""
    varied: bool = True
    """Rotate, scale and shift training images slightly, differently each time."""
    ffn: Literal["preset", "moe", "dense"] = "preset"
    """Feed-forward layers; dense gives the dense twin with the same active parameters."""
    norm: Literal["preset", "post", "pre"] = "preset"
    """Where blocks normalise: after or before each layer."""
    freeze_moe: bool = False
    """Do not train MoE layers, as in Tutel's fine-tuning."""
    num_experts: int | None = None
    """Experts per layer; this and the next five options default to the preset's value."""
    top_k: int | None = None
    """Experts per token."""
    router: str | None = None
    """Router, as in docs/layer.md."""
    balance_loss: float | None = None
    """Coefficient of the load-balance loss."""
    capacity_factor: float | None = None
    """Capacity factor in training: rows per expert over the mean load."""
    eval_capacity_factor: float | None = None
    """Capacity factor in evaluation."""
    admit_by: Literal["position", "score"] = "position"
    """Which copies a full expert keeps: the first ones, or those with the highest scores
    (batch-prioritised routing)."""
    shots: int = 0
    """Also fit a linear probe on the features of this many images per class."""
    throughput: bool = False
    """Also measure images per second, in training and in inference."""
    ep: int = 1
    """Expert parallelism: ranks over which experts are split."""
    etp: int = 1
    """Expert tensor parallelism: ranks over which each expert's inner width is split."""
    schedule: str = "s1"
    """Schedule of the MoE layers on several ranks."""
    fsdp: bool = True
    """Shard the other parameters over the data-parallel ranks."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise InputError(
                f"preset={self.preset!r} is unknown: choose one of {', '.join(PRESETS)}"
            )
        if self.steps < 0 or self.batch_size < 1 or self.shots < 0 or not self.lr > 0:
            raise InputError(
                "steps and shots must be at least 0, batch-size at least 1, lr above 0"
            )


def run(arguments: Sequence[str]) -> int:
    """Train and evaluate; return the exit code."""
    options = parse(
        VisionOptions, arguments, prog="moesaic vision", description="Train an image classifier."
    )
    place = launch()
    results = train(options, say=print if place.is_first else lambda _: None)
    if place.is_first:
        print(json.dumps(results))
    place.leave()
    return 0


def shape_of(options: VisionOptions, train: Images) -> SwinConfig:
    """Return the preset's configuration with the changes of the options; your own pictures set the
    number of classes."""
    config = PRESETS[options.preset]
    changes: dict[str, Any] = {}
    for name in ("num_experts", "top_k", "router", "balance_loss"):
        value = getattr(options, name)
        if value is not None:
            changes[name] = value
    if options.capacity_factor is not None or options.admit_by == "score":
        changes["capacity"] = Capacity.fixed(options.capacity_factor or 1.0, order=options.admit_by)
    if options.eval_capacity_factor is not None:
        changes["eval_capacity"] = Capacity.fixed(
            options.eval_capacity_factor, order=options.admit_by
        )
    for name in ("ffn", "norm"):
        value = getattr(options, name)
        if value != "preset":
            changes[name] = value
    if options.images:
        changes["num_classes"] = int(train.labels.max()) + 1
    return replace(config, **changes)


def train(options: VisionOptions, say: Any = print) -> dict[str, Any]:
    """Train and evaluate on all ranks of the process group, if any; return the results, identical
    on all ranks.

    Raises:
        InputError: for data, sizes or a mesh that do not fit together.
    """
    size = PRESETS[options.preset].image_size
    channels = PRESETS[options.preset].channels
    if options.images:
        data, held_out = load_folder(Path(options.images), size, channels)
    else:
        data, held_out = load_digits()
    torch.manual_seed(options.seed)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    model = SwinMoE(shape_of(options, data)).to(device)
    if options.init:
        load_weights(model, Path(options.init))
    if options.freeze_moe:
        for layer in model.moe_layers():
            layer.requires_grad_(False)
    total = model.num_parameters()
    active = model.num_active_parameters()
    say(
        f"{options.preset}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active; "
        f"{len(data):,} images"
    )

    mesh = spread(model, options, device)
    part = (0, 1)  # of each batch: (index, number of parts)
    if mesh is not None:
        part = (mesh.grid.coordinate(mesh.rank, "dp"), mesh.grid.dp)
    batches = ImageBatches(data, options.batch_size, options.seed, part, varied=options.varied)
    loss = _steps(model, options, batches, say, mesh)

    results: dict[str, Any] = {"parameters": total, "active": active, "loss": loss}
    logits = _outputs_of(model, held_out.pixels)
    results["val_loss"] = float(F.cross_entropy(logits, held_out.labels))
    is_right = logits.argmax(1) == held_out.labels
    results["accuracy"] = float(is_right.float().mean())
    say(
        f"loss {results['val_loss']:.3f}, accuracy {results['accuracy']:.4f} on "
        f"{len(held_out)} images that were not trained on"
    )
    if options.shots:
        results["probe"] = linear_probe(model, data, held_out, options.shots)
    if options.throughput:
        results |= speed(model, data, options.batch_size // part[1])
    save_weights(model, options, results)
    return results


def spread(model: SwinMoE, options: VisionOptions, device: Literal["cpu", "cuda"]) -> Mesh | None:
    """Parallelise the model over the ranks and return their mesh; None in one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if options.ep * options.etp > 1:
            raise InputError(
                f"ep={options.ep}, etp={options.etp}: this is one process, start with torchrun"
            )
        return None
    mesh = Mesh.create(ep=options.ep, etp=options.etp, device_type=device)
    parallelize_layers(model, mesh, Plan(schedule=options.schedule))
    if options.fsdp:
        shard_over_data(model, mesh, model.blocks)
    return mesh


def _steps(
    model: SwinMoE, options: VisionOptions, batches: ImageBatches, say: Any, mesh: Mesh | None
) -> float | None:
    """Train all steps and return the last loss, averaged over ranks; None for 0 steps."""
    if not options.steps:
        return None
    groups = parameter_groups(model, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, lr=options.lr)
    balance_on_step(optimizer, model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, pct_start=0.1
    )
    device = next(model.parameters()).device
    loss = torch.zeros(())
    for step in range(options.steps):
        pixels, labels = (each.to(device) for each in batches.get(step))
        loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        if mesh is not None and not options.fsdp:
            average_gradients(model, mesh)
        clip_grad_norm_(model, 3.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step + 1 == options.steps:
            say(f"step {step + 1}: loss {loss.item():.3f}")
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


@torch.no_grad()
def _outputs_of(model: nn.Module, pixels: Tensor, size: int = 128) -> Tensor:
    """Return the model's outputs for all images, in evaluation mode, on the CPU. Every rank
    evaluates all images."""
    model.eval()
    device = next(model.parameters()).device
    outputs = []
    for part in pixels.split(size):
        outputs.append(model(part.to(device)).float().cpu())
    model.train()
    return torch.cat(outputs)


@torch.no_grad()
def linear_probe(
    model: SwinMoE, data: Images, held_out: Images, shots: int, ridge: float = 1e-2
) -> float:
    """Return the accuracy of a linear map from features to classes, fitted in closed form on few
    images of each class.

    Args:
        model: the model; features are the inputs of its head.
        data: training images, of which the first `shots` of each class are used.
        held_out: images to evaluate on.
        shots: images per class.
        ridge: penalty on the squared weights, relative to the mean squared norm of the features.
    """
    classes = int(data.labels.max()) + 1
    chosen = []
    for label in range(classes):
        of_class = (data.labels == label).nonzero()
        chosen.append(of_class[:shots, 0])
    few = torch.cat(chosen)
    head = model.head
    model.head = nn.Identity()  # type: ignore[assignment]
    try:
        x = _outputs_of(model, data.pixels[few]).double()
        y = F.one_hot(data.labels[few], classes).double()
        features = _outputs_of(model, held_out.pixels).double()
    finally:
        model.head = head
    mean = x.mean(0)
    x = x - mean
    features = features - mean
    # Ridge regression in its dual form, W = X^T (X X^T + penalty)^-1 Y: few images, many features.
    mean_square = x.square().sum(1).mean()
    penalty = ridge * mean_square * torch.eye(len(x), dtype=x.dtype)
    weights = x.T @ torch.linalg.solve(x @ x.T + penalty, y - y.mean(0))
    scores = features @ weights + y.mean(0)
    is_right = scores.argmax(1) == held_out.labels
    return float(is_right.double().mean())


def speed(model: SwinMoE, data: Images, batch_size: int) -> dict[str, float]:
    """Return images per second of one rank, with and without the backward pass (Tutel's tables 7
    and 11)."""
    device = next(model.parameters()).device
    pixels = data.pixels[:batch_size].to(device)
    rates = {}
    for name in ("train", "infer"):
        model.train(name == "train")
        for timed in (False, True):  # first to warm up
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(TIMED_STEPS):
                with torch.set_grad_enabled(name == "train"):
                    logits = model(pixels)
                if name == "train":
                    logits.float().square().mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if timed:
                rates[f"{name}_images_per_second"] = TIMED_STEPS * len(pixels) / seconds
    model.zero_grad()
    return rates


def load_weights(model: SwinMoE, path: Path) -> None:
    """Load weights into a model that is not sharded; a head of another shape keeps its initial
    weights.

    Raises:
        InputError: if the file is missing or belongs to another model.
    """
    if not path.exists():
        raise InputError(f"init={path}: no such file")
    weights = load_file(path)
    initial = model.state_dict()
    for name in ("head.weight", "head.bias"):
        if name in weights and weights[name].shape != initial[name].shape:
            weights[name] = initial[name]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"init={path}: the weights are of another model ({reason:.200})"
        ) from error


def save_weights(model: SwinMoE, options: VisionOptions, results: dict[str, Any]) -> None:
    """Write weights, results and options into the folder; all ranks must call this, to gather
    sharded weights."""
    unsharded = {}
    for name, tensor in model.state_dict().items():
        unsharded[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if dist.is_initialized() and dist.get_rank():
        return
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in unsharded.items()
    }
    save_file(on_cpu, folder / "model.safetensors")
    content = json.dumps({"options": asdict(options), **results}, indent=2)
    (folder / "results.json").write_text(content + "\n")
