"""Pipeline parallelism of our models: each rank has some of the blocks, and micro-batches flow through torch's
schedules.

The ranks of a stage share its blocks as the ranks of a run without stages share the model: experts over ep and etp,
attention over tp, all over dp. A step has `accumulation` micro-batches, so a run with stages computes the same as one
process with the same settings. If the embedding is tied to the output matrix, the first and the last stage have a copy
each, and the gradients of both copies are added before each optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.gpt import GPT, GPTOutput, embed, token_loss
from moesaic.models.split import local_part, unembed
from moesaic.parallel import gradient_norm
from moesaic.routing.routing import Routing
from moesaic.runtime.routing_cache import checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.machine import autocast


class Part(nn.Module):
    """Consecutive blocks of a GPT. The first part also embeds the tokens, and the last one also returns logits.

    Args:
        whole: the full model; the part shares its modules.
        index: which of the parts this is.
        count: number of parts.
        dtype: autocast dtype.
    """

    def __init__(self, whole: GPT, index: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == count - 1
        self.config, self.dtype = whole.config, dtype
        if self.is_first or (self.is_last and whole.unembedding is None):
            self.embedding = whole.embedding
        if self.is_first:
            self.positions, self.embedding_norm = whole.positions, whole.embedding_norm
        layers = len(whole.blocks)
        numbers = range(layers * index // count, layers * (index + 1) // count)
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in numbers})
        if self.is_last:
            self.norm, self.unembedding = whole.norm, whole.unembedding
        self.routings: list[list[Routing]] = []
        """Routings of the forward passes since the list was last cleared: one per MoE layer, without logits."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Run the part on a micro-batch.

        Args:
            x: tokens (batch, positions) for the first part, else the previous part's output.
            tokens: (batch, positions) int64.

        Returns:
            (batch, positions, dim), or logits (batch, positions, vocab_size) for the last part.
        """
        self.routings.append([])
        with autocast(tokens.device, self.dtype):
            x = embed(self, x) if self.is_first else x
            for block in self.blocks.values():
                recomputes = self.config.checkpoint_activations and torch.is_grad_enabled()
                run = partial(checkpoint, block) if recomputes else block
                x, routing = run(x, tokens, None, None)
                self.routings[-1] += [] if routing is None else [routing]
            if not self.is_last:
                return x
            return unembed(self.norm(x), (self.unembedding or self.embedding).weight)


class PipelinedGPT(nn.Module):
    """This rank's parts of a GPT in pipeline stages, with parameters under the names of the full model.

    Args:
        whole: the full model, identical on all ranks and not yet split.
        config: the run's configuration, which has several stages.
        stages: the ranks as a mesh with the axes ("pp", "stage").
        dp: number of data-parallel groups per stage.
        dtype: autocast dtype.
        device: the device that the model will be on; `whole` may be on the meta device.
    """

    def __init__(
        self,
        whole: GPT,
        config: TrainConfig,
        stages: DeviceMesh,
        dp: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = whole.config
        self.names = frozenset(whole.state_dict())
        """Names of the full model's tensors, as in checkpoints."""
        self._sizes = whole.num_parameters(), whole.num_active_parameters()
        self.stages, self.stage, self.pp = stages, stages.get_local_rank("pp"), stages.size(0)
        count = self.pp * config.mesh.parts_per_stage
        numbers = range(self.stage, count, self.pp)
        self.parts = [Part(whole, number, count, dtype) for number in numbers]
        self.blocks = nn.ModuleDict(
            {name: block for part in self.parts for name, block in part.blocks.items()}
        )
        self.is_tied = whole.unembedding is None
        if self.stage == 0:
            self.positions, self.embedding_norm = whole.positions, whole.embedding_norm
        if self.stage == 0 or (self.stage == self.pp - 1 and self.is_tied):
            self.embedding = whole.embedding
        if self.stage == self.pp - 1:
            self.norm, self.unembedding = whole.norm, whole.unembedding
        sparse = [name for name, block in enumerate(whole.blocks) if isinstance(block.ffn, MoE)]
        self.layers = [place for place, name in enumerate(sparse) if str(name) in self.blocks]
        """Numbers of the full model's MoE layers on this rank."""
        self.num_sparse = len(sparse)
        """Number of MoE layers of the full model."""
        length = config.model.seq_len // (config.mesh.tp if config.mesh.sequence_parallel else 1)
        self._activation_shape = length, config.model.dim
        self._zero = torch.zeros((), dtype=whole.embedding.weight.dtype, device=device)
        self._schedule = self._make_schedule(
            config, [(number, count) for number in numbers], config.batch_size // dp
        )

    def _make_schedule(
        self, config: TrainConfig, places: Sequence[tuple[int, int]], rows: int
    ) -> Schedule1F1B | ScheduleInterleaved1F1B:
        tokens = torch.empty(rows, config.model.seq_len, dtype=torch.int64, device="meta")
        x = torch.empty(
            rows, *self._activation_shape, dtype=self._zero.dtype, device="meta", requires_grad=True
        )
        device, group = self._zero.device, self.stages["pp"].get_group()
        pipeline_stages = [
            PipelineStage(part, *place, device, tokens if part.is_first else x, x, group=group)
            for place, part in zip(places, self.parts)
        ]
        micro = config.accumulation

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return token_loss(logits, targets) / micro

        if len(pipeline_stages) > 1:
            return ScheduleInterleaved1F1B(
                list(pipeline_stages), micro, loss_fn=loss_of, scale_grads=False
            )
        return Schedule1F1B(pipeline_stages[0], micro, loss_fn=loss_of, scale_grads=False)

    def run_step(
        self, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[list[Routing]]]:
        """Add up the gradients of a step's micro-batches.

        Args:
            batches: `accumulation` pairs of tokens and targets, on the device.

        Returns:
            the mean loss of the micro-batches, (), which is 0 on ranks without the last part; and for each micro-batch
                the routings of this rank's MoE layers.

        Raises:
            InputError: if a layer raised it.
        """
        tokens, targets = (torch.cat(tensors) for tensors in zip(*batches))
        losses: list[Tensor] = []
        ends: dict[str, Any] = (
            {"target": targets, "losses": losses} if self.stage == self.pp - 1 else {}
        )
        self._clear_routings()
        try:
            inputs = (tokens,) if self.stage == 0 else ()
            self._schedule.step(*inputs, tokens=tokens, return_outputs=False, **ends)
        except RuntimeError as error:  # torch wraps what a stage raises
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from error
            raise
        self._add_embeddings()
        loss = torch.stack(losses).sum().detach() if losses else self._zero
        routings = zip(*(part.routings for part in self.parts))
        return loss, [
            [routing for of_part in of_parts for routing in of_part] for of_parts in routings
        ]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Evaluate the full model, stage after stage. All ranks call it together.

        Args:
            tokens: (batch, positions) int64.
            targets: (batch, positions) int64.

        Returns:
            logits and loss on ranks with the last part, else an empty tensor and 0; and the routings of this rank's MoE
                layers.
        """
        self._clear_routings()
        group, x = self.stages["pp"].get_group(), tokens
        for part in self.parts:
            if not part.is_first:
                x = torch.empty(
                    len(tokens),
                    *self._activation_shape,
                    dtype=self._zero.dtype,
                    device=tokens.device,
                )
                if x.numel():
                    dist.recv(x, group=group, group_src=(self.stage - 1) % self.pp)
            x = part(x, tokens)
            if not part.is_last and x.numel():
                dist.send(x.contiguous(), group=group, group_dst=(self.stage + 1) % self.pp)
        routings = [routing for part in self.parts for routing in part.routings[0]]
        if not self.parts[-1].is_last:
            return GPTOutput(x.new_empty(0), None if targets is None else self._zero, routings)
        return GPTOutput(x, None if targets is None else token_loss(x, targets), routings)

    def gradient_norm(self, mesh: Mesh) -> Tensor:
        """Return the norm of the full model's gradient, counting the embedding once. All ranks call it together."""
        copies = {self.embedding.weight} if self.stage == self.pp - 1 and self.is_tied else set()
        own = [parameter for parameter in self.parameters() if parameter not in copies]
        return gradient_norm(own, mesh=mesh, group=dist.group.WORLD)

    def num_parameters(self) -> int:
        """Return the number of parameters of the full model."""
        return self._sizes[0]

    def num_active_parameters(self) -> int:
        """Return how many of the full model's parameters one token uses."""
        return self._sizes[1]

    def _clear_routings(self) -> None:
        for part in self.parts:
            part.routings = []

    def _add_embeddings(self) -> None:
        """Add the gradients of the two copies of a tied embedding, on the ranks of both."""
        if self.stage not in (0, self.pp - 1) or not self.is_tied:
            return
        weight = self.embedding.weight  # a lookup in a split vocabulary has a partial gradient
        assert weight.grad is not None
        if isinstance(weight.grad, DTensor) and isinstance(weight, DTensor):
            weight.grad = weight.grad.redistribute(weight.device_mesh, weight.placements)
        gradient = local_part(weight.grad)
        if not gradient.numel():
            return
        received, group = torch.empty_like(gradient), self.stages["pp"].get_group()
        peer = self.pp - 1 if self.stage == 0 else 0
        moves = [
            dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for move in dist.batch_isend_irecv(moves):
            move.wait()
        gradient += received
