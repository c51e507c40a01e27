"""What a run left behind: its model with the weights of the newest checkpoint, and its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from moesaic.configfile import override, read_table
from moesaic.errors import InputError
from moesaic.models.gpt import GPT
from moesaic.models.seq2seq import make_language_model
from moesaic.train.checkpoint import load_checkpoint, load_into
from moesaic.train.config import TrainConfig
from moesaic.train.machine import pick_device
from moesaic.train.tokenizer import AbstractTokenizer, saved_tokenizer


@dataclass(frozen=True)
class Trained:
    """A model that a run trained."""

    folder: Path
    """Of the run."""
    config: TrainConfig
    """Of the run."""
    model: GPT
    """In evaluation mode."""
    text: AbstractTokenizer | None
    """Makes ids of text and back; None where the run read `.bin` tokens whose tokenizer it was not told."""

    @property
    def tokenizer(self) -> AbstractTokenizer:
        """What makes ids of text and back.

        Raises:
            InputError: if the run's data were `.bin` tokens, which have no text.
        """
        if self.text is None:
            raise InputError(f"{self.folder}: the run was trained on .bin tokens, whose text is not known")
        return self.text


def load_trained(folder: Path, device: str = "auto") -> Trained:
    """Return what a run trained.

    Args:
        folder: of the run.
        device: where the model goes: auto, cpu or cuda.

    Raises:
        InputError: if there is no run, or it has no checkpoint.
    """
    if not (folder / "config.json").exists():
        raise InputError(f"{folder}: no run there (config.json is missing): name the folder that moesaic train wrote")
    config = override(TrainConfig(), read_table(folder / "config.json"), source=str(folder / "config.json"))
    saved = load_checkpoint(folder / "checkpoints", lambda line: print(line, file=sys.stderr))
    tokenizer = saved_tokenizer(config.data, folder / "tokenizer.json") if saved.extra.get("has_text", True) else None
    model = make_language_model(config.model, saved.vocab_size)
    load_into(model, saved, config.model, saved.vocab_size)
    model.to(pick_device(device)).eval()
    return Trained(folder, config, model, tokenizer)
