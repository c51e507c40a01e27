"""The validation loss of a model, per token and per byte of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.gpt import GPT
from moesaic.train.data import Corpus, as_batch
from moesaic.train.machine import autocast
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """A model's loss on validation data, in nats."""

    per_token: float
    """Mean cross-entropy of the next token."""
    per_byte: float
    """The same over the bytes of text behind the tokens, so that tokenizers compare."""


@torch.no_grad()
def evaluate(
    model: GPT | PipelinedGPT,
    corpus: Corpus,
    windows: list[int],
    *,
    batch_size: int,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Measure a model on windows of the validation data; its training mode is put back.

    Over several ranks each data parallel group takes its part of every batch, an empty one if need be: the batches, and
    with them capacities and drops, are those of one process.

    Args:
        model: what to measure.
        corpus: its `val` is read.
        windows: which sequences of it.
        batch_size: sequences per forward pass.
        dtype: of the forward pass; float32 turns autocast off.
        ranks: that share the model; None for one process.
    """
    ranks = ranks or Ranks()
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(windows), batch_size):
        chosen = share(windows[first : first + batch_size], ranks.dp_index, ranks.dp)
        tokens, targets = as_batch(corpus.val, chosen, model.config.seq_len, corpus.mask)
        with autocast(device, dtype):
            output = model(tokens.to(device), targets.to(device))
        if chosen:
            loss: Tensor = output.loss
            total += loss.double() * len(chosen)
    model.train(was_training)
    per_token = float(ranks.mean(total)) * ranks.dp / len(windows)
    return Evaluation(per_token, per_token * len(corpus.val) / corpus.val_bytes)


def share(windows: list[int], index: int, count: int) -> list[int]:
    """Return the index-th of `count` consecutive parts of a list, as equal as can be; some are empty in a short list."""
    return windows[len(windows) * index // count : len(windows) * (index + 1) // count]
