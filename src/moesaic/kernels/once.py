"""Marks the custom ops of backward passes as differentiable no further, in words of ours."""

from __future__ import annotations

from typing import NoReturn

from torch.library import register_autograd

from moesaic.errors import InputError


def differentiable_once(*names: str) -> None:
    """Make the gradient of operators that compute gradients, named without our namespace, an InputError."""
    for name in names:
        register_autograd(f"moesaic::{name}", _refuse)


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "a MoE layer has no second derivatives: its backward pass cannot be differentiated; use losses of outputs and first "
        "gradients, or finite differences of the latter"
    )
