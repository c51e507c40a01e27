"""Computes logits and their cross entropy for a few tokens at a time, and again in backward.

A large vocabulary's logits need more memory than a rank's part of a model in NF4: 12 bytes for each of the vocabulary and each
token, 7 GiB for 4,096 tokens of 151,936.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.planner.finetune import LOSS_TOKENS


def loss_in_parts(model: Any, ids: Tensor, tokens: int = LOSS_TOKENS) -> bool:
    """Make a causal language model of transformers compute its loss in parts; its logits are hidden states from then on.

    A family that caps its logits is recognised by its loss, and left as it is.

    Args:
        model: the model, under PEFT or not; all ranks call it together.
        ids: (1, length) a sequence to try it with, the same on all ranks.

    Returns:
        whether the loss is computed in parts.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, usual = base.get_output_embeddings(), base.loss_function
    project = head.forward

    def of_part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(project(hidden).float(), targets, reduction="sum")

    def in_parts(
        logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        parts = zip(logits.flatten(0, 1).split(tokens), targets.split(tokens))
        total = torch.stack(
            [checkpoint(of_part, *part, use_reentrant=False) for part in parts]
        ).sum()
        return total / (
            (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        )

    def tried() -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids, use_cache=False).loss)

    expected = tried()
    head.forward, base.loss_function = Tensor.clone, in_parts  # a copy, since FSDP2 warns of views
    if abs(tried() - expected) <= 1e-4 * abs(expected):
        return True
    head.forward, base.loss_function = project, usual
    return False
