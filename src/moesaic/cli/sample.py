"""`moesaic sample RUN`: continues a prompt with a trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `moesaic sample`."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder of the model."""
    prompt: tuple[str, ...] = ("def ",)
    """Text to continue; several prompts are sampled in one batch."""
    tokens: int = 300
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature: the logits are divided by it; 0 always takes the likeliest token."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens; None for all tokens."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 for all tokens."""
    seed: int = 0
    """Seed of the sampling."""
    device: str = "auto"
    """Device of the model: auto (CUDA if there is a GPU), cpu or cuda."""

    def __post_init__(self) -> None:
        has_no_tokens = self.top_k is not None and self.top_k < 1
        if self.tokens < 1 or has_no_tokens or not 0 <= self.temperature < math.inf:
            raise InputError(
                "tokens and top-k must be at least 1, temperature a finite number of at least 0"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p={self.top_p}: choose a share above 0, at most 1")
        if not self.prompt or not all(self.prompt):
            raise InputError("prompt: give at least one character")
        if any(prompt != prompt.encode(errors="replace").decode() for prompt in self.prompt):
            raise InputError("prompt: is no UTF-8: write it in a terminal of UTF-8")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        SampleOptions,
        arguments,
        prog="moesaic sample",
        description="Continue a prompt with a trained model.",
    )
    texts = [
        f"{prompt}{continuation}"
        for prompt, continuation in zip(options.prompt, continuations(options))
    ]
    print("\n\n".join(texts))
    return 0


def continuations(options: SampleOptions) -> list[str]:
    """Return the continuation of each prompt.

    Raises:
        InputError: if the run has no checkpoint, is of no decoder, or was trained on `.bin` tokens,
            which have no text.
    """
    from moesaic.models.gpt import generate
    from moesaic.train.state import load_trained

    trained = load_trained(Path(options.run), options.device)
    model = trained.model
    tokenizer = trained.tokenizer
    prompts = [tokenizer.encode(prompt.encode()).tolist() for prompt in options.prompt]
    ids = generate(
        model,
        prompts,
        num_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    return list(map(tokenizer.decode, ids))
