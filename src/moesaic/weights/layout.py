"""Describes where a format stores a model's elements, as blocks.

A block maps a rectangle of a stored tensor to a rectangle of one of the model's tensors, which are
those that a transformers model of this configuration has in memory. A format consists of such
blocks only. Hence any two formats can be converted into each other, conversions never compute with
values, and missing or duplicate elements are detected before a byte is read.

A region gives the indices along each dimension; as in NumPy, a single index removes its dimension.
So the ranges of a block's two rectangles pair up in order, and single indices have no counterpart:
the matrix of expert 3 on the hub, ([0, rows), [0, columns)), is (3, [0, rows), [0, columns)) of the
stacked tensor in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from moesaic.errors import InputError

Dim: TypeAlias = "int | range"
"""Indices along one dimension of a tensor: a range, or a single index. As in NumPy, a single index
removes the dimension."""
Region: TypeAlias = tuple[Dim, ...]
BUFFER = 16 * 2**20
"""Largest number of bytes that are moved at once."""


class Readable(Protocol):
    """A tensor that can be read region by region."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def read(self, at: Region) -> np.ndarray:
        """Return a contiguous copy of the elements in a region, reinterpreted as integers of the
        same size."""


@dataclass(frozen=True)
class Computed:
    """A tensor that is computed when it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[Region], torch.Tensor]

    def read(self, at: Region) -> np.ndarray:
        """Return the elements in a region, as integers of the same size; the same in every call."""
        as_integers = getattr(torch, f"int{8 * self.dtype.itemsize}")
        return self.make(at).contiguous().view(as_integers).numpy()


@dataclass(frozen=True)
class StoredBlock:
    """A rectangle of a stored tensor that holds a rectangle of one of the model's tensors."""

    stored: str
    at: Region
    """The rectangle of the stored tensor."""
    tensor: str
    index: Region
    """The rectangle of the model's tensor."""
    transposed: bool = False
    """Whether the stored rectangle is transposed in its last two dimensions."""

    def flipped(self) -> StoredBlock:
        """Return the block with the roles of the stored and the model's tensor exchanged."""
        return StoredBlock(
            self.tensor,
            at=self.index,
            tensor=self.stored,
            index=self.at,
            transposed=self.transposed,
        )

    def cut(self, region: Region) -> StoredBlock | None:
        """Return the part of this block inside a region of the stored tensor; None if they do not
        overlap."""
        at: list[Dim] = []
        for own, wanted in zip(self.at, region):
            shared = _intersect(own, wanted)
            if shared is None:
                return None
            at.append(shared)

        # Cuts each range of the model's tensor as its counterpart in the stored one was cut.
        index = list(self.index)
        stored_dims = [number for number, dim in enumerate(self.at) if isinstance(dim, range)]
        tensor_dims = [number for number, dim in enumerate(self.index) if isinstance(dim, range)]
        if self.transposed:
            tensor_dims[-2:] = reversed(tensor_dims[-2:])
        for stored_dim, tensor_dim in zip(stored_dims, tensor_dims):
            in_stored = self.at[stored_dim]
            in_tensor = self.index[tensor_dim]
            assert isinstance(in_stored, range)
            assert isinstance(in_tensor, range)
            index[tensor_dim] = _matching(in_stored, part=at[stored_dim], target=in_tensor)
        return StoredBlock(
            self.stored,
            at=tuple(at),
            tensor=self.tensor,
            index=tuple(index),
            transposed=self.transposed,
        )


def _intersect(a: Dim, b: Dim) -> Dim | None:
    """Return the indices that are in both `a` and `b`; None if there are none."""
    if isinstance(a, int):
        is_shared = a == b if isinstance(b, int) else a in b
        return a if is_shared else None
    if isinstance(b, int):
        return b if b in a else None
    if a.step != b.step and 1 not in (a.step, b.step):
        raise NotImplementedError("rows of two different steps")

    # The result is the part of `strided` between the ends of `window`, whose step is 1 or the same.
    window, strided = (a, b) if a.step == 1 else (b, a)
    if not window or not strided:
        return None
    if window.step > 1 and (window.start - strided.start) % strided.step:
        return None  # of the same step, but out of phase
    # how many elements of `strided` lie before the window, and how many before the window's end
    num_before = -((strided.start - window.start) // strided.step)  # rounded up
    first = max(0, num_before)
    end = min(len(strided), (window[-1] - strided.start) // strided.step + 1)
    return strided[first:end] if first < end else None


def _matching(whole: range, part: Dim, target: range) -> Dim:
    """Return the elements of `target` at the positions that the elements of `part` have in
    `whole`; `part` is a sub-range of `whole`, or one of its elements."""
    if isinstance(part, int):
        return target[whole.index(part)]
    first = whole.index(part[0])
    # how many positions of `whole` one step of the part is
    step = max(1, part.step // whole.step)
    last = first + (len(part) - 1) * step
    return target[first : last + 1 : step]


def full_region(shape: Iterable[int]) -> tuple[range, ...]:
    """Return the region that covers a whole tensor."""
    return tuple(range(size) for size in shape)


def ranges(region: Region) -> tuple[range, ...]:
    """Return a region with every single index as a range."""
    return tuple(dim if isinstance(dim, range) else range(dim, dim + 1) for dim in region)


def volume(region: Region) -> int:
    """Return the number of elements in a region."""
    return math.prod(len(dim) for dim in region if isinstance(dim, range))


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[range, ...]]:
    """Yield contiguous regions of at most `BUFFER` bytes that cover a tensor in row-major order.

    Args:
        itemsize: bytes of an element.
    """
    if not shape:
        yield ()
        return
    # The first dimension of which a single index (a "row") fits into the buffer is cut into runs of
    # rows; of dimensions before it, a region has one index each.
    split = 0
    while math.prod(shape[split + 1 :]) * itemsize > BUFFER:
        split += 1
    inner = full_region(shape[split + 1 :])
    row_bytes = math.prod(shape[split + 1 :]) * itemsize
    rows_at_once = max(1, BUFFER // max(1, row_bytes))  # an empty tensor's rows have 0 bytes
    for outer in np.ndindex(*shape[:split]):
        outer_dims = [range(index, index + 1) for index in outer]
        for start in range(0, shape[split], rows_at_once):
            rows = range(start, min(start + rows_at_once, shape[split]))
            yield (*outer_dims, rows, *inner)


class BlockIndex:
    """Blocks by the name of their stored tensor and, for blocks of a single expert or layer, by its
    number."""

    def __init__(self) -> None:
        # stored name -> number (None of blocks of no single expert or layer) -> blocks
        self._blocks: dict[str, dict[int | None, list[StoredBlock]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, block: StoredBlock) -> None:
        """Add a block to the index."""
        number = block.at[0] if block.at and isinstance(block.at[0], int) else None
        self._blocks[block.stored][number].append(block)

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def cuts(self, name: str, region: Region) -> Iterator[tuple[StoredBlock, StoredBlock]]:
        """Yield (block, the part of the block inside the region) for each block of a tensor that
        overlaps a region."""
        blocks = self._blocks[name]
        numbers: list[int | None] = list(blocks)
        if len(blocks) > 1:
            # Only the experts or layers of the region, and the blocks that are of no single one.
            outer = region[0] if region else ()
            numbers = [outer, None] if isinstance(outer, int) else [*outer, None]
        for number in numbers:
            for block in blocks.get(number, ()):
                part = block.cut(region)
                if part is not None:
                    yield block, part


class Layout:
    """All blocks of a format for one model.

    Args:
        shapes: shapes of the model's tensors.
        title: name of the format, for messages.
        copies: whether one stored element may be several elements of the model.

    Raises:
        InputError: the format has no place for an element of the model. The message names the
            tensors.
    """

    def __init__(
        self,
        blocks: Iterable[StoredBlock],
        shapes: Mapping[str, tuple[int, ...]],
        title: str,
        *,
        copies: bool = False,
    ) -> None:
        self.by_stored = BlockIndex()
        self.by_tensor = BlockIndex()
        """The blocks flipped: their `stored` and `at` are the model's tensor, `tensor` and `index`
        the stored one."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the stored tensors: the smallest ones that hold all their blocks."""
        num_placed: dict[str, int] = defaultdict(int)  # elements of the model's tensors, by name
        for block in blocks:
            self.by_stored.add(block)
            self.by_tensor.add(block.flipped())
            num_placed[block.tensor] += volume(block.index)
            # the size that the stored tensor must have along each dimension to hold the block
            ends = tuple(dim[-1] + 1 for dim in ranges(block.at))
            shape_so_far = self.shapes.get(block.stored, ends)
            self.shapes[block.stored] = tuple(
                max(size, end) for size, end in zip(shape_so_far, ends)
            )

        lost = [name for name, shape in shapes.items() if num_placed[name] != math.prod(shape)]
        if lost:
            raise InputError(
                f"{title} has no place for {first_names(lost)}: convert this model to another "
                "format"
            )
        if copies:
            return
        # blocks that hold every stored element once: no gaps, no overlaps
        for name, shape in self.shapes.items():
            num_filled = sum(
                volume(part.at) for _, part in self.by_stored.cuts(name, full_region(shape))
            )
            assert num_filled == math.prod(shape), name


def identity(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout in which every tensor is stored as the model has it in memory."""
    blocks = [
        StoredBlock(name, at=full_region(shape), tensor=name, index=full_region(shape))
        for name, shape in shapes.items()
    ]
    return Layout(blocks, shapes, "the model")


@dataclass(frozen=True)
class GatheredTensor:
    """A tensor of one layout that is gathered from tensors of another layout when it is read."""

    name: str
    layout: Layout
    source: Layout
    tensors: Mapping[str, Readable]
    """The source's tensors, by its stored names."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in `layout`."""
        return self.layout.shapes[self.name]

    @cached_property
    def source_names(self) -> list[str]:
        """Names of the source's stored tensors from which this tensor is gathered."""
        names: dict[str, None] = {}  # a set that keeps the order
        # blocks of `by_tensor` are flipped: their `tensor` is the stored one
        for _, own_part in self.layout.by_stored.cuts(self.name, full_region(self.shape)):
            for block, _ in self.source.by_tensor.cuts(own_part.tensor, own_part.index):
                names[block.tensor] = None
        return list(names)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The common dtype of the tensors from which this one is gathered.

        Raises:
            InputError: their dtypes differ.
        """
        name_with = {self.tensors[name].dtype: name for name in self.source_names}
        dtype, *others = name_with
        if others:
            other = others[0]
            raise InputError(
                f"{name_with[dtype]} is {dtype}, {name_with[other]} {other}, and both become "
                f"{self.name}: give them one dtype first"
            )
        return dtype

    def read(self, at: Region) -> np.ndarray:
        """Return the elements in a region, gathered from all blocks of the source that overlap
        it."""
        out = np.empty([len(dim) for dim in at if isinstance(dim, range)], integer(self.dtype))
        # A part of this tensor -> the model's elements in it -> the source's tensors that hold
        # these, and back again to find where each of them belongs in this tensor.
        for _, own_part in self.layout.by_stored.cuts(self.name, at):
            for _, source_part in self.source.by_tensor.cuts(own_part.tensor, own_part.index):
                # `source_part.at` are elements of the model's tensor, as the part was flipped
                target = own_part.flipped().cut(source_part.at)
                assert target is not None
                values = self.tensors[source_part.tensor].read(source_part.index)
                if source_part.transposed != own_part.transposed:
                    values = values.swapaxes(-1, -2)
                out[_numpy_index(target.index, at)] = values
        return out


def _numpy_index(places: Region, at: Region) -> tuple[Any, ...]:
    """Return the NumPy index of the region `places` within an array that holds the region `at`."""
    index: list[int | slice] = []
    for place, dim in zip(places, at):
        if not isinstance(dim, range):
            continue  # the array has no such dimension
        if isinstance(place, int):
            index.append(dim.index(place))
            continue
        # positions in the array are evenly spaced, as the indices in `place` are; a single one has
        # no step, for which 1 stands
        first = dim.index(place[0])
        last = dim.index(place[-1])
        num_steps = max(1, len(place) - 1)
        step = max(1, (last - first) // num_steps)
        index.append(slice(first, last + 1, step))
    return tuple(index)


def integer(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the integer dtype of the same size as a dtype, in which elements are moved."""
    return np.dtype(f"i{dtype.itemsize}")


def first_names(names: Iterable[str]) -> str:
    """Return names as text for a message: the first three, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
