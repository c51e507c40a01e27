"""Registers functions as operators of torch, in the namespace `moesaic`.

torch's compiler, modes (fake tensors, FLOP counters, selective checkpoints) and subclasses of
tensors need operators. An eager call of plain tensors does not, and torch takes 10 to 50 us to
bring the arguments to a function in Python (docs/log.md): such a call runs the function itself.
Operators here are called by `torch.autograd.Function`s, where nothing is recorded.

Every operator runs with the device of its first tensor as the current one, as torch's own do:
Triton starts kernels on the current device's stream, wherever their operands are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import infer_schema, register_autograd

from moesaic.errors import InputError

LIBRARY = torch.library.Library("moesaic", "DEF")


def on_device_of(
    tensor: Tensor, function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Return `function(*arguments, **options)`, called with the device of `tensor` as the current
    one.

    Nothing is switched for tensors of the current GPU, or that are on no GPU.
    """
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return function(*arguments, **options)
    with torch.cuda.device(device):
        return function(*arguments, **options)


def operator(
    name: str,
    *,
    schema: str | None = None,
    mutates_args: Sequence[str] = (),
    refuses_gradient: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function an operator for every device.

    The decorated function calls the operator, its attribute `overload`, or in eager mode the
    function itself, which is `overload.function`.

    Args:
        name: without namespace.
        schema: arguments and results; None to infer them from annotations. The first argument is a
            tensor.
        mutates_args: the arguments that the function writes.
        refuses_gradient: differentiating the results is an InputError.
    """

    def register(function: Callable[..., Any]) -> Any:
        """Register the function and return it with a short way around the dispatcher for plain
        tensors."""
        signature = schema or infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))

        @wraps(function)
        def guarded(*arguments: Any, **options: Any) -> Any:
            return on_device_of(arguments[0], function, *arguments, **options)

        LIBRARY.impl(name, guarded, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.moesaic, name).default
        overload.function = guarded
        if refuses_gradient:
            register_autograd(overload, _refuse, lib=LIBRARY)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            """Call the function directly where the dispatcher would have nothing to do, else the
            operator."""
            # the compiler and the active modes see operators only
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                return overload(*arguments)
            if type(arguments[0]) is not Tensor:  # a subclass
                return overload(*arguments)
            if refuses_gradient and torch.is_grad_enabled():  # autograd calls `_refuse`
                return overload(*arguments)
            return guarded(*arguments)

        call.overload = overload  # type: ignore[attr-defined]
        return call

    return register


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "a MoE layer has no second derivatives: its backward pass cannot be differentiated; use "
        "losses of outputs and first gradients, or finite differences of the latter"
    )
