"""A stand-in for a GPU: tensors that report a CUDA device, hold their values on the CPU, and record
host waits.

`StandIn` is a context manager. Within it `device="cuda:0"` creates such tensors, and operations on
them run on the CPU. Each operation for which the host would wait for the device is recorded, with
the line of Moesaic that called it: numbers, lists and copies read by the host, shapes that depend
on values, and uploads from memory that is not pinned. Two more things are recorded apart. Uploads
from pinned memory do not wait, but a CUDA graph cannot contain them. Sums of several floats into
one place use atomics on a GPU, in varying order. Operations that mix tensors of the device and of
the host raise, as on a GPU.

The stand-in measures no times and does not show what a CUDA kernel can do.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import moesaic
from moesaic.kernels import pick

DEVICE = torch.device("cuda", 0)
"""The device that the tensors report."""
_PACKAGE = Path(moesaic.__file__).parent
"""The library's folder. An environment may lie in a clone whose folder has the library's name."""
_IGNORED = "loopback.py"
"""File whose waits are not recorded: the loopback transport compares messages, which no GPU
transport does."""
aten = torch.ops.aten
_ALWAYS = {
    aten._local_scalar_dense.default: "a number brought to the host",
    aten.is_nonzero.default: "a truth value brought to the host",
    aten.equal.default: "a comparison of whole tensors",
    aten.nonzero.default: "nonzero, whose shape depends on values",
    aten.masked_select.default: "masked_select, whose shape depends on values",
    aten.bincount.default: "bincount, whose shape depends on values",
    aten._unique2.default: "unique, whose shape depends on values",
    aten.unique_dim.default: "unique, whose shape depends on values",
    aten.unique_consecutive.default: "unique, whose shape depends on values",
}
_ADDS = (aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_)


@dataclass
class Record:
    """What a stand-in recorded since it was created or `clear` was called. Each entry names the
    calling line."""

    waits: list[str] = field(default_factory=list)
    """Operations for which the host waits."""
    uploads: list[str] = field(default_factory=list)
    """Copies from pinned memory: the host does not wait for them, but no CUDA graph can contain
    them."""
    unordered: list[str] = field(default_factory=list)
    """Sums of floats in an order that varies, so that their last bits vary from run to run."""

    def clear(self) -> None:
        """Delete all entries."""
        self.waits.clear()
        self.uploads.clear()
        self.unordered.clear()


class DeviceTensor(Tensor):
    """A tensor that reports `DEVICE` as its device; `on_cpu` holds its values."""

    on_cpu: Tensor
    of: StandIn

    @staticmethod
    def __new__(cls, on_cpu: Tensor, of: StandIn) -> DeviceTensor:
        """Wrap a tensor of the CPU. C++ sees a meta tensor, without memory, so that it looks for no
        CUDA driver."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=torch.device("meta"),
        )
        tensor.on_cpu = on_cpu
        tensor.of = of
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """`DEVICE`."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    def tolist(self) -> Any:
        """Return the values and record a wait."""
        self.of.note("a list brought to the host")
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise a `TypeError`, as for a tensor on a GPU."""
        raise TypeError(
            f"a tensor on {DEVICE} has no numpy array (force={force}): call .cpu() first"
        )

    def data_ptr(self) -> int:
        """Return the address of the values on the CPU."""
        return self.on_cpu.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape and dtype without values: printing values would wait."""
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation by the stand-in that created the first tensor of the device."""
        first = next(
            tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, DeviceTensor)
        )
        return first.of.run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """The context manager in which this thread has a simulated GPU; see the module's docstring."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    """Keeps PyTorch from looking for a CUDA driver when a device is named."""

    def __init__(self, record: Record | None = None) -> None:
        super().__init__()
        self.forward = 0
        """Waits in the forward pass of a step. Callers that count both passes set it after
        forward."""
        self.record = Record() if record is None else record
        self._host_factories = _HostFactories()

    def __enter__(self) -> StandIn:
        """Enter the context; contexts may be nested."""
        self._host_factories.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the context."""
        super().__exit__(*error)
        self._host_factories.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation by `run`."""
        return self.run(func, args, kwargs or {})

    def note(self, what: str, to: list[str] | None = None) -> None:
        """Record a wait with the calling line, or add the entry to the list `to` of the record."""
        line = _line()
        if not line.startswith(_IGNORED):
            (self.record.waits if to is None else to).append(f"{what}: {line}")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values, and record it if the host would wait for it."""
        on_device = [
            tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, DeviceTensor)
        ]
        if func.namespace == "moesaic" and on_device:
            with self:
                return _implementation(func)(*args, **kwargs)
        target = kwargs.get("device")
        returns_on_device = bool(on_device) if target is None else _is_claimed(target)
        self._note_waits(func, args, kwargs, on_device, target)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        plain_args, plain_kwargs = tree_map_only(
            DeviceTensor, lambda tensor: tensor.on_cpu, (args, kwargs)
        )
        if func is aten.mm.dtype:  # 16-bit operands, float32 result: CUDA has it, the CPU does not
            plain_args = tuple(operand.float() for operand in plain_args[:2])
            func = aten.mm.default
        result = func(*plain_args, **plain_kwargs)
        output = _written_into(func, args, kwargs)
        if output is not None and func._schema.returns:
            return output
        return (
            tree_map_only(Tensor, lambda tensor: DeviceTensor(tensor, self), result)
            if returns_on_device
            else result
        )

    def _note_waits(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        on_device: list[DeviceTensor],
        target: Any,
    ) -> None:
        """Record an operation that waits, and raise for one that mixes devices."""
        if func in (aten._to_copy.default, aten.copy_.default):
            self._note_copy(func, args, target)
            return
        on_host = [
            entry
            for entry in _tensors((args, kwargs))
            if not isinstance(entry, DeviceTensor) and entry.dim()
        ]
        if on_device and on_host:
            raise AssertionError(f"{func} has tensors of {DEVICE} and of the CPU: {_line()}")
        if not on_device:
            return
        name = func.overloadpacket
        if func in _ALWAYS:
            self.note(_ALWAYS[func])
        elif name is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.note("repeat_interleave without output_size")
        elif name is aten.segment_reduce and not kwargs.get("unsafe", False):
            self.note("segment_reduce that checks lengths")
        elif name is aten._grouped_mm and on_device[0].dtype != torch.bfloat16:
            self.note(
                "grouped_mm of another dtype than bfloat16, which loops over offsets on the host"
            )
        elif (
            name in _ADDS
            and on_device[0].is_floating_point()
            and _has_repeated(args[1], values(args[2]))
        ):
            self.note(f"{name} of several floats to one place", self.record.unordered)
        elif name in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            masks = [
                entry
                for entry in args[1]
                if entry is not None and entry.dtype in (torch.bool, torch.uint8)
            ]
            fills = name is not aten.index and args[2].numel() == 1
            if masks and not fills:
                self.note("indexing by a mask, whose shape depends on values")

    def _note_copy(self, func: Any, args: Any, target: Any) -> None:
        if func is aten.copy_.default:
            to, source = args[:2]
            arrives = isinstance(to, DeviceTensor)
            leaves = isinstance(source, DeviceTensor)
        else:
            source = args[0]
            leaves = isinstance(args[0], DeviceTensor)
            arrives = leaves if target is None else _is_claimed(target)
        if leaves and not arrives:
            self.note("a copy to the host")
        elif arrives and not leaves:
            is_pinned = getattr(source, "_is_pinned", False)
            if is_pinned:
                self.note("an upload", self.record.uploads)
            else:
                self.note("an upload from memory that is not pinned")


class _HostFactories(TorchFunctionMode):
    """Handles functions that do not reach the dispatcher as needed: `torch.tensor` with a device,
    and `Tensor.pin_memory`.

    Tensors of Python numbers are made on the host and then uploaded. Pinned memory, which needs a
    GPU, becomes a marked copy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned._is_pinned = True
            return pinned
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_claimed(kwargs.get("device") or "cpu"):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def pretending(*, triton: bool = False) -> Iterator[None]:
    """Make the library treat `DEVICE` as a GPU, for all threads.

    Args:
        triton: whether the GPU runs Triton's kernels, which needs Triton's interpreter.
    """
    with (
        mock.patch.object(pick, "_runs_triton", return_value=triton),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.object(torch.cuda, "current_stream"),
        mock.patch.object(torch.cuda, "current_device", return_value=DEVICE.index),
    ):
        yield


@contextmanager
def interpreting() -> Iterator[None]:
    """Let Triton's interpreter, if it is on, accept tensors of the stand-in, for all threads."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def on_values(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in tree_leaves((args, kwargs)):
            if hasattr(argument, "base"):  # a tensor descriptor
                argument.base = values(argument.base)
        with _disable_current_modes():
            launch(
                self,
                *tree_map_only(DeviceTensor, values, args),
                **tree_map_only(DeviceTensor, values, kwargs),
            )

    with mock.patch.object(interpreter.GridExecutor, "__call__", on_values):
        yield


class _Event:
    """A CUDA event for which all earlier work has already finished."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self, _: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return (later._at - self._at) * 1e3


def to_device(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to `DEVICE` in place. Call it within a `StandIn`."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                moved = nn.Parameter(
                    parameter.detach().to(DEVICE), requires_grad=parameter.requires_grad
                )
                part._parameters[name] = moved
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = None if buffer is None else buffer.to(DEVICE)
    return module


def values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of the device without recording a wait; return any other tensor
    unchanged."""
    return tensor.on_cpu if isinstance(tensor, DeviceTensor) else tensor


def _is_claimed(device: Any) -> bool:
    """Return whether `device` is the stand-in's, by its name or as C++ sees it ("meta")."""
    return torch.device(device).type in (DEVICE.type, "meta")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_repeated(dim: int, index: Tensor) -> bool:
    """Return whether an index has a repeated value along a dimension."""
    along = dim if index.dim() > 1 else 0
    return bool((index.sort(along).values.diff(dim=along) == 0).any())


def _implementation(func: Any) -> Callable[..., Any]:
    """Return the Python function behind an operator of Moesaic. Running it lets the stand-in see
    the operations it calls."""
    function: Callable[..., Any] = func.function
    return function


def _written_into(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the tensor that an operation writes into and returns; None for an operation that
    returns a new tensor."""
    if "out" in kwargs:
        return kwargs["out"]
    is_in_place = func._schema.is_mutable and func._opname.endswith("_")
    return args[0] if is_in_place else None


def _line() -> str:
    """Return the innermost line of Moesaic in the call stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.name}:{frame.lineno} {frame.name}"
    return "nowhere in Moesaic"
