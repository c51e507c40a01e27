"""A model of transformers in stages: micro-batches flow through the layers of one rank after the
other, by torch's schedules.

The ranks of a stage share its experts and have tokens of their own, as all ranks do without stages.
Ranks at the same place of their stages pass activations on to each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moesaic.finetune.trainer import AdapterTrainer
from moesaic.parallel import clip, gradient_norm
from moesaic.train.ranks import Ranks
from moesaic.train.schedule import Route, as_parts_raise
from moesaic.transformers.in_flight import both


class StagedModel:
    """A causal language model of transformers of which each rank has a stage. All ranks use it
    together.

    Args:
        base: this rank's stage, as `StageCut` leaves it.
        ranks: the ranks, with stages.
        tokens: sequences of a micro-batch, and their length.
        count: micro-batches of a step.
        device: of the stage.
        flies: whether a stage computes a micro-batch's halves in flight.
    """

    def __init__(
        self,
        base: Any,
        ranks: Ranks,
        tokens: tuple[int, int],
        *,
        count: int,
        device: str,
        flies: bool = False,
    ) -> None:
        assert ranks.stages is not None
        self._base = base
        self._ranks = ranks
        self._part = _Part(base, reads_tokens=ranks.stage == 0, flies=flies)
        self._is_last = ranks.stage == ranks.pp - 1
        sequences, length = tokens
        # Tokens with a target in a step of this rank: all but the last one of each sequence.
        self._num_targets = count * sequences * (length - 1)
        self._zero = torch.zeros((), device=device)  # the loss of all stages but the last
        self._route = Route(
            stage=ranks.stage,
            stages=ranks.pp,
            group=ranks.stages["pp"].get_group(),
            device=self._zero.device,
            sent=(length, base.config.get_text_config().hidden_size),  # of each sequence
            dtype=base.dtype,
        )
        self._schedule = self._route.schedule([self._part], tokens, count, self._loss_of)

    def step(self, ids: Tensor) -> Tensor:
        """Add up the gradients of a step's micro-batches.

        Args:
            ids: (sequences, length) of this rank's micro-batches, the same in all stages.

        Returns:
            the mean loss over all ranks' tokens, ().
        """
        losses: list[Tensor] = []  # the schedule adds each micro-batch's part of the mean
        # only the first stage reads tokens, and only the last one compares them with targets
        inputs = (ids,) if self._ranks.stage == 0 else ()
        ends: dict[str, Any] = {"target": ids, "losses": losses} if self._is_last else {}
        with as_parts_raise():
            self._schedule.step(*inputs, return_outputs=False, **ends)
        loss = torch.stack(losses).sum().detach().float() if losses else self._zero
        return self._ranks.mean(loss)  # over the ranks of the last stage; all get it

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of sequences on ranks of the last stage; on others what these pass on.

        Args:
            ids: (sequences, length), the same on all ranks that pass activations to each other.
        """
        _, width = self._route.sent
        route = replace(self._route, sent=(ids.shape[1], width))
        return route.forward([self._part], ids, lambda part, x: part(x))

    def logits_on_first(self, ids: Tensor) -> Tensor:
        """Return the logits of sequences, (sequences, length), on the first rank."""
        logits = self.logits(ids)
        first_of_last_stage = (self._ranks.pp - 1) * (self._ranks.world // self._ranks.pp)
        if self._ranks.rank == first_of_last_stage:
            dist.send(logits.float().cpu(), dst=0)
        elif self._ranks.is_first:
            logits = torch.empty(*ids.shape, self._vocab_size)
            dist.recv(logits, src=first_of_last_stage)
        return logits

    @torch.no_grad()
    def loss(self, ids: Tensor) -> float:
        """Return the mean loss of sequences, (sequences, length), on all ranks."""
        logits = self.logits(ids)
        loss = self._zero
        if self._is_last:
            loss = self._base.loss_function(
                logits=logits, labels=ids, vocab_size=self._vocab_size
            ).float()
        return float(self._ranks.mean(loss))

    def clip(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients of all stages so that their norm together is at most `limit`; return
        the norm before, ()."""
        norm = gradient_norm(parameters, mesh=self._ranks.mesh, group=dist.group.WORLD)
        clip(parameters, norm, limit)
        return norm

    def _loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a micro-batch's part of the step's mean loss, ()."""
        loss: Tensor = self._base.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=self._vocab_size,
            num_items_in_batch=self._num_targets,
        )
        return loss

    @property
    def _vocab_size(self) -> int:
        """Number of token ids."""
        size: int = self._base.config.get_text_config().vocab_size
        return size


class _Part(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, base: Any, *, reads_tokens: bool, flies: bool) -> None:
        super().__init__()
        self._flies = flies
        # the argument by which the model takes what the stage gets
        self._name = "input_ids" if reads_tokens else "inputs_embeds"
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, or what the next stage gets, (sequences, length, width)."""
        if self._flies and torch.is_grad_enabled():  # two halves of the sequences in flight
            return torch.cat(both(self._run, x.chunk(2)))
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        """Return what the stage computes of some sequences; without a head, its hidden states stand
        for logits."""
        found: Tensor = self.base(**{self._name: x}, use_cache=False).logits
        return found


class StagedTrainer(AdapterTrainer):
    """transformers' Trainer over a staged model: a batch of its loader has all micro-batches of a
    step."""

    staged: StagedModel
    ranks: Ranks

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # else it would put the stage into DDP
        self.is_distributed_loading_by_transformers = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the sequences of this rank, which are those of its peers in the other stages."""
        dataset: Any = self.train_dataset
        loader = DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(dataset),
            collate_fn=self.data_collator,
        )
        accelerator = self.accelerator
        per_stage = self.ranks.world // self.ranks.pp
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=per_stage,
            process_index=self.ranks.rank % per_stage,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )
        return prepared

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the micro-batches of a step through all stages; return their mean loss, ()."""
        model.train()
        return self.staged.step(self._prepare_inputs(inputs)["input_ids"])

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Clip by the norm of the gradients of all stages."""
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.staged.clip(own, self.args.max_grad_norm)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Do nothing: stages have different adapters, and those of a stage are kept alike."""
