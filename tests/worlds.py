"""Process groups of real processes over Gloo for the tests. One start of the processes serves one
call of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import one_device  # noqa: F401, its import lets the groups of a rank share one device
from moesaic.testing import runner
from moesaic.testing.runner import start_ranks

TIMEOUT_SECONDS = 120
PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.pipelining",
    "moesaic.cli.main",
    "moesaic.cli.train",
    "moesaic.train.loop",
    "pytest",
    "fsspec.core",
    "numpy.ma",
    "typeguard",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "tyro._backends._argparse_formatter",
    "moesaic.train.presets",
    "moesaic.kernels.by_expert",
    "moesaic.runtime.graph_breaks",
    "moesaic.routing.routers.base",
    "moesaic.routing.routers.expert_choice",
    "moesaic.routing.routers.gshard",
    "moesaic.routing.routers.noisy",
    "moesaic.testing.certify",
    "moesaic_lab.balance.tracked_memory",
    "moesaic_lab.paper_train.command",
)
"""Modules that ranks of tests and commands import, in addition to those of
`moesaic.testing.runner`."""
HUB = (
    "transformers.trainer",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "moesaic.transformers",
    "moesaic.weights.load",
    "moesaic.cli.finetune",
    "moesaic.finetune.recipe",
    "moesaic_lab.forked_hub",
    "moesaic_lab.hf",
    "peft",
    "datasets",
)
"""The same where tests use transformers, whose parts are imported when they are used: five seconds
of each rank."""


def start(world: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `world` processes; see `start_ranks`."""
    start_ranks(world, function, *arguments, preload=preloaded())


def preloaded() -> tuple[str, ...]:
    """Return the modules that the fork server imports, from which all processes of tests are
    forked."""
    return (*PRELOAD, *(HUB if "transformers" in sys.modules else ()))


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a module-level function in `world` processes of one process group; return the results by
    rank."""
    return runner.on_ranks(
        world, function, *arguments, timeout_seconds=TIMEOUT_SECONDS, preload=preloaded()
    )


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return type and text of the exception that a call raises; "" if it raises none."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
