"""What torch keeps per thread or process and micro-batches in flight must not share: a micro-batch
that hands its turn over takes its own state with it.

Contexts such as `torch.no_grad()` or a checkpoint change this state when they are entered, and
restore what they found when they are left. With another micro-batch's turn in between, each would
restore what it found in the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

from moesaic.errors import InputError
from moesaic.runtime.routing_cache import generators, set_generators

_OF_STACKS = (
    "_len_torch_function_stack",
    "_get_function_stack_at",
    "_pop_torch_function_stack",
    "_push_on_torch_function_stack",
    "_len_torch_dispatch_stack",
    "_get_dispatch_stack_at",
    "_pop_torch_dispatch_stack",
    "_push_on_torch_dispatch_stack",
    "_is_fwd_grad_enabled",
    "_set_fwd_grad_enabled",
)
_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""What TorchDispatch modes note in their module, as far as a torch has them."""
_OF_HOOKS = (
    "_top_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks",
)


def check_torch() -> None:
    """Raise InputError if this torch lacks a private function by which states are exchanged."""
    missing = [f"torch._C.{name}" for name in _OF_STACKS if not hasattr(torch._C, name)]
    for name in _OF_HOOKS:
        if not hasattr(torch._C._autograd, name):
            missing.append(f"torch._C._autograd.{name}")
    if missing:
        raise InputError(
            f"in_flight needs {', '.join(missing)}, which torch {torch.__version__} lacks: run the "
            "micro-batches one after another, or use torch 2.10 to 2.15"
        )


@dataclass(frozen=True)
class _Autocast:
    """The state of autocast on one kind of device."""

    kind: str
    is_on: bool
    dtype: torch.dtype

    @classmethod
    def now(cls) -> tuple[_Autocast, ...]:
        """Return the states on the CPU and on the accelerator, if there is one."""
        kinds = ["cpu"]
        if torch.accelerator.is_available():
            kinds.append(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )

    def set(self) -> None:
        """Make this the state."""
        torch.set_autocast_enabled(self.kind, self.is_on)
        torch.set_autocast_dtype(self.kind, self.dtype)


@dataclass(frozen=True, kw_only=True)
class TorchState:
    """What torch keeps for the code that runs, as it was at one moment."""

    grad: bool
    forward_grad: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    autocast_depth: int
    """The number of autocast contexts; the cache of casts is cleared where the last one ends."""
    functions: list[Any]
    """The TorchFunction modes, the outermost first; the default device is one of them."""
    dispatches: list[Any]
    """The TorchDispatch modes, the outermost first."""
    flags: dict[str, bool]
    """What TorchDispatch modes note beside their stack."""
    default_device: Any
    """The TorchFunction mode that `set_default_device` entered; None if there is none."""
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]]
    """The hooks of saved tensors, the innermost first."""
    dtype: torch.dtype
    deterministic: tuple[bool, bool]
    """Whether deterministic algorithms are asked for, and whether they only warn."""
    ddp: Any
    """The DDP module whose forward pass runs; None if none does."""
    generators: tuple[Tensor, ...]
    """The states of the default generators: the CPU's, and the current GPU's if CUDA is in use."""

    @classmethod
    def now(cls) -> TorchState:
        """Return the present state."""
        hooks = _take_hooks()  # torch has no function that only lists them
        _put_hooks(hooks)
        return cls(
            grad=torch.is_grad_enabled(),
            forward_grad=torch._C._is_fwd_grad_enabled(),
            autocast=_Autocast.now(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            autocast_depth=_autocast_depth(),
            functions=[
                torch._C._get_function_stack_at(place)
                for place in range(torch._C._len_torch_function_stack())
            ],
            dispatches=[
                torch._C._get_dispatch_stack_at(place)
                for place in range(torch._C._len_torch_dispatch_stack())
            ],
            flags={
                name: getattr(_python_dispatch, name)
                for name in _FLAGS
                if hasattr(_python_dispatch, name)
            },
            default_device=getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
            hooks=hooks,
            dtype=torch.get_default_dtype(),
            deterministic=_deterministic(),
            ddp=DistributedDataParallel._get_active_ddp_module(),
            generators=generators(),
        )

    def set(self) -> None:
        """Make this the state. Casts that autocast keeps are dropped, since no one else may use
        them: they belong to one backward pass."""
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        for each in self.autocast:
            each.set()
        torch.set_autocast_cache_enabled(self.autocast_cache)
        _set_autocast_depth(self.autocast_depth)
        _set_function_modes(self.functions)
        _set_dispatch_modes(self.dispatches)
        for name, value in self.flags.items():
            setattr(_python_dispatch, name, value)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self.default_device
        _take_hooks()  # those that are set now
        _put_hooks(self.hooks)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if _deterministic() != self.deterministic:
            is_on, only_warns = self.deterministic
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        DistributedDataParallel._active_ddp_module = self.ddp
        set_generators(self.generators)


def _deterministic() -> tuple[bool, bool]:
    """Return whether deterministic algorithms are asked for, and whether they only warn."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _autocast_depth() -> int:
    """Return the number of open autocast contexts, which torch tells only as it changes."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    """Enter or leave contexts of autocast until `depth` of them are open."""
    present = _autocast_depth()
    for _ in range(present, depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, present):
        torch.autocast_decrement_nesting()
    if present or depth:
        torch.clear_autocast_cache()


def _set_function_modes(modes: list[Any]) -> None:
    """Make these the TorchFunction modes, the outermost first."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _set_dispatch_modes(modes: list[Any]) -> None:
    """Make these the TorchDispatch modes, the outermost first."""
    for _ in range(torch._C._len_torch_dispatch_stack()):
        torch._C._pop_torch_dispatch_stack(None)  # the innermost, of whatever kind
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _take_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Remove the hooks of saved tensors, and return them, the innermost first."""
    hooks = []
    # True: even while torch traces
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return hooks


def _put_hooks(hooks: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Add hooks of saved tensors, given the innermost first."""
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
