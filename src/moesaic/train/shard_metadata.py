"""Safe reading of sharded checkpoints of other programs and of earlier versions, without running
code that a file names.

`torch.distributed.checkpoint` by itself writes the metadata file, `.metadata`, as a pickle, and a
plain unpickler calls any function that a pickle names. The unpickler here resolves no class and no
function. Each name that the metadata may contain becomes an inert record, and every other name is
refused. The real objects are then built from the records' fields, after checking the fields' types.

The metadata list each tensor with its dtype, its size and its chunks, the rectangles in which it is
stored, and say in which file, and where in it, each chunk lies.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from moesaic.errors import InputError
from moesaic.files import read_bytes
from moesaic.storage.shards import INDEX, IndexReader

T = TypeVar("T")
MOST_LIST = 1 << 30
"""The most bytes of the list of a checkpoint's tensors."""


class ShardReader(IndexReader):
    """Reads a sharded checkpoint of safetensors files, or one with a `.metadata` as torch and
    earlier versions wrote it.

    Of the latter, the metadata are read by `read_list`, and the tensors as torch does, with
    weights_only.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pickled = folder / ".metadata"
        """The list of the tensors as torch and earlier versions wrote it."""
        # without either, reading the index says what is missing
        self._has_index = (folder / INDEX).exists() or not self._pickled.exists()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            InputError: as `read_index` and `read_list` do.
            OSError: if there is no list.
        """
        if self._has_index:
            return super().read_metadata(*args, **kwargs)
        metadata = read_list(read_bytes(self._pickled, at_most=MOST_LIST), str(self._pickled))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)  # as torch's reader does
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read parts of tensors; see `IndexReader.read_data`."""
        if self._has_index:
            return super().read_data(plan, planner)
        return FileSystemReader.read_data(self, plan, planner)


def read_list(data: bytes, source: str, *, others: list[str] | None = None) -> Metadata:
    """Return the metadata of a sharded checkpoint.

    Args:
        data: the bytes of `.metadata`.
        source: name of the file, for messages.
        others: list that receives the names of entries that are not tensors, as other programs
            write them. They are left out of the result. None refuses such entries.

    Raises:
        InputError: if the pickle names anything but the parts of metadata of tensors in files of
            the same folder.
    """
    try:
        return _metadata(_ListUnpickler(io.BytesIO(data)).load(), others)
    except Exception as error:  # a damaged pickle may raise any exception
        reason = " ".join(str(error).split())
        raise InputError(
            f"{source}: is not the metadata of a sharded checkpoint ({reason:.200}), and nothing "
            "in it was executed: take another checkpoint, or delete this one"
        ) from error


class _Record:
    """Stands for an object of the pickle: holds the arguments of its constructor and its state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    place: type(place[1], (_Record,), {})
    for place in (
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "BytesStorageMetadata"),
        (_SHARDED, "TensorProperties"),
        (_SHARDED, "MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.planner", n)
            for n in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    )
}
"""All names besides dtypes that metadata may contain, with the class of the records that stand for
them. Those of the planner occur in metadata that Megatron-Core writes, which stores its save plan
there; nothing reads them. A BytesStorageMetadata entry is never passed on: torch would unpickle its
part of a tensor file without restriction."""


_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_MEMBERS = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _FORMATS,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _FORMATS,
    ("torch.distributed.checkpoint.planner", "WriteItemType"): ("TENSOR", "SHARD", "BYTE_IO"),
}
"""The enumerations among the records, with the names of their members."""


class _MemberOf:
    """Stands for `getattr`, with which Python 3.11.0 to 3.11.3 pickles the member of an
    enumeration: looks nothing up."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> _Record:
        """Return a record for a member of one of the enumerations; every other use of `getattr` is
        refused."""
        if len(arguments) == 2 and type(arguments[1]) is str:
            for place, members in _MEMBERS.items():
                if arguments[0] is _RECORDS[place] and arguments[1] in members:
                    return _RECORDS[place](arguments[1])
        raise pickle.UnpicklingError(
            "it uses getattr for something else than the member of an enumeration"
        )

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes getattr")


_MEMBER_OF = _MemberOf()


class _ListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name in the pickle: a dtype itself, or a class of records, which
        only store their arguments."""
        if module == "torch":
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        # protocols 0 to 2 call the module __builtin__
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _MEMBER_OF
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _RECORDS[module, name]


def _metadata(record: Any, others: list[str] | None) -> Metadata:
    """Return torch's metadata of a checkpoint from its record. With `others`, add to it the names
    of entries that are no tensors, and leave them out."""
    fields = _fields(record, "Metadata")
    tensors: dict[str, STORAGE_TYPES] = {}
    for name, entry in _typed(fields["state_dict_metadata"], dict).items():
        is_tensor = type(entry).__name__ != "BytesStorageMetadata"
        # without `others`, `_tensor_metadata` refuses what is no tensor
        if others is None or is_tensor:
            tensors[_typed(name, str)] = _tensor_metadata(entry)
        else:
            others.append(_typed(name, str))

    places = {}
    for key, place in _typed(fields["storage_data"], dict).items():
        index = _metadata_index(key)
        info = _storage_info(place)
        if others is None or index.fqn in tensors:
            places[index] = info
    return Metadata(tensors, storage_data=places, version=_typed(fields.get("version", ""), str))


def _tensor_metadata(record: Any) -> TensorStorageMetadata:
    """Return torch's metadata of a tensor, from the record that the pickle gave."""
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    if type(properties).__name__ != "TensorProperties":
        raise TypeError(f"it holds {type(properties).__name__} instead of TensorProperties")
    state = _typed(properties.state, tuple)
    dtype = _typed(state[0], torch.dtype)  # the others, such as a layout, are not needed
    chunks = []
    for chunk in _typed(fields["chunks"], list):
        chunk_fields = _fields(chunk, "ChunkStorageMetadata")
        offsets = _torch_size(chunk_fields["offsets"])
        chunks.append(ChunkStorageMetadata(offsets, _torch_size(chunk_fields["sizes"])))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _torch_size(fields["size"]), chunks)


def _metadata_index(record: Any) -> MetadataIndex:
    """Return torch's key of a stored tensor, from the record that the pickle gave."""
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    index = fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _torch_size(offset),
        None if index is None else _typed(index, int),
    )


def _storage_info(record: Any) -> _StorageInfo:
    """Return where a stored tensor lies, from the record that the pickle gave."""
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields["relative_path"], str)
    if PurePosixPath(name).name != name or "\\" in name:
        raise ValueError(f"it names {name}, which is not a file in its folder")
    if fields.get("transform_descriptors"):  # such as compressed
        raise ValueError(f"{name} is transformed")
    return _StorageInfo(name, _typed(fields["offset"], int), _typed(fields["length"], int))


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a pickled object, which must be of class `kind`."""
    if type(record).__name__ != kind:
        raise TypeError(f"it holds {type(record).__name__} instead of {kind}")
    fields: dict[str, Any] = _typed(record.state, dict)
    return fields


def _torch_size(record: Any) -> torch.Size:
    """Return torch's size, from the record that the pickle gave: its one argument has the
    numbers."""
    if type(record).__name__ != "Size":
        raise TypeError(f"it holds {type(record).__name__} instead of a size")
    (sizes,) = record.arguments
    return torch.Size(_typed(size, int) for size in sizes)


def _typed(value: Any, kind: type[T]) -> T:
    """Return `value`, which must be of type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"it holds {type(value).__name__} instead of {kind.__name__}")
    return value
