"""The validation loss of a model, per token and per byte of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.models.gpt import GPT
from moesaic.train.data import Corpus, as_batch
from moesaic.train.machine import autocast


@dataclass(frozen=True)
class Evaluation:
    """A model's loss on validation data, in nats."""

    per_token: float
    """Mean cross-entropy of the next token."""
    per_byte: float
    """The same over the bytes of text behind the tokens, so that tokenizers compare."""


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, windows: list[int], *, batch_size: int, dtype: torch.dtype) -> Evaluation:
    """Measure a model on windows of the validation data; its training mode is put back.

    Args:
        model: what to measure.
        corpus: its `val` is read.
        windows: which sequences of it.
        batch_size: sequences per forward pass.
        dtype: of the forward pass; float32 turns autocast off.
    """
    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    total = 0.0
    for first in range(0, len(windows), batch_size):
        chosen = windows[first : first + batch_size]
        tokens, targets = as_batch(corpus.val, chosen, model.config.seq_len)
        with autocast(device, dtype):
            output = model(tokens.to(device), targets.to(device))
        total += float(output.loss) * len(chosen)
    model.train(was_training)
    per_token = total / len(windows)
    return Evaluation(per_token, per_token * len(corpus.val) / corpus.val_bytes)
