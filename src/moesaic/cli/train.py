"""`moesaic train`: reads a configuration from a preset, a file and flags (the later ones override)
and trains."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.arguments import parse, value_of
from moesaic.errors import InputError, in_one_line
from moesaic.train.signals import say_ends

if TYPE_CHECKING:
    from moesaic.train.config import TrainConfig
    from moesaic.train.task import TrainingTask

DESCRIPTION = """Train a language model with MoE layers, in one process or on ranks that torchrun
(or another launcher) starts:
torchrun --nproc-per-node 4 -m moesaic train --mesh.ep 2 --mesh.etp 2 ...

Start from --preset NAME (PRESETS),
from --config FILE (.toml or .json; with the config.json of a run and --existing resume, that run
continues), or from both. The file overrides the preset, and flags override both.
--plan FILE uses the plan that moesaic show --write or moesaic plan --write wrote; --plan search
takes the split of the ranks and the plan that are predicted to be fastest; --plan auto changes
plans while training, see --planner.
--help-all lists every flag. The defaults shown below are those of the given preset and file."""

TAKEN = ("--preset", "--config", "--plan")
"""Flags that choose what the others change."""
USUAL = (
    "--out",
    "--existing",
    "--steps",
    "--batch-size",
    "--accumulation",
    "--device",
    "--precision",
    "--evaluate.every",
    "--save.every",
    "--model.dim",
    "--model.num-layers",
    "--model.seq-len",
    "--model.moe.num-experts",
    "--model.moe.top-k",
    "--model.moe.router",
    "--data.path",
    "--data.tokenizer",
    "--optimizer.lr",
    "--optimizer.warmup-steps",
    "--mesh.tp",
    "--mesh.ep",
    "--mesh.etp",
    "--mesh.pp",
    "--planner.plan",
    "--planner.cluster",
    "--balance.replication",
)
"""Flags that --help lists: those that most people set."""


def run(arguments: Sequence[str]) -> int:
    """Train a decoder; returns the exit code."""
    from moesaic.train.presets import PRESETS

    return train_from(arguments, PRESETS)


def train_from(
    arguments: Sequence[str],
    presets: Mapping[str, Callable[[], TrainConfig]],
    *,
    command: str = "moesaic train",
    task_of: Callable[[TrainConfig], TrainingTask] | None = None,
) -> int:
    """Train as a command line says; returns the exit code.

    Only one of several ranks prints: the first rank, or the first one that fails.

    Args:
        presets: values of --preset.
        task_of: returns what a configuration trains; None for a decoder.
    """
    if not {"-h", "--help", "--help-all"}.isdisjoint(arguments):
        _configured(arguments, presets, command)  # prints, without torch, and exits
    is_alone = "RANK" not in os.environ
    # refused at once, without torch
    config = _configured(arguments, presets, command) if is_alone else None
    # else torch prints the frames of its C++ calls where a rank is lost; lines of ours say it
    if not is_alone:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ.get("RANK", "0") == "0":
        say_ends(command)
        print(f"{command}: loading PyTorch", flush=True)  # takes seconds
    from moesaic.train.launch import launch
    from moesaic.train.loop import train
    from moesaic.train.ranks import Ranks
    from moesaic.train.task import DECODER

    place = launch(_start_patience(arguments), command)
    try:
        with (
            place.naming_dead_ranks("in the start; start the run again"),
            Ranks.of_world().together(),  # what one rank refuses, all do
        ):
            config = config or _configured(arguments, presets, command)
        result = train(config, task=DECODER if task_of is None else task_of(config))
    except Exception as error:
        if place.fails_first(error):  # of several ranks that fail, the first one reports
            raise
        return 2 if isinstance(error, InputError) else 1
    if place.is_first and not result.was_stopped:
        line = (
            f"done: {result.folder}, step {result.step}; look at it with moesaic report "
            f"{result.folder}"
        )
        print(in_one_line(line))
    place.leave(was_stopped=result.was_stopped, got_signal=result.got_signal)
    return 0


def _start_patience(arguments: Sequence[str]) -> float:
    """Return the start patience that a flag gives.

    The configuration itself is read only after the ranks have met, so that one rank can refuse it
    for all.
    """
    from moesaic.train.config import TrainConfig

    value = value_of(arguments, "--start-patience")
    if value is not None:
        with suppress(ValueError):  # of a wrong value, which is refused with the configuration
            return TrainConfig(start_patience=float(value)).start_patience
    return TrainConfig.start_patience


def _configured(
    arguments: Sequence[str], presets: Mapping[str, Callable[[], TrainConfig]], command: str
) -> TrainConfig:
    """Return the configuration that a command line gives."""
    from moesaic.configfile import override
    from moesaic.errors import suggestion
    from moesaic.planner.presets import PRESETS as MODELS
    from moesaic.train.config import TrainConfig

    words, taken = _take(list(arguments), TAKEN)
    if "--plan" in taken:
        words = ["--planner.plan", taken["--plan"], *words]
    config = TrainConfig()
    if "--preset" in taken:
        name = taken["--preset"]
        if name in MODELS and name not in presets:  # one that the planner knows
            kind = MODELS[name].model.block.kind
            other = "moesaic train --preset" if kind == "decoder" else "moesaic bench paper-train"
            raise InputError(f"preset {name} is of kind {kind}: train it with {other} {name}")
        if name not in presets:
            raise InputError(f"unknown preset {name}{suggestion(name, list(presets))}")
        config = presets[name]()
    if "--config" in taken:
        path = Path(taken["--config"])
        config = override(config, _table(path), source=str(path))
    description = DESCRIPTION.replace("PRESETS", ", ".join(presets))
    return parse(
        TrainConfig,
        words,
        prog=command,
        description=description,
        default=config,
        taken=TAKEN,
        usual=USUAL,
    )


def _table(path: Path) -> dict[str, Any]:
    """Read a configuration file. Only if the one of a run is damaged, its copy in a checkpoint is
    read, which needs torch."""
    from moesaic.configfile import read_table

    try:
        return read_table(path)
    except InputError:
        from moesaic.train.run_folder import read_config

        def warn(line: str) -> None:
            """Print a line about the damage."""
            print(in_one_line(f"moesaic train: {line}"), file=sys.stderr)

        return read_config(path, warn)


def _take(words: list[str], flags: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Split `--flag value` and `--flag=value` off a command line, which is used up; returns the
    other words, and the values by flag."""
    others = []
    values = {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            others.append(word)
        elif equals:
            values[flag] = value
        elif words:
            values[flag] = words.pop(0)
        else:
            raise InputError(f"{flag} needs a value")
    return others, values
