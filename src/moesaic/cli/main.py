"""The entry point of the command line: runs a subcommand and turns errors into one line and an exit
code.

Exit codes: 0 done (or stopped by a signal after everything was saved), 1 training failed, 2 bad
input, 130 interrupted before there was anything to save, 141 the reader of the output closed the
pipe.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from moesaic import __version__
from moesaic.cli.output import guarded_output
from moesaic.errors import (
    InputError,
    TrainingError,
    broken_package,
    in_one_line,
    suggestion,
    to_install,
)
from moesaic.files import system_error

COMMANDS = {
    "train": "train a language model and write a run folder",
    "tokenize": "turn text into a packed file of tokens",
    "sample": "continue a prompt with a trained model",
    "why-hung": "print where every rank stood when a run was ended because a rank was stuck",
    "report": "write one HTML page about one or more runs",
    "show": "print the programs of a plan, the bytes that they move and when each task runs",
    "profile": "measure this machine for the simulator and the planner",
    "plan": "search the layout and the plan with the shortest simulated step on a cluster",
    "finetune": (
        "train adapters of an MoE model of transformers on small cards, with its experts in four "
        "bits"
    ),
    "convert": "convert a checkpoint into another format, or a dense model into a sparse one",
    "check": "test on this machine that every plan computes what the plain layer computes",
    "certify": "test on this machine that your own MoE layer computes what a dense layer computes",
    "trace": "show, check and convert routing traces",
    "demo": "train a sparse and a dense model, compare them, sample, and write a report",
}
"""Summary of each subcommand; `moesaic.cli.<name>` (hyphens as underscores) has its
`run(arguments) -> exit code`."""
LABORATORY = {
    "bench": "compare ways to run a layer with each other and with the limit of the links",
    "chaos": "kill, pause, disconnect and damage runs, and check that they recover as documented",
    "fuzz": "feed malformed input to every reader and command line",
    "soak": (
        "train for half an hour with changing plans and checkpoints, and check that memory does "
        "not grow"
    ),
    "reproduce": "compare published figures of five papers with the simulator",
    "vision": "train an image classifier with MoE layers",
    "testbed": "run a command on an emulated cluster on this machine",
}
"""Summary of each subcommand of the package moesaic-lab."""
GROUP = "moesaic.commands"
"""Entry-point group in which other packages offer subcommands: functions from arguments to an exit
code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None for that of the process); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    help_flags = {"-h", "--help", "--help-all", "--version"}
    asks_for_help = not words or not help_flags.isdisjoint(words)
    command = words[0] if words else "--help"
    with guarded_output(command, asks_for_help=asks_for_help):
        return _run(command, words[1:])


def _run(command: str, arguments: Sequence[str]) -> int:
    """Run a subcommand and turn its errors into one line; returns the exit code."""
    try:
        if command in ("-h", "--help", "--version"):
            print(f"moesaic {__version__}" if command == "--version" else _usage())
            code = 0
        else:
            code = _command(command)(arguments)
        sys.stdout.flush()
        return code
    except (InputError, TrainingError) as error:
        print(f"moesaic {command}: {in_one_line(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except SystemExit as stop:  # tyro exits this way after printing the help of a subcommand
        # rich exits this way too, where the reader of the output has gone
        if isinstance(stop.__context__, BrokenPipeError):
            return 141
        if stop.code:
            raise
        return 0
    except KeyboardInterrupt:  # before training: the training loop catches it and saves first
        print(f"moesaic {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of standard output, which goes nowhere from then on
        return 141
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRAS:
            return _refuse_broken(command, error)
        extra = to_install(f".[{_EXTRAS[package]}]")
        print(f"moesaic {command}: needs the package {error.name}: {extra}", file=sys.stderr)
        return 2
    except Exception as error:
        # a path too long, without permission or on a full disk can fail wherever it is looked up
        cause = system_error(error)
        if cause is None or cause.errno not in OF_PLACES:
            return _refuse_broken(command, error)
        where = "a file" if cause.filename is None else in_one_line(str(cause.filename))
        what = OF_PLACES[cause.errno].format(cause.strerror)
        print(f"moesaic {command}: {where:.200}: {what}", file=sys.stderr)
        return 2


def _refuse_broken(command: str, error: Exception) -> int:
    """Name a package that cannot be imported, and return the exit code; raise any other error
    again."""
    broken = broken_package(error)
    if broken is None:
        raise error
    print(f"moesaic {command}: {broken}", file=sys.stderr)
    return 2


REACHED = "cannot be reached ({}): name another path"
WRITTEN = "cannot be written ({}): free space, or name another path"
OF_PLACES = {
    errno.ENAMETOOLONG: REACHED,
    errno.EACCES: REACHED,
    errno.EPERM: REACHED,
    errno.EROFS: REACHED,
    errno.EIO: "cannot be read or written ({}): look at its disk, or name another path",
    errno.ENOSPC: WRITTEN,
    errno.EDQUOT: WRITTEN,
    errno.EFBIG: WRITTEN,
}
"""What to say of a path, by the number of the error that looking it up, or writing there, ended
in."""


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function that runs a subcommand, of this package or of another installed one.

    Raises:
        InputError: if no subcommand has that name.
    """
    run: Callable[[Sequence[str]], int]
    if name in COMMANDS:
        run = import_module(f"moesaic.cli.{name.replace('-', '_')}").run
        return run
    for entry_point in entry_points(group=GROUP, name=name):  # the first one counts
        run = entry_point.load()
        return run
    if name in LABORATORY:
        raise InputError(f"needs the package moesaic-lab: {to_install('./lab')}")
    raise InputError(
        f"unknown command{suggestion(name, [*COMMANDS, *LABORATORY])} (--help lists all)"
    )


_EXTRAS = {
    "torch": "train",
    "safetensors": "train",
    "transformers": "transformers",
    "peft": "finetune",
    "datasets": "data",
    "plotly": "report",
    "jinja2": "report",
}
"""The extra of this package that installs each package."""


def _usage() -> str:
    """Return the help that lists all commands."""
    lines = [f"  {name:<9} {summary}" for name, summary in {**COMMANDS, **LABORATORY}.items()]
    return "\n".join(
        [
            "usage: moesaic COMMAND ...",
            "",
            *lines,
            "",
            "moesaic COMMAND --help lists the options of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
