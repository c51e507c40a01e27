"""The metadata of a sharded checkpoint is read completely, and code that it names is never executed."""

from __future__ import annotations

import os
import pickle
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
    found, expected = ShardReader(path.parent).read_metadata(), torchs(path)
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
    path = ran / "run" / "checkpoints" / "step-00000002" / SHARDS / ".metadata"
    path.write_bytes(pickle.dumps(planted(torchs(path), f"touch {ran / 'planted'}")[where]))
    seal(path.parent.parent)
    capsys.readouterr()
    assert main([*words, "--out", "run"] if words[0] == "train" else words) == 2
    err = capsys.readouterr().err
    assert not (ran / "planted").exists()
    assert err.count("\n") == 1
    assert (
        ".metadata: is not the metadata of a sharded checkpoint (it names posix.system), and nothing in it was executed"
        in err
    )
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


def test_a_class_of_the_pickle_cannot_be_changed():
    # GLOBAL Metadata, then BUILD on the class itself with a state for slots.
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00__init__K\x01s\x86b."
    before = Metadata.__init__
    assert "is not the metadata of a sharded" in refused(read_list, data, "here")
    assert Metadata.__init__ is before
