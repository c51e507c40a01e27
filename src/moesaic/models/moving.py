"""A GPT that moves samples between ranks at its MoE layers (sample placement, NetMoE).

Its parameters have the names of `GPT`'s, so both load each other's checkpoints. A relocator decides
where samples go; a trip is the movements of one forward pass, with a move for each MoE layer. A
sample's home is the rank that has it now, and at first the rank that loaded it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, SampleMove, SampleTrip
from moesaic.balance.run.residual import Residual
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.attention import KeyValueCache
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT, GPTOutput, TransformerBlock, detached_routing
from moesaic.routing.routing import Routing


class MovingBlock(TransformerBlock):
    """A block with an MoE layer that may move samples to other ranks, together with their residual
    stream."""

    def forward(
        self,
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
        move: SampleMove | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Run the block, and with a move, send samples on to where the next layer is computed."""
        if move is None:
            return super().forward(x, tokens, mask, cache)
        assert isinstance(self.ffn, MoE)
        x = self.attend(x, cache)
        y, routing = MovingMoE(self.ffn)(
            self.ffn_norm(x),
            move=move,
            residual=Residual(x, self.ffn_norm),
            mask=mask,
            token_ids=tokens,
            return_routing=True,
        )
        # FSDP's hooks are lost if a view is changed in place
        return y.clone(), detached_routing(routing)


class MovingGPT(GPT):
    """A GPT that moves samples between ranks in training. In evaluation ranks may have different
    numbers of samples."""

    block = MovingBlock

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.relocator: Relocator | None = None
        """Decides where samples go; None if each rank keeps its own samples."""

    @property
    def trip(self) -> SampleTrip | None:
        """The sample movements of the current or last training forward pass; None if samples do not
        move."""
        return self.relocator.trip if self.training and self.relocator is not None else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> GPTOutput:
        """Predict the next token at every position; see `GPT.forward`.

        The logits are those of the samples that are on this rank after the last layer.
        """
        if self.training and self.relocator is not None:
            if caches is not None:
                raise InputError(
                    "sample placement clashes with key-value caches, which stay on their "
                    "rank: call model.eval() to decode"
                )
            # What predicts where each layer will route its tokens, by which samples are placed. The
            # order is that of its experts, which may have moved too.
            followings = []
            for block in self.blocks:
                layer = block.ffn
                if isinstance(layer, MoE):
                    order = None if layer.on_mesh is None else layer.on_mesh.order
                    followings.append(Following(layer.router, layer.top_k, order))
            num_samples, length = tokens.shape
            self.relocator.start(followings, num_samples, length)
        return super().forward(tokens, targets, mask=mask, caches=caches)

    def run_block(
        self,
        block: TransformerBlock,
        x: Tensor,
        tokens: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
        **block_arguments: Any,
    ) -> tuple[Tensor, Routing | None]:
        """Run a block on the samples that are currently on this rank; an MoE layer may move them to
        other ranks."""
        trip = self.trip
        if trip is not None and isinstance(block.ffn, MoE):
            assert tokens is not None
            # from the ranks that loaded the samples to those that have them now
            tokens = trip.bring(tokens) if block.ffn.router.needs_token_ids else None
            mask = None if mask is None else trip.bring(mask)
            block_arguments["move"] = trip.next()
        return super().run_block(block, x, tokens, mask, cache, **block_arguments)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy; see `GPT.loss`.

        A moved sample is weighted as in the mean of the rank that loaded it, so the mean over ranks
        does not change.
        """
        trip = self.trip
        # `homes` is where samples are now, `home` where they were loaded
        if trip is None or trip.homes.same_as(trip.home):
            return super().loss(logits, targets)
        precise = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        # targets and weights are on the rank that loaded a sample, and follow it
        num_predicted = (targets != -1).sum().to(precise.dtype)
        weights = trip.bring((1 / num_predicted).expand(len(targets)))
        moved_targets = trip.bring(targets).flatten()
        losses = F.cross_entropy(precise, moved_targets, ignore_index=-1, reduction="none")
        losses_of_samples = losses.view(len(targets), -1).sum(1)
        return (losses_of_samples * weights).sum()
