"""Dropout whose mask belongs to the sample: the same wherever the sample is computed.

A mask drawn from a rank's random generator would depend on which samples are there and in which order. Drawn from the number
of the sample it is a property of the batch, so a model with placement drops what the model without it drops.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sample_dropout(x: Tensor, p: float, samples: Tensor, seed: int) -> Tensor:
    """Zero entries with probability p and scale the others by 1 / (1 - p).

    Args:
        x: (samples, ...).
        p: from 0 to below 1.
        samples: (samples,) int64: the number of each sample in the whole batch, as `SampleTrip.samples` has it.
        seed: at least 0; of the place in the model, the micro-batch and the step: one that no other call has.

    Returns:
        of x's shape.
    """
    if not p:
        return x
    keep = torch.empty(x.shape, device=x.device)
    for row, sample in zip(keep, samples.tolist()):
        state = np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)
        generator = torch.Generator(x.device).manual_seed(int(state[0]))
        row.bernoulli_(1 - p, generator=generator)
    return x * keep.to(x.dtype) / (1 - p)
