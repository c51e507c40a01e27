"""`torchrun -m moesaic train`: one error line for all ranks, signals, and ranks that die."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cli.test_train import has_lines, wait_for
from forked import Forked
from moesaic.errors import InputError, TrainingError
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.config import TrainConfig
from moesaic.train.launch import NEEDED, OTHERS, launch, meet
from runs import assert_same, losses, parameters, tiny, write_config

FAIL = """
import sys
from moesaic.cli.main import main
from moesaic.train.loop import Trainer

plain = Trainer._step

def step(self):
    if self.ranks.rank == 1 and self.state.step == 2:
        raise {error}
    return plain(self)

Trainer._step = step
sys.exit(main(sys.argv[1:]))
"""


DIE = """
import os, signal, sys
from moesaic.cli.main import main
from moesaic.train.loop import Trainer

plain = Trainer._step

def step(self):
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), self.ranks.rank
    if (attempt, rank, self.state.step) in [(0, 1, 3), (1, 0, 5)]:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self)

Trainer._step = step
sys.exit(main(sys.argv[1:]))
"""


KILLS = ((1, 2, "flush"), (0, 4, "checksum"), (1, 5, "require_read_back"))
"""Ranks that die, the steps whose checkpoints they write then, and what they do."""

DIE_IN_BACKGROUND = """
import os, signal, sys, threading
from moesaic.cli.main import main
from moesaic.train import checkpoint, distributed_checkpoint
from moesaic.train.loop import Trainer

KILLS = {kills}
who, step, where = KILLS.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), (9, 0, ""))
is_saved = threading.local()
write = checkpoint.write_shards

def write_shards(folder, *arguments, **options):
    is_saved.step = int(folder.name.split("-")[-1])
    return write(folder, *arguments, **options)

def deadly(plain):
    def call(*arguments):
        in_background = threading.current_thread().name == "moesaic-checkpoint"
        if in_background and plain.__name__ == where and is_saved.step == step and int(os.environ["RANK"]) == who:
            print("killed in", where, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)
    return call

checkpoint.write_shards = write_shards
for name in ("flush", "checksum", "require_read_back"):
    setattr(distributed_checkpoint, name, deadly(getattr(distributed_checkpoint, name)))
sys.exit(main(sys.argv[1:]))
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(
    config: TrainConfig, folder: Path, *flags: str, script: Path | None = None, elastic: tuple[str, ...] = ()
) -> list[str]:
    """Return the words behind `python` that start two ranks by torchrun, with flags of ours and of its own."""
    file = write_config(config, folder / "given.json")
    program = ["-m", "moesaic"] if script is None else [str(script)]
    elastic = elastic or ("--master-port", str(free_port()))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *elastic, *program]
    return [*words, "train", "--config", str(file), *flags]


def start(config: TrainConfig, folder: Path, *flags: str, **more: Any) -> Forked:
    """Start `command`."""
    return Forked(command(config, folder, *flags, **more), {})


def ours(text: str) -> list[str]:
    """Return the lines that are ours, not torchrun's."""
    return [line for line in text.splitlines() if line.startswith("moesaic train:")]


def test_without_torchrun_one_process_is_all():
    place = launch()
    assert place.is_first
    assert place.fails_first(ValueError())
    assert place.fails_first(ValueError())
    place.leave()


@pytest.mark.parametrize("is_anew", [False, pytest.param(True, marks=pytest.mark.random)])
def test_flags_choose_mesh_and_plan(tmp_path, is_anew):
    """By a torchrun that is forked off these tests, and by one that an interpreter of its own runs."""
    flags = ["--mesh.ep=2", "--plan.schedule=s2", "--plan.chunks=4", "--plan.all-to-all=hier2d", "--plan.codec=int8"]
    words = command(tiny(tmp_path, batch_size=4, steps=2), tmp_path, *flags)
    if is_anew:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        words = [sys.executable, *words]
        process = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300, check=False)
        out, err = process.stdout, process.stderr
    else:
        process = Forked(words, {})
        out, err = process.communicate(timeout=300)
    assert (process.returncode, ours(err)) == (0, []), err
    assert "x 2 ranks (dp 2, tp 1; edp 1, ep 2, etp 1)" in out
    assert out.count("done: ") == 1
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2]
    assert "Warning" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--mesh.ep", "3"], "moesaic train: mesh.ep=3 does not divide model.moe.num_experts=4"),
        (
            ["--mesh.tp", "1", "--mesh.etp", "4"],
            "moesaic train: mesh.ep=1 times mesh.etp=4 does not divide the 2 ranks",
        ),
        (["--mesh.etpp", "3"], "moesaic train: unknown argument --mesh.etpp, did you mean --mesh.etp?"),
        (["--data.path", "absent"], "moesaic train: data.path: nothing at absent"),
    ],
)
def test_bad_input_is_one_line_for_all_ranks(tmp_path, flags, line):
    process = start(tiny(tmp_path, batch_size=4), tmp_path, *flags)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    (said,) = ours(err)
    assert said.startswith(line)
    assert set(re.findall(r"exitcode *: (\d+)", err)) == {"2"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP], ids=lambda kind: kind.name)
def test_a_signal_to_the_launcher_saves_on_all_ranks(tmp_path, kind):
    config = tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"tp": 2, "ep": 2}, plan={"schedule": "s1"})
    run = tmp_path / "run"
    process = start(config, tmp_path)
    wait_for(lambda: has_lines(run, 3), process)
    process.send_signal(kind)
    out, _ = process.communicate(timeout=300)
    step = losses(run)[-1][0]
    assert (
        f"stopped by {kind.name} after step {step}, saved; go on with torchrun --nproc-per-node 2 -m moesaic train"
        in out
    )
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{step:08d}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("moesaic.errors.TrainingError('rank 1 cannot go on')", "moesaic train: rank 1 cannot go on"),
        ("ZeroDivisionError('a bug')", "ZeroDivisionError: a bug"),
    ],
)
def test_a_rank_that_dies_says_why_and_the_others_leave(tmp_path, error, said):
    script = tmp_path / "fail.py"
    script.write_text(FAIL.format(error=error).replace("import sys\n", "import sys\nimport moesaic.errors\n", 1))
    process = start(tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2}), tmp_path, script=script)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    before, _, summary = err.partition("FAILED\n")
    assert before.count(said) == 1
    assert before.count("Traceback") <= (1 if "bug" in said else 0) + 1  # torchrun's own is the other
    assert "onnection" not in err
    assert said.removeprefix("moesaic train: ") in summary  # in the error that is written down for torchrun
    assert re.search(r"error_file: /\S+error.json", summary)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run of seven steps that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    whole = start(tiny(folder, steps=7, batch_size=4, save={"every": 7}, mesh={"ep": 2}), folder)
    _, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    return folder / "run"


@pytest.mark.random
@pytest.mark.parametrize("rendezvous", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_twice_is_started_anew_and_ends_as_if_undisturbed(tmp_path, rendezvous, undisturbed):
    config = tiny(tmp_path, steps=7, batch_size=4, save={"every": 1}, existing="resume", mesh={"ep": 2})
    script = tmp_path / "die.py"
    script.write_text(DIE)
    elastic = ("--standalone",) if rendezvous == "c10d" else ("--master-port", str(free_port()))
    process = start(config, tmp_path, script=script, elastic=("--max-restarts", "3", *elastic))
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.count("done: ") == 1
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 8))
    assert_same(parameters(tmp_path / "run"), parameters(undisturbed))


@pytest.mark.parametrize("kills", [KILLS[1:2], pytest.param(KILLS, marks=pytest.mark.random)], ids=len)
def test_kills_in_the_threads_that_write_checkpoints_cost_nothing_but_the_steps_since_the_last(
    tmp_path, undisturbed, kills
):
    changes = {"steps": 7, "batch_size": 4, "save": {"every": 1, "keep": 1, "background": True}}
    config = tiny(tmp_path, **changes, existing="resume", mesh={"ep": 2})
    script = tmp_path / "die.py"
    script.write_text(DIE_IN_BACKGROUND.replace("{kills}", str(dict(enumerate(kills)))))
    process = start(config, tmp_path, script=script, elastic=("--standalone", "--max-restarts", "3"))
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert re.findall("killed in (.*)", out) == [where for _, _, where in kills]
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 8))
    assert_same(parameters(tmp_path / "run"), parameters(undisturbed))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000007"]


@pytest.mark.slow
def test_a_refusal_after_a_restart_is_still_said(tmp_path):
    script = tmp_path / "die.py"
    script.write_text(DIE)
    config = tiny(tmp_path, steps=7, batch_size=4, save={"every": 1}, existing="refuse", mesh={"ep": 2})
    process = start(config, tmp_path, script=script, elastic=("--standalone", "--max-restarts", "1"))
    try:
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode != 0
    assert [line for line in ours(err) if "holds a run already" in line], err


def bare(folder: Path, config: TrainConfig, script: Path | None = None, **said: str) -> Forked:
    """Start one rank without torchrun, with the variables of some launcher."""
    file = write_config(config, folder / "given.json")
    program = ["-m", "moesaic"] if script is None else [str(script)]
    return Forked([*program, "train", "--config", str(file), "--start-patience", f"{config.start_patience:g}"], said)


def among(rank: int, port: int) -> dict[str, str]:
    """Return what a launcher of two ranks sets for one."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_any_launcher_that_sets_rank_and_world_size_will_do(tmp_path):
    config, port = tiny(tmp_path, steps=2, batch_size=4, mesh={"ep": 2}), free_port()
    ranks = [bare(tmp_path, config, **among(rank, port)) for rank in range(2)]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "x 2 ranks (dp 2, tp 1; edp 1, ep 2, etp 1)" in said[0][0]
    assert "done: " in said[0][0]
    assert said[1][0] == ""


def test_where_the_store_dies_the_others_say_one_line(tmp_path):
    config, port = tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2}), free_port()
    ranks = [bare(tmp_path, config, **among(rank, port)) for rank in range(2)]
    wait_for(lambda: has_lines(tmp_path / "run", 2), ranks[0])
    ranks[0].kill()
    _, err = ranks[1].communicate(timeout=300)
    ranks[0].communicate(timeout=300)
    assert ranks[1].returncode == 1
    (line,) = ours(err)
    assert re.match(r"moesaic train: rank 0 died .*, in step \d+; ", line)
    assert "Traceback" not in err


STRIKES = """
import os, signal, sys
import moesaic.cli.train
from moesaic.cli.main import main
from moesaic.train import launch, loop

place, name = {where}, {name!r}
plain = getattr(place, name)

def disturbed(*arguments, **options):
    if not {is_before}:
        result = plain(*arguments, **options)
    if os.environ["RANK"] == "{rank}":
        os.kill(os.getpid(), signal.{kind})
    return plain(*arguments, **options) if {is_before} else result

setattr(place, name, disturbed)
sys.exit(main(sys.argv[1:]))
"""
"""Kills or stops a rank before or after a function of the start."""
PLACES = {
    "before it listens": ("moesaic.cli.train", "_start_patience", True),
    "before the ranks met": ("launch", "meet", True),
    "after it was met": ("launch", "meet", False),
    "in the start": ("loop", "train", True),
    "in the reading": ("loop", "open_run", True),
}
LOST_0 = "rank 0(, which keeps the ranks' store,)? (died|is stopped|did not answer|does not answer)"
"""What may be said of rank 0, which is lost before, while or after it is asked: its number, and no other cause."""


@pytest.mark.parametrize(
    ("kind", "rank", "when", "line"),
    [
        ("SIGKILL", 0, "before it listens", "rank 0, which keeps the ranks' store, does not answer"),
        ("SIGKILL", 0, "after it was met", LOST_0),
        ("SIGKILL", 1, "before it listens", "rank 1 did not come"),
        ("SIGKILL", 1, "after it was met", "rank 1 died (by SIGKILL )?.*, while the ranks met: start the run again"),
        ("SIGKILL", 1, "in the reading", "rank 1 died (by SIGKILL )?.*, in the start; start the run again"),
        *(
            pytest.param(*case, marks=pytest.mark.random)
            for case in [
                ("SIGKILL", 0, "in the reading", LOST_0),
                ("SIGSTOP", 0, "before it listens", "rank 0, which keeps the ranks' store, does not answer"),
                ("SIGSTOP", 0, "before the ranks met", LOST_0),
                ("SIGSTOP", 0, "after it was met", LOST_0),
                ("SIGSTOP", 0, "in the start", LOST_0),
                ("SIGSTOP", 0, "in the reading", LOST_0),
                ("SIGSTOP", 1, "before the ranks met", "rank 1 did not come"),
                ("SIGSTOP", 1, "after it was met", r"rank 1 is stopped \(process"),
                ("SIGSTOP", 1, "in the reading", r"rank 1 is stopped \(process"),
            ]
        ),
    ],
)
def test_a_rank_that_dies_or_stops_in_the_start_is_named_without_torchruns_store(tmp_path, kind, rank, when, line):
    where, name, is_before = PLACES[when]
    script = tmp_path / "strikes.py"
    script.write_text(STRIKES.format(where=where, name=name, is_before=is_before, rank=rank, kind=kind))
    config, port = tiny(tmp_path, batch_size=3, start_patience=4, patience=600), free_port()
    ranks = [bare(tmp_path, config, script, **(among(number, port) | {"WORLD_SIZE": "3"})) for number in range(3)]
    others = [number for number in range(3) if number != rank]
    try:
        said = [line for number in others for line in ours(ranks[number].communicate(timeout=300)[1])]
        assert [ranks[number].returncode for number in others] == [1, 1]
    finally:
        ranks[rank].kill()
    assert said
    assert [each for each in said if not re.search(line, each)] == []


def test_frames_of_torch_are_not_printed_where_rank_0_dies(tmp_path):
    """By an interpreter of its own, since torch reads its level of messages when it is imported."""
    script, port = tmp_path / "dies.py", free_port()
    script.write_text(
        f"import os, torch.distributed as dist\nstore = dist.TCPStore('127.0.0.1', {port}, is_master=True)\n"
        "store.wait(['moesaic/comes/1'])\nos._exit(1)\n"
    )
    rank_0 = Forked([str(script)], {})
    words = ["-m", "moesaic", "train", "--config", str(write_config(tiny(tmp_path), tmp_path / "given.json"))]
    rank_1 = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | among(1, port), check=False
    )
    rank_0.communicate(timeout=300)
    assert rank_1.returncode == 1
    assert re.fullmatch(r"moesaic train: rank 1 of 2 did not meet .*rank 0 did not answer.*\n", rank_1.stderr), (
        rank_1.stderr
    )


@pytest.mark.parametrize(
    ("said", "fragments"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["RANK=1, WORLD_SIZE=2 but not MASTER_ADDR and MASTER_PORT", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 but not RANK"]),
        (among(0, 1) | {"RANK": "x"}, ["RANK=x: must be a whole number"]),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            ["mpirun started 4 processes", "RANK=$OMPI_COMM_WORLD_RANK", "MASTER_ADDR"],
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
            ["srun started 4 processes", "WORLD_SIZE=$SLURM_STEP_NUM"],
        ),
    ],
)
def test_a_launcher_that_does_not_say_enough_is_told_what_is_missing(monkeypatch, said, fragments):
    for name in {name for _, *names in OTHERS for name in names} | set(NEEDED):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        launch()
    assert [part for part in fragments if part not in str(caught.value)] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_meets_says_where_it_waited(monkeypatch, rank):
    said = among(rank, free_port())
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    where = f"{said['MASTER_ADDR']}:{said['MASTER_PORT']}"
    with pytest.raises(
        TrainingError, match=f"rank {rank} of 2 did not meet the others at {where} within 2 s"
    ) as caught:
        launch(2.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_named_where_the_store_lives(rank):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    if rank == 0:
        assert meet(store, rank, 2, 0.5)[1] == "1"
        return
    with pytest.raises(dist.DistStoreError, match="rank 0 did not answer"):
        meet(store, rank, 2, 0.5)


@pytest.mark.parametrize("said", [{"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_that_a_launcher_started_is_alone(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert launch().is_first
