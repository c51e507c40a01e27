"""`moesaic testbed`: run a command on every rank of an emulated cluster, or tell what this machine
can emulate."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moesaic.cli.arguments import parse
from moesaic.errors import InputError

if TYPE_CHECKING:
    from moesaic_testbed import Bed, Change

USAGE = """usage: moesaic testbed run [options] -- COMMAND ...
       moesaic testbed info

  run   run a command once per rank of an emulated cluster, as torchrun would on a real one
  info  report what this machine can emulate

moesaic testbed run --help lists its options."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The cluster to emulate; the command to run follows after `--`."""

    nodes: int = 2
    """Number of nodes."""
    ranks_per_node: int = 2
    """Ranks per node."""
    inter: tuple[str, ...] = ("200mbit",)
    """Rate of all nodes' links in each direction, or one rate per node."""
    intra: str | None = None
    """Rate inside each node, summed over its ranks; by default as fast as the machine."""
    per_message: int = 0
    """Least number of bytes that a packet on a node's link is charged for: the start-up cost of a
    message."""
    changes: tuple[str, ...] = ()
    """Change links while the command runs: seconds:node:rate, as in 10:1:20mbit."""
    threads: int = 1
    """OMP_NUM_THREADS of each rank."""


def run(arguments: Sequence[str]) -> int:
    """Run `moesaic testbed run` or `moesaic testbed info` and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] == "run":
        return _run(arguments[1:])
    if arguments[0] == "info":
        if arguments[1:]:
            raise InputError(f"unknown argument {arguments[1]}: info takes none")
        return _info()
    raise InputError(f"unknown word {arguments[0]}: write run or info")


def _run(arguments: Sequence[str]) -> int:
    """Run a command on the ranks of a bed, and return its exit code."""
    from moesaic_testbed import Launcher

    split = arguments.index("--") if "--" in arguments else len(arguments)
    words = list(arguments[split + 1 :])
    description = "Run a command once per rank of an emulated cluster."
    options = parse(
        RunOptions, arguments[:split], prog="moesaic testbed run", description=description
    )
    if not words:
        raise InputError(
            "no command: write it after --, as in moesaic testbed run --nodes 2 -- python train.py"
        )
    if options.threads < 1:
        raise InputError(f"--threads {options.threads}: must be at least 1")
    bed = _bed(options)
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"on a real cluster, on every node: {torchrun_line(bed.nodes, bed.ranks_per_node, words)}",
        markup=False,
    )
    with Launcher(with_torch=False) as launcher, launcher.open(bed) as cluster:
        codes = cluster.command(words, env={"OMP_NUM_THREADS": str(options.threads)})
    return exit_code(codes)


def torchrun_line(nodes: int, ranks_per_node: int, words: Sequence[str]) -> str:
    """Return the torchrun command that runs the same on a real cluster, to be typed on each
    node."""
    start = f"torchrun --nnodes {nodes} --nproc-per-node {ranks_per_node}"
    if nodes > 1:
        start += f" --node-rank <0..{nodes - 1}> --master-addr <node 0> --master-port 29500"
    is_python = Path(words[0]).name.startswith("python") and len(words) > 1
    if is_python and (words[1] == "-m" or not words[1].startswith("-")):
        return f"{start} {shlex.join(words[1:])}"
    return f"{start} --no-python {shlex.join(words)}"


def exit_code(codes: Sequence[int]) -> int:
    """Return one exit code for all ranks.

    Args:
        codes: exit code of each rank; minus the signal's number for a rank that was killed. When a
            rank fails, the others are killed too.

    Returns:
        the first nonzero exit code of a rank that exited by itself, else 128 + the first signal
        that killed a rank, else 0.
    """
    for code in codes:
        if code > 0:
            return code
    for code in codes:
        if code < 0:
            return 128 - code
    return 0


def _bed(options: RunOptions) -> Bed:
    """Return the bed of the options."""
    from moesaic_testbed import Bed

    inter = options.inter[0] if len(options.inter) == 1 else options.inter
    return Bed(
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        inter=inter,
        intra=options.intra,
        per_message=options.per_message,
        changes=tuple(map(_change, options.changes)),
    )


def _change(text: str) -> Change:
    """Return a change of a link from its text."""
    from moesaic_testbed import Change

    try:
        seconds, node, rate = text.split(":")
        return Change(at_seconds=float(seconds), node=int(node), rate=rate)
    except InputError:
        raise
    except ValueError:
        raise InputError(f"--changes {text}: write seconds:node:rate, as in 10:1:20mbit") from None


def _info() -> int:
    """Print whether this machine can emulate clusters."""
    from moesaic_testbed import refusal
    from moesaic_testbed.kernel import may_configure_networks

    reason = refusal()
    rights = "root" if may_configure_networks() else "a user namespace"
    console = Console(soft_wrap=True, highlight=False)
    console.print(reason or "this machine can emulate clusters", markup=False)
    console.print(
        f"with the rights of {rights}, Linux {platform.release()}, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    return 0 if reason is None else 1
