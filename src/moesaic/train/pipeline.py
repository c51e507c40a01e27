"""Pipeline parallelism of our models: each rank has some of the blocks, and micro-batches flow
through torch's schedules.

The ranks of a stage share its blocks as the ranks of a run without stages share the model: experts
over ep and etp, attention over tp, all over dp. A step has `accumulation` micro-batches, so a run
with stages computes the same as one process with the same settings. If the embedding is tied to the
output matrix, the first and the last stage have a copy each, and the gradients of both copies are
added before each optimizer step.

A part is a run of consecutive blocks. Parts are dealt to the stages in turn: with two stages of two
parts each, stage 0 has parts 0 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.gpt import GPT, GPTOutput, embed, token_loss
from moesaic.models.parts import cut_model
from moesaic.models.split import local_part, unembed
from moesaic.parallel import Held, gradient_norm, step_switches
from moesaic.routing.routing import Routing
from moesaic.runtime.routing_cache import checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.launch import is_of_lost_message
from moesaic.train.machine import autocast
from moesaic.train.ranks import Ranks
from moesaic.train.schedule import AnySchedule, Route, as_parts_raise

Observe = Callable[[int], AbstractContextManager[object]]
"""Returns the context of a micro-batch's forward pass, from the micro-batch's number."""


def _unobserved(_: int) -> AbstractContextManager[object]:
    return nullcontext()


class Part(nn.Module):
    """Consecutive blocks of a GPT. The first part also embeds the tokens, and the last one also
    returns logits.

    Args:
        whole: the full model; the part shares its modules.
        index: which of the parts this is.
        count: number of parts.
        blocks: numbers of its blocks.
        dtype: autocast dtype.
        sent: dtype in which activations and their gradients are sent between parts; None for that
            of the activations.
    """

    def __init__(
        self,
        whole: GPT,
        index: int,
        count: int,
        *,
        blocks: range,
        dtype: torch.dtype,
        sent: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.sent = sent
        self.config = whole.config
        self.dtype = dtype
        if self.is_first or (self.is_last and whole.unembedding is None):
            self.embedding = whole.embedding
        if self.is_first:
            self.positions = whole.positions
            self.embedding_norm = whole.embedding_norm
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in blocks})
        if self.is_last:
            self.norm = whole.norm
            self.unembedding = whole.unembedding
        self.routings: list[list[Routing]] = []
        """Routings of the forward passes since the list was last cleared: one per MoE layer,
        without logits."""
        self.observe: Observe = _unobserved
        """Returns the context of a micro-batch's forward pass, from its number."""
        self.refusal: InputError | None = None
        """The error that a layer raised. No block runs after it, but messages go on, so that other
        stages do not wait for this one."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Run the part on a micro-batch.

        Args:
            x: tokens (batch, positions) for the first part, else the previous part's output.
            tokens: (batch, positions) int64.

        Returns:
            (batch, positions, dim), or logits (batch, positions, vocab_size) for the last part.
        """
        micro = len(self.routings)  # number of the micro-batch: each has added its list before
        self.routings.append([])
        with self.observe(micro), autocast(tokens.device, self.dtype):
            if self.is_first:
                x = embed(self, x)
            elif self.sent is not None:  # back to the dtype of activations between blocks
                x = x.to(next(self.parameters()).dtype)
            try:
                x = self._run_blocks(x, tokens)
            except InputError as error:
                if is_of_lost_message(error):
                    raise
                self.refusal = error
            if not self.is_last:
                return x if self.sent is None else x.to(self.sent)
            return unembed(self.norm(x), (self.unembedding or self.embedding).weight)

    def _run_blocks(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Run the blocks and add their routings to those of this pass; after a refusal, return `x`
        as it is."""
        if self.refusal is not None:
            return x
        recomputes = self.config.checkpoint_activations and torch.is_grad_enabled()
        for block in self.blocks.values():
            run = partial(checkpoint, block) if recomputes else block
            x, routing = run(x, tokens, None, None)  # no mask, no cache
            if routing is not None:
                self.routings[-1].append(routing)
        return x


def parts_of(whole: GPT, config: TrainConfig, stage: int, dtype: torch.dtype) -> list[Part]:
    """Return the parts of a model that a pipeline stage has.

    Args:
        whole: the full model.
        config: the run's configuration.
        stage: the stage's number.
        dtype: autocast dtype.
    """
    count = config.mesh.pp * config.mesh.parts_per_stage
    sent = torch.bfloat16 if config.mesh.stage_precision == "bfloat16" else None
    cuts = cut_model(whole, count)
    return [
        Part(whole, number, count, blocks=cuts[number], dtype=dtype, sent=sent)
        for number in range(stage, count, config.mesh.pp)
    ]


class PipelinedGPT(nn.Module):
    """This rank's parts of a GPT in pipeline stages, with parameters under the names of the full
    model.

    Args:
        whole: the full model, identical on all ranks and not yet split.
        config: the run's configuration, which has several stages.
        stages: the ranks as a mesh with the axes ("pp", "stage").
        dp: number of data-parallel groups per stage.
        dtype: autocast dtype.
        device: the device that the model will be on; `whole` may be on the meta device.
        hold: what each rank holds whole between micro-batches. Gradients always are: torch's
            schedules reduce them after the last one.
    """

    def __init__(
        self,
        whole: GPT,
        config: TrainConfig,
        stages: DeviceMesh,
        dp: int,
        dtype: torch.dtype,
        device: torch.device,
        hold: Held = "gradients",
    ) -> None:
        super().__init__()
        self.hold = hold
        self.config = whole.config
        self.names = frozenset(whole.state_dict())
        """Names of the full model's tensors, as in checkpoints."""
        self._num_parameters = whole.num_parameters()
        self._num_active_parameters = whole.num_active_parameters()
        self.stages = stages
        self.stage = stages.get_local_rank("pp")
        self.pp = stages.size(0)
        self.parts = parts_of(whole, config, self.stage, dtype)
        """The parts of this rank's stage, in their order in the model."""

        # modules under their names in the full model
        self.blocks = nn.ModuleDict()
        for part in self.parts:
            for name, block in part.blocks.items():
                self.blocks[name] = block
        self.is_tied = whole.unembedding is None
        """Whether the embedding is the output matrix too, of which two stages then have copies."""
        is_last = self.stage == self.pp - 1
        if self.stage == 0:
            self.positions = whole.positions
            self.embedding_norm = whole.embedding_norm
        if self.stage == 0 or (is_last and self.is_tied):
            self.embedding = whole.embedding
        if is_last:
            self.norm = whole.norm
            self.unembedding = whole.unembedding

        # names of the blocks with an MoE layer, in the full model
        sparse = [
            str(name) for name, block in enumerate(whole.blocks) if isinstance(block.ffn, MoE)
        ]
        self.layers = [number for number, name in enumerate(sparse) if name in self.blocks]
        """Which of the full model's MoE layers this rank has, counted from 0."""
        # the loss on ranks without the last part; also says the dtype and device of activations
        self._zero = torch.zeros((), dtype=whole.embedding.weight.dtype, device=device)
        # apart from all other messages; tied embeddings and evaluations pass through it too
        self._group = stages["pp"].get_group()
        self._schedule, self._route = self._make_schedule(config, dp)

    def _make_schedule(self, config: TrainConfig, dp: int) -> tuple[AnySchedule, Route]:
        """Return the schedule of a step's micro-batches, and the route that they take."""
        seq_len = config.model.seq_len
        # positions of a sequence that a rank sends
        length = seq_len // config.mesh.tp if config.mesh.sequence_parallel else seq_len
        route = Route(
            stage=self.stage,
            stages=self.pp,
            group=self._group,
            device=self._zero.device,
            sent=(length, config.model.dim),
            dtype=self.parts[0].sent or self._zero.dtype,  # all parts send alike
        )
        count = config.accumulation
        shape = (config.batch_size // dp, seq_len)  # of a micro-batch's tokens

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            """Return a micro-batch's part of the step's loss."""
            return token_loss(logits, targets) / count

        return route.schedule(self.parts, tokens=shape, count=count, loss_of=loss_of), route

    def run_step(
        self, batches: Sequence[tuple[Tensor, Tensor]], observe: Observe | None = None
    ) -> tuple[Tensor, list[list[Routing]]]:
        """Add up the gradients of a step's micro-batches.

        Args:
            batches: `accumulation` pairs of tokens and targets, on the device.
            observe: returns a context for the forward pass of a micro-batch, from its number; a
                rank enters it once for each of its parts.

        Returns:
            the mean loss of the micro-batches, (), which is 0 on ranks without the last part; and
            for each micro-batch the routings of this rank's MoE layers. `agreed` takes the loss.

        Raises:
            InputError: if a message of a layer did not come.
        """
        tokens = torch.cat([tokens for tokens, _ in batches])  # the schedule cuts them again
        targets = torch.cat([targets for _, targets in batches])
        losses: list[Tensor] = []  # of each micro-batch; the schedule of the last stage fills it
        last_stage_arguments: dict[str, Any] = {}
        if self.stage == self.pp - 1:
            last_stage_arguments = {"target": targets, "losses": losses}
        self._clear_routings()
        for part in self.parts:
            part.observe = observe or _unobserved
        try:
            # what the first part reads; every part also gets the tokens by name
            inputs = (tokens,) if self.stage == 0 else ()
            # torch's schedules reduce the gradients of FSDP2 once a step; replicas follow after it
            with (
                as_parts_raise(),
                step_switches(self.parts, keeps=self.hold == "parameters") as switches,
            ):
                for replicas in switches.replicas:
                    replicas.averages = False  # not in each backward pass, but once below
                self._schedule.step(
                    *inputs, tokens=tokens, return_outputs=False, **last_stage_arguments
                )
            for replicas in switches.replicas:
                replicas.average()
        finally:
            for part in self.parts:
                part.observe = _unobserved
        self._add_embeddings()

        # each loss is divided by the number of micro-batches already
        loss = torch.stack(losses).sum().detach() if losses else self._zero
        routings: list[list[Routing]] = []
        for micro in range(len(self.parts[0].routings)):
            routings.append([])
            for part in self.parts:
                routings[micro].extend(part.routings[micro])
        return loss, routings

    def agreed(self, loss: Tensor, ranks: Ranks) -> Tensor:
        """Return the mean of a loss over the data-parallel groups. All ranks call it together,
        after their steps or evaluations.

        Raises:
            InputError: on every rank, if a layer of any stage raised it.
        """
        refusals = [part.refusal for part in self.parts if part.refusal is not None]
        # one message for both: the loss, and how many parts refused
        num_refusals = torch.full_like(loss, len(refusals))
        mean, mean_refusals = ranks.mean(torch.stack([loss, num_refusals]))
        if mean_refusals:  # not 0 if any part of any rank refused
            with ranks.together():
                if refusals:
                    raise refusals[0]
        return mean

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Evaluate the full model, stage after stage. All ranks call it together; `agreed` takes
        the loss.

        Args:
            tokens: (batch, positions) int64.
            targets: (batch, positions) int64.

        Returns:
            logits and loss on ranks with the last part, else an empty tensor and 0; and the
            routings of this rank's MoE layers. Without targets the loss is None.
        """
        self._clear_routings()
        x = self._route.forward(self.parts, tokens, lambda part, x: part(x, tokens))
        routings: list[Routing] = []
        for part in self.parts:
            routings += part.routings[0]
        is_last = self.parts[-1].is_last
        logits = x if is_last else x.new_empty(0)
        loss = None
        if targets is not None:
            loss = token_loss(logits, targets) if is_last else self._zero
        return GPTOutput(logits, loss, routings)

    def gradient_norm(self, mesh: Mesh) -> Tensor:
        """Return the norm of the full model's gradient, counting the embedding once. All ranks call
        it together."""
        # the last stage's copy of a tied embedding is not counted
        copies = {self.embedding.weight} if self.stage == self.pp - 1 and self.is_tied else set()
        own = [parameter for parameter in self.parameters() if parameter not in copies]
        return gradient_norm(own, mesh=mesh, group=dist.group.WORLD)

    def num_parameters(self) -> int:
        """Return the number of parameters of the full model."""
        return self._num_parameters

    def num_active_parameters(self) -> int:
        """Return how many of the full model's parameters one token uses."""
        return self._num_active_parameters

    def _clear_routings(self) -> None:
        for part in self.parts:
            part.routings = []

    def _add_embeddings(self) -> None:
        """Add the gradients of the two copies of a tied embedding, on the ranks of both."""
        if self.stage not in (0, self.pp - 1) or not self.is_tied:
            return
        weight = self.embedding.weight
        assert weight.grad is not None
        if isinstance(weight.grad, DTensor) and isinstance(weight, DTensor):
            # a lookup in a vocabulary that is split over ranks has a gradient of partial sums
            weight.grad = weight.grad.redistribute(weight.device_mesh, weight.placements)
        gradient = local_part(weight.grad)
        if not gradient.numel():  # this rank has no rows
            return
        received = torch.empty_like(gradient)
        group = self._group
        peer = self.pp - 1 if self.stage == 0 else 0
        moves = [
            dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for move in dist.batch_isend_irecv(moves):
            move.wait()
        gradient += received  # in place, so in `weight.grad`
