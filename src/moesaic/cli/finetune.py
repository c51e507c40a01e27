"""`moesaic finetune MODEL DATA`: trains adapters of a model of transformers, with experts in NF4
that ranks share."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line, to_install
from moesaic.finetune.options import MERGED, FinetuneOptions, require_data
from moesaic.train.signals import say_ends

if TYPE_CHECKING:
    from moesaic.finetune.recipe import Ended

DESCRIPTION = """Train adapters (LoRA) of attention and experts of a model of transformers. The
experts stay frozen, in four bits, and are spread over the ranks: one for each GPU, --ranks N
processes, or those of torchrun -m moesaic finetune ... What does not fit is refused before anything
is loaded."""
LOST = "checkpoints that were saved stay: go on with the same command and --resume"
"""What the line about a lost rank ends with."""
STEP_SECONDS = "600"
"""How long ranks have, after a signal, to end their step and to save."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    if asks_for_help or "RANK" not in os.environ:
        return _start(_options(arguments), arguments)
    # else torch prints the frames of its C++ calls where a rank is lost; lines of ours say it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ["RANK"] == "0":
        say_ends("moesaic finetune")
    from moesaic.train.launch import launch
    from moesaic.train.ranks import Ranks

    place = launch(command="moesaic finetune")
    try:
        with place.naming_dead_ranks(LOST):
            # read only now, so that one rank refuses for all
            with Ranks.of_world().together():
                options = _options(arguments)
            ended = _finetune(options, int(os.environ["WORLD_SIZE"]), says=place.is_first)
    except Exception as error:
        if place.fails_first(error):  # of several ranks that fail, the first one reports
            raise
        return 2 if isinstance(error, InputError) else 1
    place.leave(was_stopped=ended.was_stopped, got_signal=ended.got_signal)
    return 0


def _options(arguments: Sequence[str]) -> FinetuneOptions:
    """Return the options that a command line gives, if the packages that they need are there."""
    options = parse(FinetuneOptions, arguments, prog="moesaic finetune", description=DESCRIPTION)
    for package in ("transformers", "peft"):
        if find_spec(package) is None:
            raise InputError(f"needs the package {package}: {to_install('.[finetune]')}")
    return options


def _start(options: FinetuneOptions, arguments: Sequence[str]) -> int:
    """Fine-tune in this process, or start ranks that do; returns the exit code."""
    require_data(options.data)
    say_ends("moesaic finetune")
    print("moesaic finetune: loading PyTorch", flush=True)
    import torch

    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    ranks = options.ranks or gpus or 1
    if ranks == 1 and gpus < 2:  # Trainer gives a lone process all GPUs, a rank of torchrun one
        _finetune(options, 1)
        return 0
    return _start_ranks(options, ranks, arguments)


def _start_ranks(options: FinetuneOptions, ranks: int, arguments: Sequence[str]) -> int:
    """Start ranks of this machine by torchrun; returns the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from moesaic.finetune.folder import saved_steps
    from moesaic.finetune.recipe import require

    require(options, ranks)
    logging.disable(logging.ERROR)  # a rank has said why it failed; torchrun would say that it did
    steps_before = saved_steps(options.out)
    flags = ["--standalone", "--nproc-per-node", str(ranks)]
    if "--shutdown-timeout" in run.get_args_parser().format_help():  # not in earlier versions
        flags += ["--shutdown-timeout", STEP_SECONDS]
    try:
        run.main([*flags, "-m", "moesaic", "finetune", *arguments])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode
    except SignalException as error:  # torchrun has passed it on, and the ranks have ended
        has_saved = saved_steps(options.out) != steps_before
        return 0 if has_saved else 128 + error.sigval.value  # as shells say it of a signal
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _finetune(options: FinetuneOptions, world: int, *, says: bool = True) -> Ended:
    """Fine-tune on this rank, one of `world`, and say where the adapters are if it `says`. Return
    how the run has ended."""
    from moesaic.finetune.recipe import finetune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between transformers and PEFT
        ended = finetune(options, world)
    if says and not ended.was_stopped:
        merged = f", and merged in {options.out}/{MERGED}" if options.merge else ""
        print(in_one_line(f"done: adapters in {options.out}{merged}"))
    return ended
