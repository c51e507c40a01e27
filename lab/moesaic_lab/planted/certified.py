"""Faults of other people's expert parallelism, planted into systems that pass, which `certify` must
notice.

They were reported in August and September 2026. Each let a training run go on with wrong numbers.
A patch is a context manager that replaces parts of a library while it is entered; a system is an
implementation of a layer that `certify` accepts, such as that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import isfunction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.testing.certify import CLIPPED, LAYER_SITUATIONS, certify
from moesaic.testing.equivalence import Patch
from moesaic.testing.runner import on_ranks
from moesaic_lab import certified_systems


def _replaced(*places: tuple[Any, str, Any]) -> Patch:
    """Return a patch that replaces an attribute of each (owner, or a function that imports it;
    name; value)."""

    def patch() -> ExitStack:
        """Replace the attributes, until the stack is closed."""
        stack = ExitStack()
        for owner, name, value in places:
            module_or_class = owner() if isfunction(owner) else owner
            stack.enter_context(mock.patch.object(module_or_class, name, value))
        return stack

    return patch


def _expert_parallel() -> Any:
    """Return the module of transformers' expert parallelism, which is imported only when a fault is
    planted."""
    return import_module(certified_systems.OF_TRANSFORMERS)


_masked_fill = Tensor.masked_fill


def _masked_forward_only(self: Tensor, mask: Tensor, value: float) -> Tensor:
    """Fill as usual, but let the gradient through as if nothing were filled."""
    change = _masked_fill(self, mask, value) - self
    return self + change.detach()


def _rows_left(self: Tensor, mask: Tensor, value: float) -> Tensor:
    """Fill all except whole rows, whose mask is (rows, 1)."""
    is_of_rows = mask.dim() == 2 and mask.shape[1] == 1
    return self if is_of_rows else _masked_fill(self, mask, value)


Norm = Callable[[Tensor, Tensor], Tensor]
"""Computes a "global" norm from the squared norms of the shared gradients and of the rank's own
experts' gradients."""


def _mean_of_ranks(shared: Tensor, own: Tensor) -> Tensor:
    """Return the mean of the ranks' norms."""
    norm = (shared + own).sqrt()
    dist.all_reduce(norm)
    return norm / dist.get_world_size()


def _clip_by(norm_of: Norm, module: nn.Module, max_norm: float) -> Tensor:
    """Clip as `moesaic.clip_grad_norm_` does, but to another norm."""
    shared_square = torch.zeros((), dtype=torch.float64)
    own_square = torch.zeros((), dtype=torch.float64)
    local_gradients = []
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):  # of this rank's own experts
            local = gradient.to_local()
            own_square += local.double().square().sum()
        else:
            local = gradient
            shared_square += local.double().square().sum()
        local_gradients.append(local)
    norm = norm_of(shared_square, own_square)
    for local in local_gradients:
        local.mul_(float((max_norm / norm).clamp(max=1)))
    return norm


def _clips_by(norm_of: Norm) -> Patch:
    """Return a bug: gradients are clipped by another norm."""
    return _replaced((certified_systems, "clip_grad_norm_", partial(_clip_by, norm_of)))


@dataclass(frozen=True)
class Fault:
    """A fault that `certify` must notice."""

    name: str
    source: str
    """Where it was reported, as repository#number."""
    system: str
    """Key of `SYSTEMS`: whose layer it is planted into."""
    patch: Patch
    wrong: frozenset[str]
    """Exactly the quantities that must be wrong; others must be right."""


_UPSTREAM = frozenset({"tokens", "router", *CLIPPED})
FAULTS = (
    Fault(
        "zero weights hide masked copies in the forward pass only",
        "transformers#48687",
        "transformers-all_reduce-batched_mm",
        _replaced((Tensor, "masked_fill", _masked_forward_only)),
        _UPSTREAM,
    ),
    Fault(
        "rows that the product leaves unwritten are read",
        "transformers#48205",
        "transformers-all_reduce-grouped_mm",
        _replaced((Tensor, "masked_fill", _rows_left)),
        frozenset({"output"}),
    ),
    Fault(
        "gradients of rows that the product leaves unwritten are read",
        "transformers#48205",
        "transformers-all_reduce-grouped_mm",
        _replaced((Tensor, "masked_fill_", lambda self, *_: self)),
        _UPSTREAM - {"router"},
    ),
    Fault(
        "gradients of a shared batch are not summed over the ranks",
        "transformers#48205",
        "transformers-all_reduce-eager",
        _replaced(
            (
                _expert_parallel,
                "_AllReduceBackward",
                SimpleNamespace(apply=lambda tensor, group: tensor),
            )
        ),
        _UPSTREAM,
    ),
    Fault(
        "each rank clips by the norm of its own experts",
        "Automodel#3816",
        "moesaic",
        _clips_by(lambda shared, own: (shared + own).sqrt()),
        frozenset(CLIPPED),
    ),
    Fault(
        "the norm is the mean of the ranks' norms",
        "DeepSpeed#8475, #8478",
        "moesaic",
        _clips_by(_mean_of_ranks),
        frozenset(CLIPPED),
    ),
    Fault(
        "the norm leaves out the experts",
        "DeepSpeed#8613",
        "moesaic",
        _clips_by(lambda shared, own: shared.sqrt()),
        frozenset(CLIPPED),
    ),
)


def wrong_quantities() -> list[tuple[set[str], set[str]]]:
    """Return for each fault what `certify` finds wrong without it and with it; all ranks call it
    together."""
    wrong = []
    for fault in FAULTS:
        layer = certified_systems.SYSTEMS[fault.system].layer
        without_fault = _wrong_in(layer)
        with fault.patch():
            with_fault = _wrong_in(layer)
        wrong.append((without_fault, with_fault))
    return wrong


def _wrong_in(layer: Any) -> set[str]:
    """Return what `certify` finds wrong in a layer: quantities, or what has failed."""
    findings = certify(layer, situations=LAYER_SITUATIONS[:1])
    return {finding.failed or finding.quantity for finding in findings if not finding.holds()}


def planted_rows() -> list[dict[str, Any]]:
    """Plant every fault on two ranks; return a row for each that says whether exactly what it makes
    wrong was found."""
    of_ranks = on_ranks(2, wrong_quantities, timeout_seconds=certified_systems.TIMEOUT_SECONDS)
    rows = []
    for fault, (without_fault, with_fault) in zip(FAULTS, of_ranks[0]):
        row = {
            "system": fault.system,
            "fault": fault.name,
            "source": fault.source,
            "wrong": sorted(with_fault),
            "caught": not without_fault and with_fault == fault.wrong,
        }
        rows.append(row)
    return rows
