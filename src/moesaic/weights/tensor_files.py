"""Reads and writes tensors in files, region by region: safetensors, also sharded, and
torch.distributed.checkpoint (DCP).

Elements are copied bit by bit and never interpreted. Reading runs no code that a file refers to:
from DCP's pickled metadata and from the archives in its files, only descriptions of tensors are
accepted.

A tensor (`Stored`) consists of rectangular parts (`Part`). In safetensors it is one part, unless
Moesaic wrote it sharded; DCP may have one for each rank. A checkpoint names the file of each tensor
in an index (safetensors) or list (the others), which is compared with what the files hold.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from moesaic.errors import InputError
from moesaic.files import (
    kind_of,
    open_file,
    read_bytes,
    read_text,
    require_writable,
    write,
    writing,
)
from moesaic.storage.shards import INDEX as SHARD_INDEX
from moesaic.storage.shards import Entry, read_index, write_index
from moesaic.storage.shards import Part as SharedPart
from moesaic.train.shard_metadata import MOST_LIST, read_list
from moesaic.weights.layout import Readable, Region, first_names, integer, pieces, ranges

CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' name of a dtype -> the dtype."""
INDEX = "model.safetensors.index.json"
OF_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""The names of a model's files on the hub."""
DCP_FILE = "__0_0.distcp"
CLAIM = "writing"
"""The file that lies in an output while it is written."""
MOST_HEADER = 10**8
"""The most bytes of a safetensors file's header, as in the library safetensors."""
SHARD_BYTES = 5 * 10**9
"""Largest size of a safetensors file, unless a single tensor is larger."""


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor, stored in a file."""

    path: Path
    start: int
    """Byte offset in the file."""
    offsets: tuple[int, ...]
    """Where the part begins in the tensor, per dimension."""
    sizes: tuple[int, ...]
    archive: int | None = None
    """Size in bytes of the `torch.save` archive that holds the part; None if the file has the plain
    elements in row-major order."""

    @cached_property
    def in_archive(self) -> tuple[int, tuple[int, ...]]:
        """The byte offset in the file at which the archive's elements begin, and their strides.
        Runs no pickled code.

        Raises:
            InputError: the archive is damaged, or holds no tensor of these sizes.
        """
        assert self.archive is not None
        try:
            # without the elements: under this mode a storage only knows its place in the archive
            with open_file(self.path) as file, FakeTensorMode():
                opened_file: Any = file
                view: Any = _create_file_view(opened_file, self.start, self.archive)
                tensor: Any = torch.load(view, weights_only=True)
        except Exception as error:  # a damaged archive may raise anything
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.path}: byte {self.start}: is damaged ({reason:.200}): fetch it again"
            ) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.sizes:
            raise InputError(
                f"{self.path}: byte {self.start} holds no tensor of shape {list(self.sizes)}: "
                "two checkpoints are mixed"
            )
        storage: Any = tensor.untyped_storage()
        # bytes before the archive in the file, before the storage in the archive, and before the
        # tensor in the storage
        begin = (
            self.start
            + storage._checkpoint_offset
            + int(tensor.storage_offset()) * tensor.dtype.itemsize
        )
        return begin, tuple(tensor.stride())


@dataclass(frozen=True)
class Stored:
    """A tensor that is stored in one or several files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def read(self, at: Region) -> np.ndarray:
        """Return a copy of the elements in a region. Files are memory-mapped only during the
        call."""
        whole = ranges(at)  # a single index as a range too; the last line removes its dimension
        out = np.empty([len(dim) for dim in whole], integer(self.dtype))
        for part in self.parts:
            # What region and part share, along each dimension: as positions in the region, as
            # indices of the tensor, and as positions in the part.
            in_region = [
                slice(_num_below(dim, start), _num_below(dim, start + size))
                for dim, start, size in zip(whole, part.offsets, part.sizes)
            ]
            in_tensor = [dim[positions] for dim, positions in zip(whole, in_region)]
            if not all(in_tensor):
                continue  # they share nothing
            in_part = [
                slice(dim[0] - start, dim[-1] - start + 1, dim.step)
                for dim, start in zip(in_tensor, part.offsets)
            ]
            out[tuple(in_region)] = _mapped(part, self.dtype)[tuple(in_part)]
        return out.reshape([len(dim) for dim in at if isinstance(dim, range)])


def opened(path: Path) -> BinaryIO:
    """Open a file of a checkpoint to read it.

    Raises:
        InputError: it cannot be opened, or is not a file.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise InputError(
            f"{str(path)!r}: cannot be read ({error.strerror}): fetch it again"
        ) from error


def require_room(target: Path) -> None:
    """Raise InputError unless `target` is an empty folder, or does not exist and can be created."""
    for folder in (target, *target.parents):
        if os.path.lexists(folder) and not folder.is_dir():  # a link to nothing too
            raise InputError(f"{folder}: exists and is not a folder: choose another one")
    if (target / CLAIM).exists():
        raise InputError(
            f"{target}: another process writes there, or was killed as it did: choose another "
            "folder, or delete this one"
        )
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target}: is not empty: choose another folder, or delete it")
    require_writable(target, "out", makes_parents=True)


@contextmanager
def filling(target: Path) -> Iterator[None]:
    """Create a folder, or take an empty one, to write into. If the block fails, nothing that it
    wrote stays.

    Raises:
        InputError: the folder has entries, or another process fills it.
    """
    require_room(target)
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    claim = target / CLAIM
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        raise InputError(f"{target}: another process writes there: choose another folder") from None
    try:
        yield
    except BaseException:
        for path in target.iterdir():
            if kind_of(path) == "a folder":
                shutil.rmtree(path)
            else:
                path.unlink()
        if is_new:
            target.rmdir()
        raise
    claim.unlink()


def _num_below(dim: range, place: int) -> int:
    """Return how many of the positions in `dim` are less than `place`."""
    steps = -((dim.start - place) // dim.step)  # from the start to `place`, rounded up
    return min(len(dim), max(0, steps))


def _mapped(part: Part, dtype: torch.dtype) -> np.ndarray:
    """Return the part's elements, memory-mapped from its file for as long as the array lives."""
    kind = integer(dtype)
    if part.archive is None:
        start = part.start
        strides = None
    else:
        start, strides = part.in_archive
    if not part.sizes:  # a memory map cannot have no dimension
        return np.fromfile(part.path, kind, 1, offset=start).reshape(())
    if strides is None:
        return np.memmap(part.path, kind, mode="r", offset=start, shape=part.sizes)

    # how many elements after the first one the last one lies
    last = sum((size - 1) * stride for size, stride in zip(part.sizes, strides))
    flat = np.memmap(part.path, kind, mode="r", offset=start, shape=(last + 1,))
    byte_strides = [stride * kind.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, part.sizes, byte_strides, writeable=False)


def read_safetensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder's safetensors files.

    Raises:
        InputError: a file is missing, truncated, or of another checkpoint than the index. The
            message names the file.
    """
    paths = sorted(folder.glob("[!.]*.safetensors"))
    if (folder / INDEX).exists():
        return _read_indexed(folder, _index(folder / INDEX))
    if len(paths) > 1:
        raise InputError(
            f"{folder / INDEX} is missing, and there are {len(paths)} safetensors files: fetch it"
        )
    return _header(paths[0]) if paths else {}


def _read_indexed(folder: Path, file_of: Mapping[str, str]) -> dict[str, Stored]:
    """Return the tensors of the files that an index lists, by name; InputError if index and files
    differ.

    Args:
        file_of: the index, name of a tensor -> name of its file.
    """
    file_names = sorted(set(file_of.values()))
    present = [path.name for path in folder.glob("[!.]*.safetensors")]
    unlisted = sorted(
        name for name in present if OF_MODEL.fullmatch(name) and name not in file_names
    )
    if unlisted:
        raise InputError(
            f"{folder / unlisted[0]} is not in the index: two checkpoints are mixed: take away "
            "one of them"
        )
    tensors: dict[str, Stored] = {}
    for file_name in file_names:
        path = folder / file_name
        if not path.exists():
            raise InputError(
                f"{path} is missing: the index lists {len(file_names)} files, fetch this one"
            )
        for name, stored in _header(path).items():
            if file_of.get(name) != file_name:
                where = f"in {file_of[name]}" if name in file_of else "nowhere"
                raise InputError(
                    f"{path} holds {name}, which the index lists {where}: two checkpoints are mixed"
                )
            tensors[name] = stored
    missing = sorted(file_of.keys() - tensors.keys())
    if missing:
        raise InputError(
            f"{folder / file_of[missing[0]]} lacks {first_names(missing)}: two checkpoints are "
            "mixed"
        )
    return tensors


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors that a safetensors file holds, by its header."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        # The first eight bytes are the header's length; a shorter file gets one that is refused.
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        try:
            if length > min(size, MOST_HEADER):
                raise ValueError("the header is longer than the file, or than a header may be")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            tensors = {
                name: _stored(path, name, entry, begin=8 + length, size=size)
                for name, entry in header.items()
            }
            spans = sorted(entry["data_offsets"] for entry in header.values())
            for (_, end), (next_start, _) in pairwise(spans):
                if end > next_start:
                    raise ValueError("two tensors overlap")
            return tensors
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InputError(
                f"{path}: is not a safetensors file, or its header is damaged: fetch it again"
            ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON; ValueError if it has a name twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _stored(path: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> Stored:
    """Return the tensor that an entry of a header describes; the tensors begin at byte `begin` of a
    file of `size` bytes.

    Raises:
        InputError: the tensor has a dtype that is not read, or does not fit.
        ValueError, KeyError, TypeError: the entry is damaged.
    """
    if entry["dtype"] not in CODES:
        raise InputError(
            f"{path}: {name} has the quantized dtype {entry['dtype']}: convert a checkpoint "
            "without quantization"
        )
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    dtype = CODES[entry["dtype"]]
    if not all(type(each) is int and each >= 0 for each in (*shape, start, end)):
        raise ValueError("a size or an offset is not a whole number")
    if begin + end > size:
        raise InputError(
            f"{path}: has {size:,} bytes and needs {begin + end:,} for {name}: fetch it again"
        )
    if math.prod(shape) * dtype.itemsize != end - start:
        raise InputError(
            f"{path}: {name} of {shape} does not fit into {end - start:,} bytes: fetch it again"
        )
    whole = Part(path, start=begin + start, offsets=(0,) * len(shape), sizes=shape)
    return Stored(dtype, shape, (whole,))


def _index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, from the index. A name that leads out of the folder is
    refused."""
    try:
        file_of: dict[str, str] = json.loads(read_text(path))["weight_map"]
        # a name alone, no path, and no longer than a file's may be
        are_names = all(
            name.endswith(".safetensors") and len(name) < 256 and Path(name).name == name
            for name in file_of.values()
        )
        if are_names:
            return file_of
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: is not an index of safetensors files, or is damaged: fetch it again")


def read_shards(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Return the tensors of Moesaic's sharded files, and the names of other entries; those that
    earlier versions wrote too.

    Raises:
        InputError: a file is missing, truncated, or of another checkpoint than the list. The
            message names the file.
    """
    if not (folder / SHARD_INDEX).exists():
        return read_dcp(folder)
    try:
        entries = read_index(folder)
    except OSError as error:
        raise InputError(
            f"{folder / SHARD_INDEX}: cannot be read ({error.strerror}): fetch it again"
        ) from error
    headers: dict[str, dict[str, Stored]] = {}  # name of a file -> what it holds
    files = {part.file for entry in entries.values() for part in entry.parts}
    for file in sorted(files):
        if not (folder / file).exists():
            raise InputError(f"{folder / file} is missing: the list of tensors names it, fetch it")
        headers[file] = _header(folder / file)
    tensors = {name: _in_shards(folder, name, entry, headers) for name, entry in entries.items()}
    return tensors, []


def _in_shards(
    folder: Path, name: str, entry: Entry, headers: Mapping[str, Mapping[str, Stored]]
) -> Stored:
    """Return a tensor of the list, with the places of its parts in the files.

    Args:
        entry: what the list says of the tensor.
        headers: name of a file -> the tensors that it holds, of which each is a part here.
    """
    parts = []
    for part in entry.parts:
        in_file = headers[part.file].get(name)
        if in_file is None or (in_file.shape, in_file.dtype) != (part.shape, entry.dtype):
            raise InputError(
                f"{folder / part.file}: does not hold the part of {name} that the list of tensors "
                "names: two checkpoints are mixed"
            )
        (whole,) = in_file.parts
        parts.append(replace(whole, offsets=part.offsets))
    return Stored(entry.dtype, entry.shape, tuple(parts))


def write_shards(folder: Path, tensors: Mapping[str, Readable]) -> None:
    """Write tensors as Moesaic's sharded files, one after the other. Any mesh can load them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _in_files(tensors)
    entries: dict[str, Entry] = {}
    for number, of_file in enumerate(files, 1):
        file = f"shard-00001-model-{number:05}-of-{len(files):05}.safetensors"
        _write_file(folder / file, of_file)
        for name, tensor in of_file.items():
            shape = tuple(tensor.shape)
            whole = SharedPart(file, (0,) * len(shape), shape)
            entries[name] = Entry(tensor.dtype, shape, (whole,))
    write_index(folder, entries)


def _in_files(tensors: Mapping[str, Readable]) -> list[dict[str, Readable]]:
    """Return the tensors of each file, in their order, of at most `SHARD_BYTES` or one tensor."""
    files: list[dict[str, Readable]] = [{}]
    free_bytes = SHARD_BYTES
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if files[-1] and size > free_bytes:
            files.append({})
            free_bytes = SHARD_BYTES
        files[-1][name] = tensor
        free_bytes -= size
    return files


def write_safetensors(folder: Path, tensors: Mapping[str, Readable]) -> None:
    """Write tensors into safetensors files of about `SHARD_BYTES`, and the index if there are
    several."""
    files = _in_files(tensors)
    if len(files) == 1:
        _write_file(folder / "model.safetensors", files[0])
        return
    total_bytes = 0
    file_of: dict[str, str] = {}
    for number, of_file in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        total_bytes += _write_file(folder / file, of_file)
        for name in of_file:
            file_of[name] = file
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: Mapping[str, Readable]) -> int:
    """Write a file of safetensors piece by piece; return the bytes of its tensors."""
    code_of = {dtype: code for code, dtype in CODES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end = start + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": code_of[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the elements begin at a multiple of 8 bytes
    with writing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for region in pieces(tensor.shape, tensor.dtype.itemsize):
                file.write(tensor.read(region).data)
    return end


def read_dcp(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Return the tensors of a folder that torch.distributed.checkpoint wrote on any mesh, and the
    names of other entries.

    Raises:
        InputError: a file is missing or truncated, or part of a tensor is in no file. The message
            names it.
    """
    others: list[str] = []
    try:
        data = read_bytes(folder / ".metadata", at_most=MOST_LIST)
    except OSError as error:
        raise InputError(
            f"{folder / '.metadata'}: cannot be read ({error.strerror}): name the folder that "
            "holds it"
        ) from error
    metadata = read_list(data, str(folder / ".metadata"), others=others)
    parts = _dcp_parts(folder, metadata)
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        num_stored = sum(math.prod(part.sizes) for part in parts[name])
        if num_stored < math.prod(entry.size):
            raise InputError(
                f"{folder}: parts of {name} are in no file: the checkpoint is incomplete"
            )
        tensors[name] = Stored(entry.properties.dtype, tuple(entry.size), tuple(parts[name]))
    return tensors, others


def _dcp_parts(folder: Path, metadata: Metadata) -> dict[str, list[Part]]:
    """Return the parts of each tensor of a DCP checkpoint, by its name; InputError for a file that
    is missing or cut off, and for a list that contradicts itself."""
    parts: dict[str, list[Part]] = {name: [] for name in metadata.state_dict_metadata}
    file_bytes: dict[str, int] = {}  # a file's path in the folder -> its size
    # index: a tensor's name and where a part of it begins; place: the bytes of a file that hold it
    for index, place in metadata.storage_data.items():
        name = index.fqn
        path = folder / place.relative_path
        if place.relative_path not in file_bytes:
            if not path.exists():
                raise InputError(f"{path} is missing: the list of tensors names it, fetch it")
            with opened(path) as file:
                file_bytes[place.relative_path] = os.fstat(file.fileno()).st_size
        if place.offset + place.length > file_bytes[place.relative_path]:
            raise InputError(
                f"{path}: ends before {name}: it is cut off or of another checkpoint, "
                "fetch it again"
            )
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        offsets = tuple(index.offset or (0,) * len(entry.size))
        sizes_at = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        if offsets not in sizes_at:
            raise InputError(
                f"{folder}: no part of {name} begins at {list(offsets)}: the list of "
                "tensors is damaged"
            )
        part = Part(
            path, start=place.offset, offsets=offsets, sizes=sizes_at[offsets], archive=place.length
        )
        parts[name].append(part)
    return parts


def write_dcp(folder: Path, tensors: Mapping[str, Readable]) -> None:
    """Write tensors in the format of torch.distributed.checkpoint, in the parts that `pieces`
    makes. Any mesh can load them."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with writing(folder / DCP_FILE) as file:
        for name, tensor in tensors.items():
            chunks: list[ChunkStorageMetadata] = []
            for number, region in enumerate(pieces(tensor.shape, tensor.dtype.itemsize)):
                offsets = torch.Size(dim.start for dim in region)
                sizes = torch.Size(len(dim) for dim in region)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                start = file.tell()
                torch.save(torch.from_numpy(tensor.read(region)).view(tensor.dtype), file)
                place = _StorageInfo(DCP_FILE, offset=start, length=file.tell() - start)
                places[MetadataIndex(name, offsets, number)] = place
            properties = TensorProperties(dtype=tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    metadata = Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)
    write(folder / ".metadata", pickle.dumps(metadata))
