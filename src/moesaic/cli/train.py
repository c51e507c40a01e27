"""`moesaic train`: a preset, then a file, then flags; the later wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesaic.cli.arguments import parse
from moesaic.errors import InputError

DESCRIPTION = """Train a GPT with MoE layers.

Start from --preset NAME (demo, demo-dense, gpt-tiny, gpt-small), or from --config FILE (.toml or .json; a run's
config.json takes that run up again), or from both: the file overrides the preset, flags override both.
The defaults shown below are those of the preset and file that were given."""


def run(arguments: Sequence[str]) -> int:
    """Train; returns the exit code."""
    from moesaic.train.config import TrainConfig
    from moesaic.train.configfile import override, read_table, suggestion
    from moesaic.train.loop import train
    from moesaic.train.presets import PRESETS

    words, chosen = _take(list(arguments), ("--preset", "--config"))
    config = TrainConfig()
    if "--preset" in chosen:
        name = chosen["--preset"]
        if name not in PRESETS:
            raise InputError(f"unknown preset {name}{suggestion(name, list(PRESETS))}")
        config = PRESETS[name]()
    if "--config" in chosen:
        path = Path(chosen["--config"])
        config = override(config, read_table(path), source=str(path))
    config = parse(TrainConfig, words, prog="moesaic train", description=DESCRIPTION, default=config)
    result = train(config)
    if not result.was_stopped:
        print(f"done: {result.folder}, step {result.step}; look at it with moesaic report {result.folder}")
    return 0


def _take(words: list[str], flags: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Split `--flag value` and `--flag=value` off a command line."""
    rest, taken = [], {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            rest.append(word)
        elif equals:
            taken[flag] = value
        elif words:
            taken[flag] = words.pop(0)
        else:
            raise InputError(f"{flag} needs a value")
    return rest, taken
