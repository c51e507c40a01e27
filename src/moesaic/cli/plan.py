"""`moesaic plan`: searches the layout and plan with the shortest simulated step on a cluster; its
subcommands print it as flags, explain a layout, or plan a fine-tune. Runs without torch."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.cli import plan_emit, plan_explain, plan_finetune
from moesaic.cli.arguments import parse
from moesaic.cli.plan_rank import PlanOptions, ranked
from moesaic.errors import InputError
from moesaic.policies import REPLICATION

SUBCOMMANDS = {"emit": plan_emit.run, "explain": plan_explain.run, "finetune": plan_finetune.run}
EARLIER = {
    "--emit": "emit SYSTEM",
    "--explain": "explain --flags FLAGS",
    "--finetune": "finetune --method METHOD",
    "--adapter-rank": "finetune --rank RANK",
}
"""Flags that are subcommands now, or belong to one, with what to write instead."""
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
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in EARLIER:
            raise InputError(f"{flag} is now moesaic plan {EARLIER[flag]}, with the other options")
    options = parse(PlanOptions, arguments, prog="moesaic plan", description=DESCRIPTION)
    simulator = options.simulator()
    options.require_writable()
    return ranked(options, options.job(simulator.cluster), simulator)
