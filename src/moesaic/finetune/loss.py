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
        loss_of: computes the loss of sequences, all ranks together; None if `model` does.

    Returns:
        what makes the model compute logits again; None if it is left as it is.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    usual = base.loss_function
    project = head.forward

    def of_part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden).float(), targets, reduction="sum")

    def loss_of_hidden(
        logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Tensor:
        """Return the loss of hidden states, computing the logits of `tokens` at a time, again in
        backward."""
        hidden = logits  # the head passes hidden states through; transformers calls by this name
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        parts = zip(hidden.flatten(0, 1).split(tokens), targets.split(tokens))
        total = torch.stack(
            [checkpoint(of_part, *part, use_reentrant=False) for part in parts]
        ).sum()
        return total / (
            (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        )

    def tried() -> float:
        with torch.no_grad():
            if loss_of is not None:
                return loss_of(ids)
            return float(model(input_ids=ids, labels=ids, use_cache=False).loss)

    def restore() -> None:
        head.forward = project
        base.loss_function = usual

    expected = tried()
    # a copy, since FSDP2 warns of views
    head.forward = Tensor.clone
    base.loss_function = loss_of_hidden
    if abs(tried() - expected) <= 1e-4 * abs(expected):
        return restore
    restore()
    return None
