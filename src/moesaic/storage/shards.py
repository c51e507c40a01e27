"""Tensors that ranks share, in safetensors files: each rank writes its own parts, and any mesh
reads what it needs.

    index.json
    shard-00001-model-00001-of-00002.safetensors
    shard-00001-model-00002-of-00002.safetensors
    ...

The files are those of torch's `HuggingFaceStorageWriter`, which writes no list of them.
`index.json` is that list: for each tensor its dtype, its shape, and where its parts lie.

torch's distributed checkpoint plans first and then writes or reads: each rank lists its items (a
part of a tensor each) in a plan, the plans of all ranks are adjusted together, and a planner hands
the tensors over. Names of tensors are called FQN there (fully qualified names).
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moesaic.errors import InputError
from moesaic.files import open_file, read_text, write

T = TypeVar("T")
INDEX = "index.json"
"""The list of the tensors, in the folder of their files."""
FILES = "shard-*.safetensors"
"""How the files of tensors are called."""
FILE_BYTES = 1 << 30
"""Largest size of a file, unless a single tensor is larger: while a file is written, its bytes are
in memory once more."""
MOST_INDEX = 1 << 30
"""The most bytes of an index."""


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor."""

    file: str
    """Name of the file in the folder. It has the part under the tensor's name."""
    offsets: tuple[int, ...]
    """Where the part begins in the tensor, per dimension."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor that is stored in parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def write_index(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the list of the tensors of a folder.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {}
    for name, entry in entries.items():
        tensors[name] = {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "parts": [asdict(part) for part in entry.parts],
        }
    write(folder / INDEX, json.dumps({"tensors": tensors}, indent=1) + "\n")


def read_index(folder: Path) -> dict[str, Entry]:
    """Return the tensors of a folder by name.

    Raises:
        InputError: the list is damaged, names something else than files of its folder, or lacks
            parts of a tensor.
        OSError: there is none, or it is not a file.
    """
    text = read_text(folder / INDEX, at_most=MOST_INDEX)
    try:
        tensors = _typed(_typed(json.loads(text), dict)["tensors"], dict)
        return {name: _entry(name, entry) for name, entry in tensors.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder / INDEX}: is not the list of a checkpoint's tensors ({reason:.200}): take "
            "another checkpoint, or delete this one"
        ) from error


def _entry(name: str, table: Any) -> Entry:
    """Return a tensor of the list, from its table in the JSON."""
    dtype_name = _typed(_typed(table, dict)["dtype"], str)
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype_name!r:.50}")
    shape = _sizes(table["shape"])
    parts = tuple(_part(name, shape, part) for part in _typed(table["parts"], list))
    num_listed = sum(math.prod(part.shape) for part in parts)
    if num_listed < math.prod(shape):
        raise ValueError(f"parts of {name} are in no file")
    return Entry(dtype, shape, parts)


def _part(name: str, whole: tuple[int, ...], table: Any) -> Part:
    """Return a part of a tensor of shape `whole`, from its table in the JSON."""
    file = _typed(_typed(table, dict)["file"], str)
    is_in_folder = PurePosixPath(file).name == file and "\\" not in file
    if not is_in_folder or not file.endswith(".safetensors"):
        raise ValueError(f"it names {file!r:.100}, which is not a file of tensors in its folder")
    offsets = _sizes(table["offsets"])
    shape = _sizes(table["shape"])
    is_inside = len(offsets) == len(shape) == len(whole)
    for offset, size, whole_size in zip(offsets, shape, whole):
        if offset + size > whole_size:
            is_inside = False
    if not is_inside:
        raise ValueError(f"a part of {name} lies outside of it")
    return Part(file, offsets, shape)


def _sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or offsets of a tensor's dimensions, which must be integers that fit 64 bits."""
    for value in _typed(values, list):
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{values!r:.100} are no sizes")
    return tuple(values)


def _typed(value: Any, kind: type[T]) -> T:
    """Return `value`, which must be of type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"it holds {type(value).__name__} instead of {kind.__name__}")
    return value


class IndexReader(HuggingFaceStorageReader):
    """Reads tensors by their list, instead of opening each file to see what it holds.

    Args:
        folder: the folder of the list and the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list as torch's.

        Raises:
            InputError, OSError: as `read_index`.
        """
        places = {}
        tensors = {}
        for name, entry in read_index(self._folder).items():
            chunks = []
            for part in entry.parts:
                offsets = torch.Size(part.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.shape)))
                places[MetadataIndex(name, offsets)] = _Place(str(self._folder / part.file))
            properties = TensorProperties(dtype=entry.dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(
            tensors,  # type: ignore[arg-type]
            storage_data=places,
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read parts of tensors.

        Raises:
            OSError: a file is missing, or something else lies in its place.
        """
        for path in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            open_file(Path(path)).close()  # torch would wait for a named pipe
        return super().read_data(plan, planner)


@dataclass(frozen=True)
class _Place:
    """Where torch's reader finds a part."""

    relative_path: str


class ShardWriter(HuggingFaceStorageWriter):
    """Writes tensors of all ranks into safetensors files of a folder, and the list of them.

    Args:
        folder: the folder, made if missing, on a file system that all ranks share.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank files of its own, of at most `FILE_BYTES`."""
        with_files = []
        for plan in super().prepare_global_plan(plans):
            # the number of its file, from 1, by the name of a tensor
            mapping = {"fqn_to_index_mapping": dict(_numbered(plan.items))}
            with_files.append(replace(plan, storage_data=plan.storage_data | mapping))
        return with_files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list of what all ranks have written."""
        files: dict[tuple[str, tuple[int, ...]], str] = {}  # by name and offsets of a part
        for results_of_rank in results:
            for result in results_of_rank:
                offsets = tuple(result.index.offset or ())
                files[result.index.fqn, offsets] = result.storage_data.relative_path
        entries = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            parts = []
            for chunk in tensor.chunks:
                offsets = tuple(chunk.offsets)
                parts.append(Part(files[name, offsets], offsets, tuple(chunk.sizes)))
            entries[name] = Entry(tensor.properties.dtype, tuple(tensor.size), tuple(parts))
        write_index(self._folder, entries)


def _numbered(items: list[WriteItem]) -> Iterator[tuple[str, int]]:
    """Yield the names of a rank's tensors, each with the number of its file, from 1."""
    number = 1
    room = FILE_BYTES  # bytes that the current file may still get
    for item in items:
        data = item.tensor_data
        assert data is not None
        num_bytes = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        is_empty = room == FILE_BYTES
        if num_bytes > room and not is_empty:
            number = number + 1
            room = FILE_BYTES
        room -= num_bytes
        yield item.index.fqn, number


class TensorPlanner(DefaultSavePlanner):
    """Hands tensors to a `ShardWriter` as safetensors stores them; refuses everything else before a
    file is opened."""

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes.

        Raises:
            InputError: something is no tensor, or a rank has several parts of one.
        """
        plan = super().create_local_plan()
        self._storages: set[int] = set()  # addresses of the memory that was handed over
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise InputError(
                    f"{item.index.fqn}: is not a tensor, and nothing else is stored in files "
                    "of tensors"
                )
        num_parts = Counter(item.index.fqn for item in plan.items)
        for name in sorted(num_parts):
            if num_parts[name] > 1:
                raise InputError(
                    f"{name}: one rank has several parts of it: redistribute it into one part "
                    "on each rank"
                )
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a part of a tensor with its elements in row-major order, in memory of its own."""
        tensor: Tensor = object.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        if address in self._storages:  # as tied weights are, which safetensors refuses
            return tensor.clone()
        self._storages.add(address)
        return tensor


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: ProcessGroup | None = None,
    is_alone: bool = False,
) -> None:
    """Write tensors into a folder. All ranks call it together.

    Args:
        folder: the folder, made if missing, on a file system that all ranks share.
        tensors: tensors by name: DTensors, or plain tensors that are identical on all ranks.
        group: the ranks; None for all.
        is_alone: whether this process writes without the others.

    Raises:
        CheckpointException: on all ranks, if one of them cannot write or holds something else than
            tensors.
    """
    with warnings.catch_warnings():
        # torch warns of a process alone, and of CPU copies of tensors of a GPU's mesh
        warnings.simplefilter("ignore")
        state_dict_saver.save(
            dict(tensors),
            storage_writer=ShardWriter(folder),
            planner=TensorPlanner(),
            process_group=group,
            no_dist=is_alone,
        )
