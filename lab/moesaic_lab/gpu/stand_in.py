"""A stand-in for a GPU: tensors that claim to be on one, hold real values on the CPU, and record what makes a host wait.

`StandIn` is entered like any context. Within it `device="cuda:0"` makes such tensors, operations on them are computed on the
CPU, and what would stop the host until the device is done is written down with the line of Moesaic that asked for it: numbers,
lists and copies brought to the host, shapes that depend on values, and uploads from memory that is not pinned. Uploads from
pinned memory are recorded apart: they do not wait, but no captured graph may hold them. So are floats of which a GPU adds
several to one place by atomics, in any order. An operation between a tensor of the device and one of the host is refused, as
a GPU refuses it.

What the stand-in does not show is what a CUDA kernel itself can and cannot do, and any time.
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
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moesaic.kernels import pick

DEVICE = torch.device("cuda", 0)
"""What the tensors claim."""
_HERE = Path(__file__).name
_IGNORED = "loopback.py"
"""The mailbox of the loopback compares messages with each other, which no transport of a GPU does."""
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
    """What was seen since it was made or cleared."""

    waits: list[str] = field(default_factory=list)
    """What stopped the host, with the line that asked."""
    uploads: list[str] = field(default_factory=list)
    """Copies from pinned memory, which stop nobody and which no graph can hold."""
    unordered: list[str] = field(default_factory=list)
    """Sums of floats whose order, and so whose last bits, vary from run to run."""

    def clear(self) -> None:
        """Forget everything."""
        self.waits.clear()
        self.uploads.clear()
        self.unordered.clear()


class DeviceTensor(Tensor):
    """A tensor that claims `DEVICE`; `on_cpu` holds its values."""

    on_cpu: Tensor
    of: StandIn

    @staticmethod
    def __new__(cls, on_cpu: Tensor, of: StandIn) -> DeviceTensor:
        """Wrap values of the CPU. C++ sees a tensor without memory, which belongs to no device that it would look for."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype,
            device=torch.device("meta"),
        )  # fmt: skip
        made.on_cpu, made.of = on_cpu, of
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device that is claimed."""
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
        """Return the values, after a wait."""
        self.of.note("a list brought to the host")
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as tensors of a GPU do."""
        raise TypeError(f"a tensor on {DEVICE} has no numpy array (force={force}): call .cpu() first")

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.on_cpu.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape alone: to print values waits."""
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation in the mode that is entered."""
        first = next(each for each in _tensors((args, kwargs)) if isinstance(each, DeviceTensor))
        return first.of.run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """While it is entered, this thread has a GPU that is none; see the module."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    """What tells PyTorch to look for no driver where a device is named."""

    def __init__(self, record: Record | None = None) -> None:
        super().__init__()
        self.forward = 0
        """Waits of a forward pass, for whoever tells the two passes of a step apart."""
        self.record = Record() if record is None else record
        self._made = _Made()

    def __enter__(self) -> StandIn:
        """Begin; within another one that one goes on after this."""
        self._made.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; see `run`."""
        return self.run(func, args, kwargs or {})

    def note(self, what: str, to: list[str] | None = None) -> None:
        """Record a wait, or something else in another list of the record."""
        line = _line()
        if not line.startswith(_IGNORED):
            (self.record.waits if to is None else to).append(f"{what}: {line}")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values, and record it where it would stop the host."""
        held = [each for each in _tensors((args, kwargs)) if isinstance(each, DeviceTensor)]
        if func.namespace == "moesaic" and held:
            with self:
                return _implementation(func)(*args, **kwargs)
        target = kwargs.get("device")
        here = bool(held) if target is None else _is_claimed(target)
        self._look(func, args, kwargs, held, target)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda each: each.on_cpu, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        written = _written(func, args, kwargs)
        if written is not None and func._schema.returns:
            return written
        return tree_map_only(Tensor, lambda each: DeviceTensor(each, self), found) if here else found

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any], held: list[DeviceTensor], target: Any) -> None:
        """Record what waits, and refuse what mixes devices."""
        if func in (aten._to_copy.default, aten.copy_.default):
            self._look_at_copy(func, args, target)
            return
        others = [each for each in _tensors((args, kwargs)) if not isinstance(each, DeviceTensor) and each.dim()]
        if held and others:
            raise AssertionError(f"{func} has tensors of {DEVICE} and of the CPU: {_line()}")
        if not held:
            return
        name = func.overloadpacket
        if func in _ALWAYS:
            self.note(_ALWAYS[func])
        elif name is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.note("repeat_interleave without output_size")
        elif name is aten.segment_reduce and not kwargs.get("unsafe", False):
            self.note("segment_reduce that checks lengths")
        elif name is aten._grouped_mm and held[0].dtype != torch.bfloat16:
            self.note("grouped_mm of another dtype than bfloat16, which loops over offsets on the host")
        elif name in _ADDS and held[0].is_floating_point() and _has_repeated(args[1], values(args[2])):
            self.note(f"{name} of several floats to one place", self.record.unordered)
        elif name in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            fills = name is not aten.index and args[2].numel() == 1
            if masks and not fills:
                self.note("indexing by a mask, whose shape depends on values")

    def _look_at_copy(self, func: Any, args: Any, target: Any) -> None:
        if func is aten.copy_.default:
            to, source = args[:2]
            arrives, leaves = isinstance(to, DeviceTensor), isinstance(source, DeviceTensor)
        else:
            source, leaves = args[0], isinstance(args[0], DeviceTensor)
            arrives = leaves if target is None else _is_claimed(target)
        if leaves and not arrives:
            self.note("a copy to the host")
        elif arrives and not leaves:
            is_pinned = getattr(source, "_is_pinned", False)
            if is_pinned:
                self.note("an upload", self.record.uploads)
            else:
                self.note("an upload from memory that is not pinned")


class _Made(TorchFunctionMode):
    """What no operation shows: tensors of Python's numbers, made on the host, and pinned memory, which needs a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            marked = args[0].clone()
            marked._is_pinned = True
            return marked
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_claimed(kwargs.get("device") or "cpu"):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def pretending(*, triton: bool = False) -> Iterator[None]:
    """Let the library take `DEVICE` for a GPU, with Triton's kernels or without; for all threads.

    Args:
        triton: whether the GPU runs Triton's kernels, which the interpreter must be there for.
    """
    with (
        mock.patch.object(pick, "_runs_triton", return_value=triton),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.object(torch.cuda, "current_stream"),
    ):
        yield


class _Event:
    """An event of a stream: all that was before it is done."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self, _: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return (later._at - self._at) * 1e3


def to_device(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to the device, in place; called within a `StandIn`."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                moved = nn.Parameter(parameter.detach().to(DEVICE), requires_grad=parameter.requires_grad)
                part._parameters[name] = moved
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = None if buffer is None else buffer.to(DEVICE)
    return module


def values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of the device, without a wait; of another one itself."""
    return tensor.on_cpu if isinstance(tensor, DeviceTensor) else tensor


def _is_claimed(device: Any) -> bool:
    """Whether this is the device, by its name or as C++ sees it."""
    return torch.device(device).type in (DEVICE.type, "meta")


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _has_repeated(dim: int, index: Tensor) -> bool:
    """Whether an index names a place more than once along a dimension."""
    along = dim if index.dim() > 1 else 0
    return bool((index.sort(along).values.diff(dim=along) == 0).any())


def _implementation(func: Any) -> Callable[..., Any]:
    """Return the Python function behind one of Moesaic's operators: run here, what it calls is seen too."""
    found: Callable[..., Any] = OPDEFS[f"{func.namespace}::{func._opname}"]._init_fn
    return found


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operation writes into and returns; None for one that makes something new."""
    if "out" in kwargs:
        return kwargs["out"]
    is_in_place = func._schema.is_mutable and func._opname.endswith("_")
    return args[0] if is_in_place else None


def _line() -> str:
    """Return the innermost line of Moesaic on the way here, this file's left out."""
    for frame in reversed(traceback.extract_stack()):
        if "moesaic" in frame.filename and Path(frame.filename).name != _HERE:
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
    return "nowhere in Moesaic"
