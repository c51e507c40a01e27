"""What runs on the ranks of a bed: training under a split, a profile of the bed, and the search for
a split."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic.configfile import as_toml
from moesaic.layer import MoE
from moesaic.measure.host import BalancedRouter
from moesaic.measure.profile import measure as profile
from moesaic.models.gpt import GPT, TransformerBlock
from moesaic.train.auto_plan import with_planned
from moesaic.train.config import PlannerConfig, TrainConfig
from moesaic.train.loop import train
from moesaic.train.metrics import read_metrics
from moesaic.train.task import DECODER, make_decoder
from moesaic_lab.training import steps_of
from moesaic_lab.virtual import Accelerator, VirtualAttention, virtual_experts
from moesaic_testbed.wiring import NODE_DEVICE


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """The end of an optimizer step on a rank."""

    at: float
    """Seconds on the clock that all processes share."""
    sent_bytes: int
    """Bytes that the node's device has sent so far."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a rank trained."""

    first_seconds: float
    """Seconds of the first step, on the slowest rank."""
    ends: tuple[StepEnd, ...]
    """The ends of its steps; one if the first step took too long."""
    loss: float | None
    """The last loss; None if it was not reached."""


class _TooSlowError(Exception):
    """The first step took too long."""


class _Watch:
    """Notes the ends of steps, and ends training after a first step that is too slow, on all ranks
    at once.

    Args:
        most_seconds: most seconds of the first step.
    """

    def __init__(self, most_seconds: float) -> None:
        self.ends: list[StepEnd] = []
        self.first_seconds = 0.0
        self._most_seconds = most_seconds
        self._began = 0.0

    def begin(self, *_: object) -> None:
        """Note the first call of any module in training."""
        self._began = self._began or time.monotonic()

    def end(self, *_: object) -> None:
        """Note the end of a step."""
        self.ends.append(StepEnd(at=time.monotonic(), sent_bytes=_sent_bytes()))
        if len(self.ends) > 1:
            return
        # the last end minus the first beginning: the largest of the negative ones is the first
        span = torch.tensor([self.ends[0].at, -self._began], dtype=torch.float64)
        dist.all_reduce(span, dist.ReduceOp.MAX)
        self.first_seconds = float(span.sum())
        if self.first_seconds > self._most_seconds:
            raise _TooSlowError


def train_on_rank(config: TrainConfig, gflops: float | None, most_seconds: float) -> Trained:
    """Train on this rank.

    Args:
        gflops: speed of a virtual accelerator; None to compute.
        most_seconds: a first step that takes longer is the only one.
    """
    task = DECODER
    if gflops is not None:
        accelerator = Accelerator(flops_per_second=1e9 * gflops)
        task = replace(task, make_model=partial(virtual_model, accelerator))
    watch = _Watch(most_seconds)
    hooks = [
        register_module_forward_pre_hook(watch.begin),
        register_optimizer_step_post_hook(watch.end),
    ]
    loss: float | None = None
    try:
        train(config, console=Console(quiet=True), task=task)
        if dist.get_rank() == 0:
            loss = steps_of(read_metrics(Path(config.out)))[-1]["loss"]
    except _TooSlowError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return Trained(first_seconds=watch.first_seconds, ends=tuple(watch.ends), loss=loss)


def virtual_model(accelerator: Accelerator, config: TrainConfig, vocab_size: int) -> GPT:
    """Return a model of the same sizes whose attention and experts only take their time, and whose
    routing is even."""
    model = make_decoder(config, vocab_size)
    sizes = config.model
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        block.attention = VirtualAttention(accelerator, sizes.dim, sizes.num_heads, sizes.block)
        block.ffn = MoE(
            sizes.dim,
            sizes.moe.hidden * 3 // 2,  # two matrices in place of three
            sizes.moe.num_experts,
            sizes.moe.top_k,
            router=BalancedRouter,
            experts=virtual_experts(accelerator),
            losses=(),
        )
    return model


def _sent_bytes() -> int:
    """Return the bytes that this process's node has sent to others."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == NODE_DEVICE:
            sent_bytes = counts.split()[8]  # after the eight counts of what was received
            return int(sent_bytes)
    raise RuntimeError(f"no device {NODE_DEVICE}: this is no rank of a bed")


def profile_on_rank(ranks_per_node: int, repeats: int) -> str:
    """Profile the bed, without showing progress; return the profile as `moesaic profile` writes
    it."""
    found = profile(ranks_per_node, repeats, ("fp32",), lambda what, share: None)
    return as_toml(found.cluster)


def search_on_rank(config: TrainConfig, profile_text: str) -> dict[str, Any]:
    """Let `planner.plan=search` choose the split of a run from a profile; return the configuration
    as plain data."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(profile_text, encoding="utf-8")
        planner = PlannerConfig(plan="search", cluster=str(path))
        found = with_planned(replace(config, planner=planner))
    return asdict(replace(found, planner=PlannerConfig()))
