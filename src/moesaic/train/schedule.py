"""torch's pipeline schedules, as runs of ours use them: `train` for models of ours, `finetune` for
those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from moesaic.errors import InputError

AnySchedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B


@dataclass(frozen=True, kw_only=True)
class Route:
    """What micro-batches pass through: this rank's place among the stages, and what is sent between
    two of them."""

    stage: int
    """This rank's stage."""
    stages: int
    """Number of stages."""
    group: dist.ProcessGroup
    """This rank and its peers of the other stages, apart from all other messages."""
    device: torch.device
    """Device of the parts."""
    sent: tuple[int, ...]
    """Shape of what is sent for each sequence."""
    dtype: torch.dtype
    """Dtype of what is sent."""

    def schedule(
        self,
        parts: Sequence[nn.Module],
        tokens: tuple[int, int],
        count: int,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> AnySchedule:
        """Return the schedule of a step. All ranks call this together.

        Args:
            parts: this rank's parts of the model; the ones of all ranks follow each other, one of
                each stage in turn.
            tokens: sequences of a micro-batch, and their length.
            count: micro-batches of a step.
            loss_of: the loss of a micro-batch, (), from what the last part returns and the targets.
        """
        ids = torch.empty(*tokens, dtype=torch.int64, device="meta")
        x = torch.empty(tokens[0], *self.sent, dtype=self.dtype, device="meta", requires_grad=True)
        number = self.stages * len(parts)
        pipeline_stages = [
            PipelineStage(
                part, place, number, self.device, x if place else ids, x, group=self.group
            )
            for place, part in zip(range(self.stage, number, self.stages), parts)
        ]
        if len(pipeline_stages) > 1:
            return ScheduleInterleaved1F1B(
                list(pipeline_stages), count, loss_fn=loss_of, scale_grads=False
            )
        # 1F1B asks for a micro-batch per stage; with fewer, GPipe keeps the same activations
        schedule = Schedule1F1B if count >= self.stages else ScheduleGPipe
        return schedule(pipeline_stages[0], count, loss_fn=loss_of, scale_grads=False)

    def forward(
        self, parts: Sequence[nn.Module], x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
    ) -> Tensor:
        """Run the parts of all stages one after the other. All ranks call this together.

        Args:
            parts: this rank's parts of the model, as for `schedule`.
            x: what the first part reads, (sequences, length) on all ranks.
            run: runs a part.

        Returns:
            what this rank's last part returns.
        """
        sequences = len(x)
        number = self.stages * len(parts)
        for place, part in zip(range(self.stage, number, self.stages), parts):
            if place:
                x = torch.empty(sequences, *self.sent, dtype=self.dtype, device=self.device)
                if x.numel():
                    dist.recv(x, group=self.group, group_src=(self.stage - 1) % self.stages)
            x = run(part, x)
            if place < number - 1 and x.numel():
                dist.send(
                    x.contiguous(), group=self.group, group_dst=(self.stage + 1) % self.stages
                )
        return x


@contextmanager
def as_parts_raise() -> Iterator[None]:
    """Raise the InputError of a part as it is, which torch's schedules wrap."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from error
        raise
