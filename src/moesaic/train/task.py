"""What a run trains. `moesaic train` trains decoders; another task brings its own model, corpus and
objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moesaic.errors import InputError
from moesaic.models.gpt import GPT
from moesaic.models.moving import MovingGPT
from moesaic.train.config import TrainConfig
from moesaic.train.data import Corpus, load_corpus


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """The model of a run, and its data with their objective."""

    make_model: Callable[[TrainConfig, int], GPT]
    """Makes the model from the configuration and the size of the vocabulary."""
    load_corpus: Callable[[TrainConfig, Path | None], Corpus]
    """Loads the data; the path is the tokenizer of the run that is resumed, if it has one."""
    command: str = "moesaic train"
    """The command that trains it."""


def make_decoder(config: TrainConfig, vocab_size: int) -> GPT:
    """Return a new decoder. If `balance.samples` is set, its samples can move.

    Raises:
        InputError: the configuration is one of another kind of model.
    """
    kind = config.model.block.kind
    if kind != "decoder":
        raise InputError(
            f"model.block.kind={kind}: is no decoder: train it with moesaic bench "
            "paper-train, which takes the same flags"
        )
    return (MovingGPT if config.balance.moves_samples else GPT)(config.model, vocab_size)


DECODER = TrainingTask(
    make_model=make_decoder, load_corpus=lambda config, file: load_corpus(config.data, file)
)
"""A language model that predicts the next token."""
