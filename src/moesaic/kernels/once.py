"""Marks the custom ops of backward passes as differentiable no further, in words of ours."""

from __future__ import annotations

from typing import NoReturn

from torch.library import CustomOpDef  # type: ignore[attr-defined]

from moesaic.errors import InputError


def differentiable_once(*operators: CustomOpDef) -> None:
    """Make the gradient of operators that compute gradients an InputError."""
    for operator in operators:
        operator.register_autograd(_refuse)


def _refuse(*_: object) -> NoReturn:
    raise InputError(
        "a MoE layer has no second derivatives: its backward pass cannot be differentiated; use losses of outputs and first "
        "gradients, or finite differences of the latter"
    )
