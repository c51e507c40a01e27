"""Runs over several machines: what each prints, and which torchrun ends after a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from cli.test_train import has_lines, wait_for
from forked import Forked
from helpers import refused
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.train import launch, ranks, state
from moesaic.train.checkpoint import SUMS
from moesaic.train.config import TrainConfig
from moesaic.train.data import Corpus
from moesaic.train.launch import stop_requests
from moesaic.train.machines import Machine, once_all_ended
from moesaic.train.ranks import Ranks, require_same_config
from moesaic.train.shared_folder import require_shared
from runs import tiny, write_config
from train.disturbed import free_port
from worlds import on_ranks, refusal

SECOND_OF_TWO = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "RANK": "4",
    "WORLD_SIZE": "8",
}
"""What torchrun tells the first rank of the second of two machines."""


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the first rank of the second of two machines."""
    for name, value in SECOND_OF_TWO.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "boxb")


def say_all() -> None:
    machine = Machine.of_several("moesaic finetune")
    assert machine is not None
    machine.say_waits()
    machine.say_met("boxa")
    machine.say_ended(was_stopped=False)
    machine.say_ended(was_stopped=True)


@pytest.mark.usefixtures("second")
def test_every_machine_says_which_ranks_it_has_and_where_the_progress_is(capsys):
    say_all()
    assert capsys.readouterr().out.splitlines() == [
        "moesaic finetune: machine boxb: ranks 4-7 of 8, waiting for the other machines' ranks",
        "moesaic finetune: machine boxb: all ranks have met; boxa shows the progress",
        "moesaic finetune: machine boxb: the run is done",
        "moesaic finetune: machine boxb: the run was stopped, and is saved",
    ]
    assert once_all_ended() == "once torchrun has ended on every machine, "


@pytest.mark.usefixtures("second")
def test_the_machine_of_the_first_rank_says_only_that_it_waits(capsys, monkeypatch):
    for name in ("GROUP_RANK", "RANK"):
        monkeypatch.setenv(name, "0")
    say_all()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    say_all()
    assert capsys.readouterr().out == ""


def test_one_machine_says_nothing_of_machines(monkeypatch):
    for name, value in (SECOND_OF_TWO | {"GROUP_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert Machine.of_several("moesaic finetune") is None
    assert once_all_ended() == ""


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ([(0, False), (0, False), (1, True), (1, True)], [True, False]),
        ([(0, True), (0, True), (1, True), (1, True)], [False, False]),
        # a signal to a rank alone: both torchruns see ranks that have ended well
        ([(0, False), (0, False), (1, True), (1, False)], [False, False]),
    ],
)
def test_torchrun_ends_where_only_that_of_another_machine_got_the_signal(asked, ends):
    machines = [
        Machine(
            command="",
            number=number,
            local_rank=0,
            ranks=range(2 * number, 2 * number + 2),
            world=4,
        )
        for number in range(2)
    ]
    assert [machine.ends_torchrun(asked) for machine in machines] == ends


TWICE = """
import os, signal
from moesaic.train.launch import stop_requests
from moesaic.train.signals import say_ends
say_ends("moesaic finetune")
with stop_requests():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_second_signal_names_the_command_and_says_that_nothing_is_saved():
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stderr == (
        "moesaic finetune: ended by SIGTERM without saving: checkpoints that were saved stay\n"
    )


@pytest.mark.parametrize("has_come", [False, True])
def test_a_rank_that_saves_since_a_signal_came_goes_on_when_torchrun_is_gone(has_come):
    kill = os.kill
    sent: list[int] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with (
            stop_requests() as received,
            patch.object(launch.os, "kill", lambda process, kind: sent.append(kind)),
        ):
            if has_come:
                kill(os.getpid(), signal.SIGTERM)
            launch._end_when_parent_is_gone(-1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (received, sent) == ((["SIGTERM"], []) if has_come else ([], [signal.SIGTERM]))


def other_validation_data(world: Ranks) -> str:
    """Return the refusal of a run whose second rank reads other validation data from the same
    paths."""
    corpus = Corpus(
        train=np.arange(100, dtype=np.uint8),
        val=np.arange(100, dtype=np.uint8) + world.rank,
        tokenizer=None,
        vocab_size=256,
        val_bytes=100,
        description="",
    )
    task = SimpleNamespace(load_corpus=lambda config, tokenizer: corpus)
    config = override(TrainConfig(batch_size=1), {"model": {"seq_len": 16}}, source="test")
    return refusal(state._read_data, config, task, None, world)


def other_base(folder: Path, world: Ranks) -> str:
    """Return the refusal of a run whose second rank sees another checkpoint under the path of its
    base."""
    (folder / SUMS).write_text(f"sums of rank {world.rank}")
    return refusal(state._require_same_base, SimpleNamespace(folder=folder), world)


def differing(folder: Path) -> dict[str, str]:
    """Return what two ranks on two hosts refuse, by name."""
    rank = dist.get_rank()
    world = Ranks.of_world()
    own = folder / f"box{rank}"

    def fail_on_second() -> None:
        with world.together():
            if rank == 1:
                TrainConfig(start_patience=-1.0)

    with (
        patch.object(socket, "gethostname", lambda: f"box{rank}"),
        patch("moesaic.train.shared_folder.PATIENCE", 0.5),
    ):
        found = {
            "seed": refusal(require_same_config, TrainConfig(seed=rank)),
            "threads": refusal(require_same_config, TrainConfig(threads=rank + 1)),
            "value": refusal(world.require_same, "the data", rank, "give it"),
            "own error": refusal(fail_on_second),
            "validation data": other_validation_data(world),
            "base": other_base(own, world).replace(str(own), "BASE"),
            "own folder": refusal(require_shared, own / "run", world),
            "shared": refusal(require_shared, folder / "shared" / "run", world),
        }
        with patch.object(ranks, "_version", lambda name: f"{name} {rank}"):
            found["versions"] = refusal(require_same_config, TrainConfig())
    return found


def test_ranks_that_differ_are_named_with_their_hosts(tmp_path):
    for name in ("box0", "box1"):
        (tmp_path / name).mkdir()
    first, second = on_ranks(2, differing, tmp_path)
    own_error = refused(TrainConfig, start_patience=-1.0)
    assert first == {
        "seed": (
            "InputError: seed differs: 0 on rank 0 (box0), 1 on rank 1 (box1): start every rank "
            "with the same settings"
        ),
        "threads": "",
        "value": ("InputError: the data differs between rank 0 (box0) and rank 1 (box1): give it"),
        "own error": f"InputError: {own_error} (on rank 1 (box1))",
        "validation data": (
            "InputError: the validation data differs between rank 0 (box0) and rank 1 (box1): give "
            "every rank the same files in data.path and data.val"
        ),
        "base": (
            "InputError: the checkpoint BASE differs between rank 0 (box0) and rank 1 (box1): give "
            "every rank the same run in adapters.base"
        ),
        "own folder": (
            f"InputError: --out {tmp_path / 'box0' / 'run'}: rank 1 (box1) does not see what rank "
            "0 (box0) writes there: --out must lie in a file system that all machines share"
        ),
        "shared": "",
        "versions": (
            "InputError: the version of moesaic differs: moesaic 0 on rank 0 (box0), moesaic 1 on "
            "rank 1 (box1): install the same version on every machine"
        ),
    }
    assert {**second, "own folder": ""} == {**first, "own folder": ""}
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"box0", "box1", SUMS}


def test_the_first_rank_of_each_host_reports_a_refusal(monkeypatch):
    store = dist.HashStore()
    reports = []
    for rank, host in enumerate(("boxa", "boxa", "boxb", "boxb")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        place = launch.Launch(launch.Roll(store, rank, 4))
        reports.append(place.fails_first(InputError("the same for all")))
        reports.append(place.fails_first(RuntimeError("lost the others")))
    assert reports == [True, False, False, False, True, False, False, False]


def node(config: Path, port: int) -> Forked:
    """Start one of two torchruns, with one rank each."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["-m", "moesaic", "train", "--config", str(config)]
    return Forked(words, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@pytest.mark.slow
def test_a_signal_to_one_torchrun_ends_the_other_one_too(tmp_path):
    config = tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2})
    path = write_config(config, tmp_path / "given.json")
    port = free_port()
    nodes = [node(path, port) for _ in range(2)]
    try:
        wait_for(lambda: has_lines(tmp_path / "run", 3), nodes[0])
        os.kill(nodes[1].pid, signal.SIGTERM)
        # torch's barrier at the end would take 300 s
        said = [each.communicate(timeout=200) for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    assert all("got signal: 15" in errors for _, errors in said)
    outputs = "".join(out for out, _ in said)
    assert outputs.count("saved; once torchrun has ended on every machine, go on with ") == 1
    assert outputs.count("waiting for the other machines' ranks") == 2
    assert outputs.count("shows the progress") == 1
    assert outputs.count("the run was stopped, and is saved") == 1
