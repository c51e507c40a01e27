"""Tensors are stored in safetensors files with a list of them: complete, by any mesh, and nothing
but tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers import kinds_of_files, refused
from moesaic.errors import InputError
from moesaic.storage import shards
from moesaic.storage.nested import dumped, loaded, read_nested, write_nested
from moesaic.storage.shards import INDEX, Entry, IndexReader, read_index, write_tensors
from worlds import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def draws() -> dict[str, torch.Tensor]:
    """Return tensors of every kind: dtypes, no elements, no dimensions, strides, shared memory."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 6, generator=draw)
    one = torch.randn(3, generator=draw)
    kinds = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    return kinds | {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "transposed": matrix.t(),
        "view": matrix[:, 2:4],
        "tied": one,
        "tied too": one,
        "image": torch.randn(1, 2, 3, 4, generator=draw).contiguous(
            memory_format=torch.channels_last
        ),
    }


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.double(), expected.double())


def read_all(folder: Path, reader: HuggingFaceStorageReader) -> dict[str, torch.Tensor]:
    targets = {
        name: torch.zeros(entry.shape, dtype=torch.uint8).to(entry.dtype)
        for name, entry in read_index(folder).items()
    }
    state_dict_loader.load(targets, storage_reader=reader, no_dist=True)
    return targets


def test_every_kind_of_tensor_comes_back_by_our_reader_and_by_torchs(tmp_path):
    tensors = draws()
    write_tensors(tmp_path, tensors, is_alone=True)
    for reader in (IndexReader(tmp_path), HuggingFaceStorageReader(str(tmp_path))):
        found = read_all(tmp_path, reader)
        assert [name for name, tensor in tensors.items() if not same(found[name], tensor)] == []
        assert found.keys() == tensors.keys()
    assert set(kinds_of_files(tmp_path).values()) == {"text", "safetensors"}


def test_files_have_a_limit_of_size(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 100)
    tensors = {str(number): torch.full((20,), float(number)) for number in range(3)} | {
        "large": torch.ones(99)
    }
    write_tensors(tmp_path, tensors, is_alone=True)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"shard-00001-model-{number:05}-of-00004.safetensors" for number in range(1, 5)
    ]
    found = read_all(tmp_path, IndexReader(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("value", [3, "text", None, [1], {"deep": 1.5}, print], ids=repr)
def test_what_is_no_tensor_is_refused_before_a_file_is_written(tmp_path, value):
    with pytest.raises(CheckpointException) as caught:
        write_tensors(tmp_path, {"a": torch.ones(1), "b": value}, is_alone=True)
    (cause,) = (failure[0] for failure in caught.value.failures.values())
    assert isinstance(cause, InputError)
    assert str(cause).startswith("b")
    assert "is not a tensor, and nothing else is stored" in str(cause)
    assert list(tmp_path.rglob("*.*")) == []


def spread(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return tensors over a mesh of two axes, with parts of unequal sizes and parts without
    elements."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    placements = {
        "rows": [Shard(0), Replicate()],
        "both": [Shard(0), Shard(1)],
        "last": [Shard(1), Shard(0)],
        "copies": [Replicate()] * 2,
    }
    return {name: distribute_tensor(whole()[name], mesh, each) for name, each in placements.items()}


def whole() -> dict[str, torch.Tensor]:
    shapes = {"rows": (1, 2), "both": (5, 3), "last": (3, 7), "copies": (2,)}
    return {
        name: torch.arange(float(torch.Size(each).numel())).view(each)
        for name, each in shapes.items()
    }


def written_and_read(folder: str) -> list[str]:
    """Write spread tensors, read them back onto other placements; return the names of those that
    differ."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    write_tensors(Path(folder), spread(rank, world))
    mesh = init_device_mesh("cpu", (world,))
    targets = {
        name: distribute_tensor(torch.zeros_like(each), mesh, [Shard(0)])
        for name, each in whole().items()
    }
    state_dict_loader.load(targets, storage_reader=IndexReader(Path(folder)), no_dist=True)
    return [
        name for name, each in whole().items() if not torch.equal(targets[name].full_tensor(), each)
    ]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.random)])
def test_what_several_ranks_wrote_is_read_on_other_placements_and_by_one(tmp_path, world):
    assert on_ranks(world, written_and_read, str(tmp_path)) == [[]] * world
    found = read_all(tmp_path, IndexReader(tmp_path))
    assert [name for name, each in whole().items() if not torch.equal(found[name], each)] == []
    entry = read_index(tmp_path)["both"]
    assert len(entry.parts) == world
    assert len({part.file for part in entry.parts}) == world


def refused_on_all(folder: str) -> str:
    value = 3 if dist.get_rank() else torch.ones(1)
    try:
        write_tensors(Path(folder), {"a": value})  # type: ignore[dict-item]
    except CheckpointException as error:
        return str(error.failures[1][0])
    return ""


def test_what_one_rank_may_not_store_is_refused_on_all(tmp_path):
    said = on_ranks(2, refused_on_all, str(tmp_path))
    assert said == ["a: is not a tensor, and nothing else is stored in files of tensors"] * 2


def edited(**changes: object) -> Callable[[dict], object]:
    return lambda entry: entry.update(changes)


FAULTS: dict[str, Callable[[dict], object]] = {
    "has the dtype 'save'": edited(dtype="save"),
    "has the dtype '__name__'": edited(dtype="__name__"),
    "it holds list instead of str": edited(dtype=[]),
    "[-1] are no sizes": edited(shape=[-1]),
    "[True] are no sizes": edited(shape=[True]),
    "'2' instead of list": edited(shape="2"),
    "parts of a are in no file": edited(parts=[]),
    "it holds int instead of dict": edited(parts=[1]),
    "a part of a lies outside of it": lambda entry: entry["parts"][0].update(offsets=[1]),
    "'../secret.safetensors', which is not a file": lambda entry: entry["parts"][0].update(
        file="../secret.safetensors"
    ),
    "'..\\\\secret.safetensors', which": lambda entry: entry["parts"][0].update(
        file="..\\secret.safetensors"
    ),
    "'.metadata', which is not a file": lambda entry: entry["parts"][0].update(file=".metadata"),
    "'parts'": lambda entry: entry.pop("parts"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_list_that_is_damaged_is_refused_in_one_line(tmp_path, reason):
    write_tensors(tmp_path, {"a": torch.ones(2)}, is_alone=True)
    table = json.loads((tmp_path / INDEX).read_text())
    FAULTS[reason](table["tensors"]["a"])
    (tmp_path / INDEX).write_text(json.dumps(table))
    said = refused(read_index, tmp_path)
    assert "index.json: is not the list of a checkpoint's tensors" in said
    assert reason.replace("'2'", "it holds str") in said


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tensors": 1}', "[" * 100_000, "NaN"], ids=range(6)
)
def test_what_is_no_list_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert "is not the list of a checkpoint's tensors" in refused(read_index, tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2)}, is_alone=True)
    (path,) = tmp_path.glob("*.safetensors")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointException) as caught:
        read_all(tmp_path, IndexReader(tmp_path))
    assert "it is a named pipe, not a file" in str(caught.value.failures[0][0])


STATE = {
    "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(3, 2), "none": None}, 7: {}},
    "groups": [
        {"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "maximize": False, "params": [0, 7]}
    ],
    "odd": {
        "inf": float("inf"),
        "small": 5e-324,
        "large": 1 << 70,
        "text": "\u00e9\n",
        "/": [(), [], {}],
        "a/b": "c",
    },
    "random": [torch.get_rng_state(), torch.ones(4, 2).t(), torch.ones(2, dtype=torch.bfloat16)],
}


def equal(one: object, other: object) -> bool:
    """Return whether two nested states are the same, types too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_a_nested_state_comes_back_as_it_was(tmp_path):
    write_nested(tmp_path / "state.safetensors", STATE)
    assert equal(read_nested(tmp_path / "state.safetensors"), STATE)
    assert kinds_of_files(tmp_path) == {"state.safetensors": "safetensors"}
    tied = torch.ones(3)
    write_nested(
        tmp_path / "state.safetensors", {"a/b": tied, "a": {"b": tied + 1}, "c": (tied, tied[1:])}
    )
    found = read_nested(tmp_path / "state.safetensors")
    assert equal(found, {"a/b": tied, "a": {"b": tied + 1}, "c": (tied, tied[1:])})
    nan = loaded(dumped({"nan": float("nan")}))["nan"]
    assert nan != nan


class Number(int):
    """A number of a class of its own."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (print, "builtin_function_or_method"),
        (Path("a"), "PosixPath"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (Number(3), "Number"),
        (torch.Size([1]), "Size"),
        (torch.float32, "dtype"),
        ({1.5: 1}, "dict"),
        ({None: 1}, "dict"),
        (torch.ones(2, device="meta"), "Tensor"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (torch.nn.Module(), "Module"),
    ],
)
def test_what_a_nested_state_may_not_hold_is_named_in_one_line(tmp_path, value, kind):
    said = refused(write_nested, tmp_path / "state.safetensors", {"groups": [{"lr": value}]})
    assert said.startswith(
        f"groups.0.lr is of type {kind}: a checkpoint holds tensors, numbers, texts, None"
    )
    assert list(tmp_path.iterdir()) == []


def test_json_alone_holds_no_tensor():
    assert "a is of type Tensor: a checkpoint holds numbers" in refused(
        dumped, {"a": torch.ones(1)}
    )


def test_a_state_that_is_damaged_is_refused_in_one_line(tmp_path):
    path = tmp_path / "state.safetensors"
    assert "cannot be read" in refused(read_nested, path)
    write_nested(path, STATE)
    data = path.read_bytes()
    harms = {
        "cut": data[:-9],
        "empty": b"",
        "an archive": b"PK\x03\x04" + data,
        "a pickle": b"\x80\x04N.",
        "another name": data.replace(b"state/0/step", b"state/0/stop", 1),
        "an unknown kind": data.replace(b"tuple", b"tuplo"),
    }
    for name, harmed in harms.items():
        assert harmed != data, name
        path.write_bytes(harmed)
        assert "is not a state that was saved, or is damaged" in refused(read_nested, path), name


def test_an_entry_says_where_its_parts_are(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2, 3)}, is_alone=True)
    part = shards.Part("shard-00001-model-00001-of-00001.safetensors", (0, 0), (2, 3))
    assert read_index(tmp_path) == {"a": Entry(torch.float32, (2, 3), (part,))}
