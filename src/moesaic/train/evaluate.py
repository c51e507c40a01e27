"""Evaluation of a model on validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.models.gpt import GPT
from moesaic.models.split import local_part
from moesaic.train.data import Corpus, as_batch, share
from moesaic.train.machine import autocast
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """A model's loss on validation data, in nats."""

    per_token: float
    """Mean cross-entropy of the next token."""
    per_byte: float
    """The same loss per byte of the text behind the tokens, which makes different tokenizers
    comparable."""


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
    """Measure a model on windows of the validation data, and restore its training mode.

    With several ranks, each data-parallel group takes its part of every batch, which may be empty.
    Batches, and with them capacities and drops, are therefore the same as with one process.

    Args:
        model, corpus: the run's model and data.
        ranks: the ranks that share the model; None for one process.
        windows: numbers of the sequences of validation data to measure.
        batch_size: sequences per forward pass.
        dtype: autocast dtype of the forward pass; float32 turns autocast off.
    """
    ranks = ranks or Ranks()
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)  # of this data-parallel group
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        own = share(batch, ranks.dp_index, ranks.dp)
        tokens, targets = as_batch(corpus.val, own, model.config.seq_len, corpus.objective)
        with autocast(device, dtype):
            output = model(tokens.to(device), targets.to(device))
        if own:
            loss: Tensor = output.loss
            total += loss.double() * len(own)
    model.train(was_training)

    mean = model.agreed(total, ranks) if isinstance(model, PipelinedGPT) else ranks.mean(total)
    total_of_groups = float(mean) * ranks.dp
    per_token = total_of_groups / len(windows)
    return Evaluation(per_token, per_token * len(corpus.val) / corpus.val_bytes)


@torch.no_grad()
def largest_parameter(model: nn.Module, ranks: Ranks) -> float:
    """Return the largest absolute value of all parameters on all ranks. The result is not finite if
    any parameter is not."""
    parts = []
    for parameter in model.parameters():
        part = local_part(parameter.detach())
        if part.is_floating_point() and part.numel():  # a rank may hold no rows
            parts.append(part)
    largest = nn.utils.get_total_norm(parts, math.inf)
    if ranks.mesh is not None:  # a maximum over ranks may drop a NaN
        largest = largest.nan_to_num(nan=math.inf)
    return float(ranks.largest(largest))
