"""Two halves of a micro-batch in flight in transformers' `Trainer`: the one computes while the
messages of the other travel (`moesaic.in_flight`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.interleaved import in_flight


class InFlight:
    """Makes a trainer compute a micro-batch's two halves in flight.

    Put it before a trainer's class: `class FlyingTrainer(InFlight, Trainer): pass`. Backward of
    checkpointed layers computes them again without taking turns.

    Raises:
        InputError: a micro-batch has an odd number of sequences.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss as `Trainer.compute_loss` does; of two halves while the model trains."""
        compute = super().compute_loss  # type: ignore[misc]
        if return_outputs or not model.training:
            return compute(model, inputs, return_outputs, num_items_in_batch)

        def loss_of(half: dict[str, Any]) -> Any:
            """Return the loss of half a micro-batch."""
            return compute(model, half, num_items_in_batch=num_items_in_batch)

        losses = both(loss_of, halves(inputs))
        total = torch.stack(losses).sum()
        if num_items_in_batch is None:  # then each loss is a mean over its half
            return total / len(losses)
        return total


def halves(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the two halves of a micro-batch, whose tensors have sequences as first dimension."""
    counts = [len(value) for value in inputs.values() if _has_sequences(value)]
    count = max(counts, default=0)
    is_same_for_all = min(counts, default=0) == count
    if not is_same_for_all or count < 2 or count % 2:
        raise InputError(
            f"two halves in flight: a micro-batch has {count} sequences: choose an even number"
        )
    both_halves = []
    for sequences in (slice(count // 2), slice(count // 2, None)):
        half = {
            name: value[sequences] if _has_sequences(value) else value
            for name, value in inputs.items()
        }
        both_halves.append(half)
    return both_halves


def _has_sequences(value: Any) -> bool:
    """Whether an input of a model has sequences as first dimension; a number has none."""
    return isinstance(value, Tensor) and value.dim() > 0


def both(compute: Any, parts: Sequence[Any]) -> list[Tensor]:
    """Return what `compute` returns for each part, a tensor, computed in flight."""
    pairs = in_flight(compute, parts, at_once=2)  # yields the results of two parts at a time
    return [result for results in pairs for result in results]
