"""Registers functions as operators of torch, in the namespace `moesaic`.

`torch.library.custom_op` would do, but costs the host 51 us a call for an operator that costs 15 us here (docs/log.md).
What it adds is a check for results that are arguments, and an autograd formula that refuses;
operators here are called by `torch.autograd.Function`s, where nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.library import infer_schema, register_autograd

from moesaic.errors import InputError

LIBRARY = torch.library.Library("moesaic", "DEF")


def operator(
    name: str, *, schema: str | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function an operator for every device, whose `function` it becomes.

    Args:
        name: without namespace.
        schema: arguments and results; None to infer them from annotations.
        mutates_args: the arguments that the function writes.
    """

    def register(function: Callable[..., Any]) -> Any:
        signature = schema or infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.moesaic, name).default
        overload.function = function
        return overload

    return register


def differentiable_once(*operators: Any) -> None:
    """Make the gradient of operators that compute gradients an InputError, in words of ours."""
    for each in operators:
        register_autograd(each, _refuse, lib=LIBRARY)


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "a MoE layer has no second derivatives: its backward pass cannot be differentiated; use losses of outputs and first "
        "gradients, or finite differences of the latter"
    )
