"""torch's pipeline schedules, as runs of ours use them: `train` for models of ours, `finetune` for
those of transformers.

A model is cut into consecutive parts, which are dealt to the stages in turn: with two stages of two
parts each, stage 0 has parts 0 and 2.
"""

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
        # examples of a micro-batch, from which torch takes shapes and dtypes alone
        sequences, _ = tokens
        ids = torch.empty(*tokens, dtype=torch.int64, device="meta")
        x = torch.empty(sequences, *self.sent, dtype=self.dtype, device="meta", requires_grad=True)
        num_parts = self.stages * len(parts)
        pipeline_stages = []
        for number, part in self._numbered(parts):
            received = ids if number == 0 else x
            stage = PipelineStage(
                part,
                stage_index=number,
                num_stages=num_parts,  # torch calls each part a stage
                device=self.device,
                input_args=received,
                output_args=x,  # the last part's output differs, but is not sent
                group=self.group,
            )
            pipeline_stages.append(stage)

        if len(pipeline_stages) > 1:
            return ScheduleInterleaved1F1B(
                list(pipeline_stages), count, loss_fn=loss_of, scale_grads=False
            )
        # 1F1B asks for a micro-batch per stage; with fewer, GPipe keeps the same activations
        schedule = Schedule1F1B if count >= self.stages else ScheduleGPipe
        return schedule(pipeline_stages[0], count, loss_fn=loss_of, scale_grads=False)

    def _numbered(self, parts: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
        """Yield this rank's parts, each with its number among the parts of all stages."""
        for turn, part in enumerate(parts):
            yield self.stage + turn * self.stages, part

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
        previous = (self.stage - 1) % self.stages
        following = (self.stage + 1) % self.stages
        last = self.stages * len(parts) - 1
        for number, part in self._numbered(parts):
            if number > 0:
                x = torch.empty(sequences, *self.sent, dtype=self.dtype, device=self.device)
                if x.numel():  # there may be no sequences
                    dist.recv(x, group=self.group, group_src=previous)
            x = run(part, x)
            if number < last and x.numel():
                dist.send(x.contiguous(), group=self.group, group_dst=following)
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
