"""`moesaic plan`: searches the layout and plan with the shortest simulated step on a cluster; its
subcommands print it as flags, explain a layout, or plan a fine-tune. Runs without torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from moesaic.cli import plan_emit, plan_explain, plan_finetune
from moesaic.cli.arguments import parse
from moesaic.cli.plan_rank import PlanOptions, ranked
from moesaic.errors import InputError
from moesaic.policies import REPLICATION

SUBCOMMANDS = {"emit": plan_emit.run, "explain": plan_explain.run, "finetune": plan_finetune.run}
EARLIER = ("--emit", "--explain", "--finetune", "--adapter-rank")
"""Flags of `moesaic plan` that are subcommands now, or belong to one."""
DESCRIPTION = f"""Search the layout and plan with the shortest simulated step for a model on a
cluster, within its memory. moesaic plan emit SYSTEM prints it as flags of a training system,
moesaic plan explain compares a layout of your own, and moesaic plan finetune predicts a fine-tune;
each has its own --help. All figures are predictions, from the description of a cluster or from what
moesaic profile measured on it. Policies for uneven routing are not searched: choose replication
({", ".join(REPLICATION)}), placement and memory budgets for moesaic train."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    first = arguments[0] if arguments else ""
    if first in SUBCOMMANDS:
        return SUBCOMMANDS[first](arguments[1:])
    renamed = in_new_words(arguments)
    if renamed is not None:
        raise InputError(f"{renamed[0]} is a command now: moesaic plan {shlex.join(renamed)}")
    options = parse(PlanOptions, arguments, prog="moesaic plan", description=DESCRIPTION)
    simulator = options.simulator()
    options.require_writable()
    return ranked(options, options.job(simulator.cluster), simulator)


def in_new_words(arguments: Sequence[str]) -> list[str] | None:
    """Return the words after `moesaic plan` that say what a command line with flags of `EARLIER`
    said; None if it has none of them."""
    rest: list[str] = []
    values: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in EARLIER:
            values[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    flags = ["--flags", values["--explain"]] if "--explain" in values else []
    rank = ["--rank", values["--adapter-rank"]] if "--adapter-rank" in values else []
    if "--emit" in values:
        return ["emit", values["--emit"], *rest, *flags]
    if flags:
        return ["explain", *rest, *flags]
    if "--finetune" in values:
        return ["finetune", "--method", values["--finetune"], *rest, *rank]
    return ["finetune", *rest, *rank] if rank else None
