"""The metadata of a sharded checkpoint is read completely, and code that it names is never executed."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.train.checkpoint import load_checkpoint
from moesaic.train.distributed_checkpoint import SHARDS, read_whole
from moesaic.train.shard_metadata import ShardReader, read_list
from runs import assert_same, run_quietly, seal, tiny

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


def shard(checkpoint: Path) -> Path:
    """Turn a checkpoint of one process into a sharded one. Return the path of its metadata."""
    loaded = load_checkpoint(checkpoint.parent, pytest.fail)
    tensors = {f"model.{name}": tensor for name, tensor in loaded.model.items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in loaded.optimizer.items()}
    shutil.rmtree(checkpoint / SHARDS)
    path = write_shards(checkpoint, tensors)
    seal(checkpoint)
    return path


def torchs(path: Path) -> Metadata:
    return FileSystemReader(path.parent).read_metadata()


def test_the_list_is_torchs(tmp_path):
    path = write_shards(tmp_path, TENSORS)
    found, expected = ShardReader(path.parent).read_metadata(), torchs(path)
    assert found.storage_data == expected.storage_data
    assert found.version == expected.version
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in found.state_dict_metadata.items():
        other = expected.state_dict_metadata[name]
        assert (entry.size, entry.chunks) == (other.size, other.chunks)
        assert entry.properties.dtype == other.properties.dtype
    assert_same(read_whole(tmp_path, "model."), {k[6:]: v for k, v in TENSORS.items() if k.startswith("model.")})


def test_a_list_that_holds_the_plan_of_its_saving_is_read(tmp_path):
    path = write_shards(tmp_path, TENSORS)
    metadata = torchs(path)
    size = torch.Size([1])
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(torch.float32), size)
    metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("x"), WriteItemType.TENSOR, tensor_data=data)])]
    path.write_bytes(pickle.dumps(metadata))  # as Megatron-Core does
    assert ShardReader(path.parent).read_metadata().storage_data == metadata.storage_data
    assert read_whole(tmp_path, "model.").keys() == {"matrix", "empty", "half", "count"}


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


@pytest.mark.parametrize("where", ["instead", "beside", "as a name", "as a place"])
@pytest.mark.parametrize("words", [["sample"], ["train", "--existing", "resume", "--out"]], ids=lambda words: words[0])
def test_a_planted_command_does_not_run(tmp_path, capsys, monkeypatch, where, words):
    monkeypatch.chdir(tmp_path)
    run_quietly(tiny(tmp_path, steps=1))
    path = shard(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert main(["sample", "run", "--tokens", "2"]) == 0
    command = f"touch {tmp_path / 'planted'}"
    path.write_bytes(pickle.dumps(planted(torchs(path), command)[where]))
    seal(path.parent.parent)
    capsys.readouterr()
    more = ["--config", "run/config.json"] if words[0] == "train" else []
    assert main([*words, "run", *more]) == 2
    err = capsys.readouterr().err
    assert not (tmp_path / "planted").exists()
    assert err.count("\n") == 1
    assert (
        ".metadata: is not the metadata of a sharded checkpoint (it names posix.system), and nothing in it was executed"
        in err
    )
    pickle.loads(path.read_bytes())
    assert (tmp_path / "planted").exists(), "the payload is harmless, so this test shows nothing"


class Setter:
    """An object that changes an attribute of its target when unpickled, with the pickle instruction for slots."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __reduce__(self):
        return (getattr, (self.target, "__class__"), (None, {"__init__": 1}))


def changed(metadata: Metadata, kind: str) -> bytes:
    """Return pickled metadata with one fault."""
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    places = dict(metadata.storage_data)
    index, place = next(iter(places.items()))
    if kind == "bytes":  # torch would unpickle a part of a file for it
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
    elif kind == "outside":
        places[index] = replace(place, relative_path="../../secret")
    elif kind == "transformed":
        places[index] = replace(place, transform_descriptors=["zstd"])
    elif kind == "size":
        entry.size = "large"
    elif kind == "offset":
        places[index] = replace(place, offset="0")
    elif kind == "function":
        metadata.planner_data = print
    elif kind == "setter":
        metadata.planner_data = Setter(entry)
    elif kind == "missing":
        del metadata.state_dict_metadata
    metadata.storage_data = places
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bytes", "it holds BytesStorageMetadata instead of TensorStorageMetadata"),
        ("outside", "it names ../../secret, which is not a file in its folder"),
        ("transformed", "is transformed"),
        ("size", "it holds str instead of a size"),
        ("offset", "it holds str instead of int"),
        ("function", "it names builtins.print"),
        ("setter", "it names builtins.getattr"),
        ("missing", "'state_dict_metadata'"),
    ],
)
def test_a_list_that_is_not_ours_is_refused_in_one_line(tmp_path, kind, reason):
    path = write_shards(tmp_path, TENSORS)
    with pytest.raises(InputError) as caught:
        read_list(changed(torchs(path), kind), "here")
    assert reason in str(caught.value)
    assert str(caught.value).startswith("here: is not the metadata of a sharded")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"abc", pickle.dumps(None), pickle.dumps({}), pickle.dumps([1])])
def test_what_is_no_list_is_refused(data):
    with pytest.raises(InputError, match="is not the metadata of a sharded"):
        read_list(data, "here")


def test_a_class_of_the_pickle_cannot_be_changed():
    # GLOBAL Metadata, then BUILD on the class itself with a state for slots.
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00__init__K\x01s\x86b."
    before = Metadata.__init__
    with pytest.raises(InputError, match="is not the metadata of a sharded"):
        read_list(data, "here")
    assert Metadata.__init__ is before
