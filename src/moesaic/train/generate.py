"""Sampling from a trained model, token by token, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moesaic.models.attention import KeyValueCache
from moesaic.models.gpt import GPT


@torch.inference_mode()
def generate(
    model: GPT, prompt: list[int], *, num_tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Iterator[int]:
    """Yield the ids that continue a prompt.

    When the context is full, the later half of it is read again as a fresh context.

    Args:
        model: in evaluation mode.
        prompt: at least one id.
        num_tokens: ids to yield.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the so many likeliest tokens; None among all.
        seed: of the draws.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    limit = model.config.seq_len
    context = list(prompt)[-limit:]
    caches = [KeyValueCache() for _ in model.blocks]
    pending = context
    for _ in range(num_tokens):
        if caches[0].length + len(pending) > limit:
            caches = [KeyValueCache() for _ in model.blocks]
            context = context[-max(limit // 2, 1) :]
            pending = context
        logits = model(torch.tensor([pending], device=device), caches=caches).logits[0, -1].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        context.append(token)
        pending = [token]
        yield token


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = ((logits - logits.max()).double() / temperature).softmax(-1)  # no temperature overflows it
    return int(torch.multinomial(probabilities, 1, generator=generator))
