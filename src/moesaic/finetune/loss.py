"""Computes logits and their cross entropy for a few tokens at a time, and again in backward.

A large vocabulary's logits need more memory than a rank's part of a model in NF4: 12 bytes for each
of the vocabulary and each token, 7 GiB for 4,096 tokens of 151,936.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.planner.finetune import LOSS_TOKENS


def loss_in_parts(
    model: Any,
    ids: Tensor,
    tokens: int = LOSS_TOKENS,
    loss_of: Callable[[Tensor], float] | None = None,
) -> Callable[[], None] | None:
    """Make a causal language model of transformers compute its loss in parts; its logits are hidden
    states from then on.

    A family that caps its logits is recognised by its loss, and left as it is.

    Args:
        model: the model, under PEFT or not; all ranks call it together.
        ids: (1, length) a sequence to try it with, the same on all ranks.
        tokens: number of tokens whose logits are computed at a time.
        loss_of: computes the loss of sequences, all ranks together; None if `model` does.

    Returns:
        what makes the model compute logits again; None if it is left as it is.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    usual_loss = base.loss_function
    logits_of = head.forward

    def loss_of_hidden(
        logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Tensor:
        """Return the mean loss; the head passes hidden states through, which get here under the
        name by which transformers calls."""
        # Each token's target is the next token; -100 marks tokens that do not count.
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        total = _summed_loss(logits.flatten(0, 1), targets, tokens, logits_of)
        if num_items_in_batch is None:
            return total / (targets != -100).sum()
        return total / num_items_in_batch

    def loss_of_ids() -> float:
        """Return the loss of the sequence to try."""
        with torch.no_grad():
            if loss_of is not None:
                return loss_of(ids)
            return float(model(input_ids=ids, labels=ids, use_cache=False).loss)

    def restore() -> None:
        """Make the model compute logits again."""
        head.forward = logits_of
        base.loss_function = usual_loss

    expected = loss_of_ids()
    # a copy, since FSDP2 warns of views
    head.forward = Tensor.clone
    base.loss_function = loss_of_hidden
    # equal to rounding: a family that caps its logits would have another loss
    if abs(loss_of_ids() - expected) <= 1e-4 * abs(expected):
        return restore
    restore()
    return None


def _summed_loss(
    hidden: Tensor, targets: Tensor, tokens: int, logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the summed cross entropy of hidden states, (tokens, width), whose logits are computed
    for `tokens` of them at a time, and again in backward."""

    def loss_of_part(part: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross entropy of some tokens."""
        return F.cross_entropy(logits_of(part).float(), targets, reduction="sum")

    losses = [
        checkpoint(loss_of_part, part, of_part, use_reentrant=False)
        for part, of_part in zip(hidden.split(tokens), targets.split(tokens))
    ]
    return torch.stack(losses).sum()
