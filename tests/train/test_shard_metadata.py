"""The metadata of a sharded checkpoint is read completely, and code that it names is never
executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import record_metadata
from helpers import refused
from moesaic.cli.main import main
from moesaic.train.distributed_checkpoint import SHARDS, read_whole
from moesaic.train.shard_metadata import ShardReader, read_list
from runs import assert_same, seal

TENSORS = {
    "model.matrix": torch.arange(12.0).view(3, 4),
    "model.empty": torch.empty(0, 4),
    "model.half": torch.ones(2, dtype=torch.bfloat16),
    "optimizer.scalar": torch.tensor(3.0),
    "model.count": torch.tensor([1, 2]),
}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """An object that executes a command when a plain unpickler reads it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a sharded checkpoint's tensors in one process. Return the path of its metadata."""
    state_dict_saver.save(tensors, checkpoint_id=folder / SHARDS, no_dist=True)
    return folder / SHARDS / ".metadata"


def torchs(path: Path) -> Metadata:
    return FileSystemReader(path.parent).read_metadata()


def test_the_list_is_torchs(tmp_path):
    path = write_shards(tmp_path, TENSORS)
    found = ShardReader(path.parent).read_metadata()
    expected = torchs(path)
    assert found.storage_data == expected.storage_data
    assert found.version == expected.version
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in found.state_dict_metadata.items():
        other = expected.state_dict_metadata[name]
        assert (entry.size, entry.chunks) == (other.size, other.chunks)
        assert entry.properties.dtype == other.properties.dtype
    assert_same(
        read_whole(tmp_path, "model."),
        {k[6:]: v for k, v in TENSORS.items() if k.startswith("model.")},
    )


def test_a_list_that_holds_the_plan_of_its_saving_is_read(tmp_path):
    path = write_shards(tmp_path, TENSORS)
    metadata = torchs(path)
    size = torch.Size([1])
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(torch.float32), size
    )
    metadata.all_local_plans = [
        SavePlan([WriteItem(MetadataIndex("x"), WriteItemType.TENSOR, tensor_data=data)])
    ]
    path.write_bytes(pickle.dumps(metadata))  # as Megatron-Core does
    assert ShardReader(path.parent).read_metadata().storage_data == metadata.storage_data
    assert read_whole(tmp_path, "model.").keys() == {"matrix", "empty", "half", "count"}


def as_before(checkpoint: Path) -> Path:
    """Rewrite a checkpoint's tensors as earlier versions wrote them. Return the path of their
    metadata."""
    tensors = read_whole(checkpoint, "")
    shutil.rmtree(checkpoint / SHARDS)
    path = write_shards(checkpoint, tensors)
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"format": 4}))
    seal(checkpoint)
    return path


def planted(metadata: Metadata, command: str) -> dict[str, object]:
    """Return metadata that executes a command in a plain unpickler, by the place of the command."""
    payload = Payload(command)
    name = next(iter(metadata.state_dict_metadata))
    return {
        "instead": payload,
        "beside": replace(metadata, planner_data=payload),
        "as a name": replace(metadata, state_dict_metadata={payload: 1}),
        "as a place": replace(metadata, storage_data={MetadataIndex(name): payload}),
    }


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("instead", ["sample", "run"]),
        ("beside", ["train", "--existing", "resume", "--config", "run/config.json"]),
        ("as a name", ["sample", "run"]),
        ("as a place", ["sample", "run"]),
    ],
)
def test_a_planted_command_does_not_run(ran, capsys, monkeypatch, where, words):
    monkeypatch.chdir(ran)
    assert main(["sample", "run", "--tokens", "2"]) == 0
    path = as_before(ran / "run" / "checkpoints" / "step-00000002")
    path.write_bytes(
        pickle.dumps(planted(torchs(path), f"touch {shlex.quote(str(ran / 'planted'))}")[where])
    )
    seal(path.parent.parent)
    capsys.readouterr()
    assert main([*words, "--out", "run"] if words[0] == "train" else words) == 2
    err = capsys.readouterr().err
    assert not (ran / "planted").exists()
    assert err.count("\n") == 1
    assert (
        ".metadata: is not the metadata of a sharded checkpoint (it names posix.system), and "
        "nothing in it was executed"
    ) in err
    pickle.loads(path.read_bytes())
    assert (ran / "planted").exists(), "the payload is harmless, so this test shows nothing"


def replaced(metadata: Metadata, **changes: object) -> None:
    """Change the place of the first tensor."""
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(place, **changes)


FAULTS = {  # torch would unpickle a part of a file for the first
    "it holds BytesStorageMetadata instead of TensorStorageMetadata": lambda it: (
        it.state_dict_metadata.update({"model.matrix": BytesStorageMetadata()})
    ),
    "it names ../../secret, which is not a file in its folder": lambda it: replaced(
        it, relative_path="../../secret"
    ),
    "is transformed": lambda it: replaced(it, transform_descriptors=["zstd"]),
    "it holds str instead of a size": lambda it: setattr(
        it.state_dict_metadata["model.matrix"], "size", "large"
    ),
    "it holds str instead of int": lambda it: replaced(it, offset="0"),
    "it names builtins.print": lambda it: setattr(it, "planner_data", print),
    "'state_dict_metadata'": lambda it: delattr(it, "state_dict_metadata"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_list_that_is_not_ours_is_refused_in_one_line(tmp_path, reason):
    metadata = torchs(write_shards(tmp_path, TENSORS))
    FAULTS[reason](metadata)
    caught = refused(lambda: read_list(pickle.dumps(metadata), "here"))
    assert reason in caught
    assert caught.startswith("here: is not the metadata of a sharded")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"abc", pickle.dumps(None), pickle.dumps({}), pickle.dumps([1])]
)
def test_what_is_no_list_is_refused(data):
    assert "is not the metadata of a sharded" in refused(read_list, data, "here")


class Getattr:
    """An object that is pickled as a call of `getattr`, as Python 3.11.0 to 3.11.3 pickle the
    members of enumerations."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("enumeration", "member"),
    [
        (_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"),
        (MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"),
        (WriteItemType, "BYTE_IO"),
    ],
)
def test_members_of_enumerations_are_read_as_every_python_pickles_them(
    tmp_path, protocol, enumeration, member
):
    metadata = torchs(write_shards(tmp_path, TENSORS))
    expected = dict(metadata.storage_data)
    metadata.planner_data = [Getattr(enumeration, member), enumeration[member]]
    data = pickle.dumps(metadata, protocol)
    assert b"getattr" in data
    assert read_list(data, "here").storage_data == expected


MISUSES = {
    "of a module": (os, "system"),
    "of a record that is no enumeration": (Metadata, "__init__"),
    "of a member": (WriteItemType.TENSOR, "value"),
    "of a result": (Getattr(WriteItemType, "TENSOR"), "value"),
    "of getattr": (getattr, "__self__"),
    "of a dtype": (torch.float32, "itemsize"),
    "of a name": ("posix", "system"),
    "no name": (WriteItemType, 1),
    "a name in bytes": (WriteItemType, b"TENSOR"),
    "a list": (WriteItemType, ["TENSOR"]),
    "a dotted name": (WriteItemType, "TENSOR.value"),
    "no member": (WriteItemType, "__init__"),
    "a member of another": (WriteItemType, "TORCH_PRESERVE_FORMAT"),
    "an empty name": (WriteItemType, ""),
    "a default": (WriteItemType, "TENSOR", None),
    "one argument": (WriteItemType,),
    "none": (),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_every_other_use_of_getattr_is_refused(tmp_path, misuse):
    metadata = torchs(write_shards(tmp_path, TENSORS))
    metadata.planner_data = Getattr(*MISUSES[misuse]) if misuse != "of a module" else None
    data = pickle.dumps(metadata)
    # modules do not pickle, so by hand: GLOBAL getattr, GLOBAL os.system's module
    if misuse == "of a module":
        data = b"cbuiltins\ngetattr\n(cposix\n__name__\nVsystem\ntR."
    caught = refused(read_list, data, "here")
    assert "here: is not the metadata of a sharded" in caught
    assert ("it uses getattr for something else" in caught) or ("it names " in caught)


@pytest.mark.parametrize(
    "build", [b"}X\x01\x00\x00\x00aK\x01sb.", b"N}X\x01\x00\x00\x00aK\x01s\x86b."]
)
def test_what_stands_for_getattr_cannot_be_changed(build):
    assert "it changes getattr" in refused(
        read_list, b"\x80\x02c__builtin__\ngetattr\n" + build, "here"
    )


def test_a_class_of_the_pickle_cannot_be_changed():
    # GLOBAL Metadata, then BUILD on the class itself with a state for slots.
    data = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x08\x00\x00\x00__init__K\x01s\x86b."
    )
    before = Metadata.__init__
    assert "is not the metadata of a sharded" in refused(read_list, data, "here")
    assert Metadata.__init__ is before


RECORDED = sorted((Path(__file__).parent / "metadata").iterdir())
"""Lists as `record_metadata.py` wrote them, each named by its Python and its torch."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_lists_of_every_python_and_torch_are_read(path):
    others: list[str] = []
    metadata = read_list(path.read_bytes(), path.name, others=others)
    found = {
        name: (
            entry.size,
            entry.properties.dtype,
            [(chunk.offsets, chunk.sizes) for chunk in entry.chunks],
        )
        for name, entry in metadata.state_dict_metadata.items()
    }
    assert found == {
        name: (each.shape, each.dtype, [(torch.Size([0] * each.dim()), each.shape)])
        for name, each in record_metadata.TENSORS.items()
    }
    assert others == ["train_state.step"]
    assert {
        index.fqn: place.relative_path for index, place in metadata.storage_data.items()
    } == dict.fromkeys(record_metadata.TENSORS, "__0_0.distcp")
    assert "holds BytesStorageMetadata" in refused(read_list, path.read_bytes(), path.name)


def test_a_list_is_recorded_of_every_python_and_of_every_torch_that_is_tested():
    names = [re.fullmatch(r"python-(.*)-torch-(.*)", path.stem) for path in RECORDED]
    versions = [name.groups() for name in names if name]
    assert {"3.10", "3.11", "3.12", "3.13"} <= {python.rpartition(".")[0] for python, _ in versions}
    assert [path.stem for path in RECORDED if b"getattr" in path.read_bytes()] == [
        "python-3.11.2-torch-2.13.0"
    ]
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    (line,) = re.findall("^TORCHES := (.*)$", text, re.MULTILINE)
    (pinned,) = re.findall("^TORCH := (.*)$", text, re.MULTILINE)
    line = line.replace("$(TORCH)", pinned)
    tested = {each.partition("-")[0] for each in line.split()} - {"newest"}
    assert tested <= {torch for _, torch in versions}
