"""`moesaic bench paper-train NAME`: trains a model of the papers that is no decoder, by the loop of
`moesaic train`.

It takes the flags of `moesaic train`. `moesaic bench paper-sample RUN TEXT` prints the translation
of a text by a trained encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.cli.train import train_from
from moesaic.errors import InputError
from moesaic.models.gpt import GPT
from moesaic.planner.presets import PRESETS as MODELS
from moesaic.train.config import TrainConfig
from moesaic.train.data import Corpus
from moesaic.train.presets import preset
from moesaic.train.state import load_trained
from moesaic.train.task import DECODER, TrainingTask
from moesaic_lab.paper_train.data import load_hidden, load_pairs
from moesaic_lab.paper_train.models import Encoder, EncoderDecoder, translate

COMMAND = "moesaic bench paper-train"
RUNS: dict[str, dict[str, Any]] = {
    "bert-tiny": {"steps": 250, "evaluate": {"sequences": 4096}, "optimizer": {"lr": 1e-2}},
    "seq2seq-tiny": {"steps": 1000, "evaluate": {"sequences": 512}, "optimizer": {"lr": 1e-2}},
}
"""Training settings of the small presets; others have those of `moesaic train`."""
KINDS = {
    name: job.model.block.kind for name, job in MODELS.items() if job.model.block.kind != "decoder"
}
"""The kind of each preset that is no decoder."""


def paper_preset(name: str) -> TrainConfig:
    """Return the configuration that trains a model of `planner/presets.py`, whatever its kind."""
    return preset(name, RUNS.get(name))


PRESETS = {name: partial(paper_preset, name) for name in KINDS}


def make_encoder(config: TrainConfig, vocab_size: int) -> GPT:
    """Return a new model that predicts hidden tokens."""
    _check(config, "encoder")
    return Encoder(config.model, vocab_size)


def make_encoder_decoder(config: TrainConfig, vocab_size: int) -> GPT:
    """Return a new model that maps one sequence to another."""
    _check(config, "encoder_decoder")
    if config.mesh.pp > 1:
        raise InputError(
            f"mesh.pp={config.mesh.pp}: an encoder-decoder needs all layers on every rank: choose 1"
        )
    half = config.model.seq_len // 2
    if config.mesh.sequence_parallel and half % config.mesh.tp:
        raise InputError(
            f"mesh.tp={config.mesh.tp} does not divide the {half} positions of a source: "
            "choose a divisor"
        )
    return EncoderDecoder(config.model, vocab_size)


def _check(config: TrainConfig, kind: str) -> None:
    """Raise InputError for another kind of model, and for options that only decoders support."""
    if config.model.block.kind != kind:
        raise InputError(f"model.block.kind={config.model.block.kind}: is no {kind}")
    if config.balance.moves_samples:
        raise InputError(
            f"balance.samples={config.balance.samples}: only decoders can move samples: set "
            "it to none"
        )


def _load_hidden(config: TrainConfig, tokenizer_file: Path | None) -> Corpus:
    """Load the data of an encoder."""
    return load_hidden(config.data, tokenizer_file)


def _load_pairs(config: TrainConfig, tokenizer_file: Path | None) -> Corpus:
    """Load the data of an encoder-decoder."""
    return load_pairs(config.data, config.model.seq_len, tokenizer_file)


TASKS = {
    "decoder": DECODER,
    "encoder": TrainingTask(make_model=make_encoder, load_corpus=_load_hidden, command=COMMAND),
    "encoder_decoder": TrainingTask(
        make_model=make_encoder_decoder, load_corpus=_load_pairs, command=COMMAND
    ),
}
"""What is trained for each value of `model.block.kind`."""


def task_of(config: TrainConfig) -> TrainingTask:
    """Return what a configuration trains."""
    return TASKS[config.model.block.kind]


def run(arguments: Sequence[str]) -> int:
    """Train; returns the exit code."""
    words = list(arguments)
    needs_no_preset = any(word in ("-h", "--help", "-H", "--config") for word in words)
    if words and not words[0].startswith("-"):
        words = ["--preset", *words]
    elif not needs_no_preset:
        raise InputError(
            f"name a preset: one of {', '.join(PRESETS)}; {COMMAND} --help lists all flags"
        )
    return train_from(words, PRESETS, command=COMMAND, task_of=task_of)


def sample(arguments: Sequence[str]) -> int:
    """Print translations; returns the exit code."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        raise InputError(
            "name the folder of a run and texts: moesaic bench paper-sample RUN TEXT ..."
        )
    folder, *texts = arguments
    trained = load_trained(Path(folder), task=TASKS["encoder_decoder"])
    assert isinstance(trained.model, EncoderDecoder)
    sources = []
    for text in texts:
        source = trained.tokenizer.encode(text.encode())
        sources.append(source.tolist())
    translations = translate(trained.model, sources)
    for text, ids in zip(texts, translations):
        print(f"{text} -> {trained.tokenizer.decode(ids)}")
    return 0
