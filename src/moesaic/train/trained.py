"""What a run left behind: its model with the weights of the newest checkpoint, and its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.models.gpt import GPT, make_language_model
from moesaic.train.checkpoint import CONFIG, load_checkpoint, load_into
from moesaic.train.config import TrainConfig, of_today
from moesaic.train.machine import pick_device
from moesaic.train.run_folder import CHECKPOINTS, read_config
from moesaic.train.state import tokenizer_of
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

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        table = read_config(folder / CONFIG, say)
    except InputError as error:
        raise InputError(f"{error}: name the folder that moesaic train wrote") from error
    config = override(TrainConfig(), of_today(table, str(folder / CONFIG)), source=str(folder / CONFIG))
    saved = load_checkpoint(folder / CHECKPOINTS, say)
    tokenizer = saved_tokenizer(config.data, tokenizer_of(saved, folder)) if saved.extra.get("has_text", True) else None
    model = make_language_model(config.model, saved.vocab_size)
    load_into(model, saved, config.model, saved.vocab_size)
    model.to(pick_device(device)).eval()
    return Trained(folder, config, model, tokenizer)
