"""Describes where a format stores a model's elements, as blocks.

A block maps a rectangle of a stored tensor to a rectangle of one of the model's tensors, which are
those that a transformers model of this configuration has in memory. A format consists of such
blocks only. Hence any two formats can be converted into each other, conversions never compute with
values, and missing or duplicate elements are detected before a byte is read.
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
        """Return the elements in a region; the same in every call."""
        return (
            self.make(at).contiguous().view(getattr(torch, f"int{8 * self.dtype.itemsize}")).numpy()
        )


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
        for pair in zip(self.at, region):
            shared = _intersect(*pair)
            if shared is None:
                return None
            at.append(shared)
        index = list(self.index)
        stored_dims = [i for i, dim in enumerate(self.at) if isinstance(dim, range)]
        tensor_dims = [i for i, dim in enumerate(self.index) if isinstance(dim, range)]
        if self.transposed:
            tensor_dims[-2:] = reversed(tensor_dims[-2:])
        for i, j in zip(stored_dims, tensor_dims):
            whole = self.at[i]
            target = self.index[j]
            assert isinstance(whole, range)
            assert isinstance(target, range)
            index[j] = _matching(whole, at[i], target)
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
        return a if a == b or (isinstance(b, range) and a in b) else None
    if isinstance(b, int):
        return b if b in a else None
    if a.step != b.step and 1 not in (a.step, b.step):
        raise NotImplementedError("rows of two different steps")
    # the elements of `fine` inside `wide`, which has a step of 1 or the same step
    wide, fine = (a, b) if a.step == 1 else (b, a)
    if not wide or not fine or (wide.step > 1 and (wide.start - fine.start) % fine.step):
        return None
    first = max(0, -((fine.start - wide.start) // fine.step))
    last = min(len(fine), (wide[-1] - fine.start) // fine.step + 1)
    return fine[first:last] if first < last else None


def _matching(whole: range, part: Dim, target: range) -> Dim:
    """Return the elements of `target` at the positions that the elements of `part` have in
    `whole`; `part` is a sub-range of `whole`, or one of its elements."""
    if isinstance(part, int):
        return target[whole.index(part)]
    first = whole.index(part[0])
    # `_intersect` keeps a step or widens a step of 1, so this is at least 1; a slice refuses 0
    step = max(1, part.step // whole.step)
    return target[first : first + (len(part) - 1) * step + 1 : step]


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
    """Yield contiguous regions of at most `BUFFER` bytes (or one row) that cover a tensor in
    row-major order."""
    inner = next(
        (d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= BUFFER), len(shape)
    )
    if inner >= len(shape):
        yield full_region(shape)
        return
    rows = max(1, BUFFER // max(1, math.prod(shape[inner + 1 :]) * itemsize))
    for outer in np.ndindex(*shape[:inner]):
        for start in range(0, shape[inner], rows):
            rows_here = range(start, min(start + rows, shape[inner]))
            yield (*(range(i, i + 1) for i in outer), rows_here, *full_region(shape[inner + 1 :]))


class BlockIndex:
    """Blocks by the name of their stored tensor and, for blocks of a single expert or layer, by its
    number."""

    def __init__(self) -> None:
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
        outer = region[0] if region else ()
        for number in (
            (*([outer] if isinstance(outer, int) else outer), None)
            if len(blocks) > 1
            else list(blocks)
        ):
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
        sizes: dict[str, int] = defaultdict(int)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for block in blocks:
            self.by_stored.add(block)
            self.by_tensor.add(block.flipped())
            sizes[block.tensor] += volume(block.index)
            ends = tuple(dim[-1] + 1 if isinstance(dim, range) else dim + 1 for dim in block.at)
            extent = self.shapes.get(block.stored, ends)
            self.shapes[block.stored] = tuple(map(max, extent, ends))
        lost = [name for name, shape in shapes.items() if sizes[name] != math.prod(shape)]
        if lost:
            raise InputError(
                f"{title} has no place for {first_names(lost)}: convert this model to another "
                "format"
            )
        for name, shape in () if copies else self.shapes.items():
            assert math.prod(shape) == sum(
                volume(part.at) for _, part in self.by_stored.cuts(name, full_region(shape))
            ), name


def identity(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout in which every tensor is stored as the model has it in memory."""
    return Layout(
        (
            StoredBlock(n, at=full_region(s), tensor=n, index=full_region(s))
            for n, s in shapes.items()
        ),
        shapes,
        "the model",
    )


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
        own_parts = [
            part for _, part in self.layout.by_stored.cuts(self.name, full_region(self.shape))
        ]
        source_blocks = (
            block
            for own in own_parts
            for block, _ in self.source.by_tensor.cuts(own.tensor, own.index)
        )
        return list(dict.fromkeys(block.tensor for block in source_blocks))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The common dtype of the tensors from which this one is gathered.

        Raises:
            InputError: their dtypes differ.
        """
        dtypes = {self.tensors[name].dtype: name for name in self.source_names}
        if len(dtypes) != 1:
            (one, first), (other, second), *_ = dtypes.items()
            raise InputError(
                f"{first} is {one}, {second} {other}, and both become {self.name}: give them "
                "one dtype first"
            )
        return next(iter(dtypes))

    def read(self, at: Region) -> np.ndarray:
        """Return the elements in a region, gathered from all blocks of the source that overlap
        it."""
        out = np.empty([len(dim) for dim in at if isinstance(dim, range)], integer(self.dtype))
        for _, own_part in self.layout.by_stored.cuts(self.name, at):
            for _, source_part in self.source.by_tensor.cuts(own_part.tensor, own_part.index):
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
            continue
        if isinstance(place, int):
            index.append(dim.index(place))
        else:
            first = dim.index(place[0])
            last = dim.index(place[-1])
            step = (last - first) // max(1, len(place) - 1)
            index.append(slice(first, last + 1, max(1, step)))
    return tuple(index)


def integer(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the integer dtype of the same size as a dtype, in which elements are moved."""
    return np.dtype(f"i{dtype.itemsize}")


def first_names(names: Iterable[str]) -> str:
    """Return names as text for a message: the first three, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
