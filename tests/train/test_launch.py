"""`torchrun -m moesaic train`: one error line for all ranks, signals, and ranks that die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from cli.test_train import has_lines, wait_for
from forked import Forked
from helpers import refused
from moesaic.errors import TrainingError
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.config import TrainConfig
from moesaic.train.launch import NEEDED, OTHERS, launch, meet
from runs import assert_same, losses, parameters, tiny, write_config
from train.disturbed import command, disturbing, finished, free_port, ours, start


def test_without_torchrun_one_process_is_all():
    place = launch()
    assert place.is_first
    assert place.fails_first(ValueError())
    assert place.fails_first(ValueError())
    place.leave()


def test_flags_choose_mesh_and_plan(tmp_path):
    flags = [
        "--mesh.ep=2",
        "--plan.schedule=s2",
        "--plan.chunks=4",
        "--plan.all-to-all=hier2d",
        "--plan.codec=int8",
    ]
    words = command(tiny(tmp_path, batch_size=4, steps=2), tmp_path, *flags)
    process = Forked(words, {})
    out, err = finished(process)
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
            ["--mesh.etp", "4"],
            "moesaic train: mesh.ep=1 times mesh.etp=4 does not divide the 2 ranks",
        ),
        (
            ["--mesh.etpp", "3"],
            "moesaic train: unknown argument --mesh.etpp, did you mean --mesh.etp?",
        ),
    ],
)
def test_bad_input_is_one_line_for_all_ranks(tmp_path, flags, line):
    process = start(tiny(tmp_path, batch_size=4), tmp_path, *flags)
    _, err = finished(process)
    assert process.returncode != 0
    (said,) = ours(err)
    assert said.startswith(line)
    assert set(re.findall(r"exitcode *: (\d+)", err)) == {"2"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP], ids=lambda kind: kind.name)
def test_a_signal_to_the_launcher_saves_on_all_ranks(tmp_path, kind):
    config = tiny(
        tmp_path, steps=1_000_000, batch_size=4, mesh={"tp": 2, "ep": 2}, plan={"schedule": "s1"}
    )
    run = tmp_path / "run"
    process = start(config, tmp_path)
    wait_for(lambda: has_lines(run, 3), process)
    process.send_signal(kind)
    out, _ = finished(process)
    step = losses(run)[-1][0]
    assert (
        f"stopped by {kind.name} after step {step}, saved; go on with torchrun "
        "--nproc-per-node 2 -m moesaic"
    ) in out
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{step:08d}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("TrainingError('rank 1 cannot go on')", "moesaic train: rank 1 cannot go on"),
        ("ZeroDivisionError('a bug')", "ZeroDivisionError: a bug"),
    ],
)
def test_a_rank_that_dies_says_why_and_the_others_leave(tmp_path, error, said):
    before = f"if rank == 1 and given[0].state.step == 2: raise {error}"
    script = disturbing(tmp_path, "loop.Trainer._step", before)
    process = start(
        tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2}), tmp_path, script=script
    )
    _, err = finished(process)
    assert process.returncode != 0
    before, _, summary = err.partition("FAILED\n")
    assert before.count(said) == 1
    # torchrun's own is the other
    assert before.count("Traceback") <= (1 if "bug" in said else 0) + 1
    assert "onnection" not in err
    # in the error that is written down for torchrun
    assert said.removeprefix("moesaic train: ") in summary
    assert re.search(r"error_file: /\S+error.json", summary)


SEVEN = {"steps": 7, "batch_size": 4, "existing": "resume", "mesh": {"ep": 2}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run of seven steps that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    whole = start(tiny(folder, **SEVEN), folder)
    _, err = finished(whole)
    assert whole.returncode == 0, err
    return folder / "run"


def assert_undisturbed(run: Path, undisturbed: Path) -> None:
    assert losses(run) == losses(undisturbed)
    assert [step for step, _ in losses(run)] == list(range(1, 8))
    assert_same(parameters(run), parameters(undisturbed))


DIES = "if (attempt, rank, given[0].state.step) in [(0, 1, 3), (1, 0, 5)]: kill()"


@pytest.mark.random
@pytest.mark.parametrize("rendezvous", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_twice_is_started_anew_and_ends_as_if_undisturbed(
    tmp_path, rendezvous, undisturbed
):
    script = disturbing(tmp_path, "loop.Trainer._step", DIES)
    elastic = ("--standalone",) if rendezvous == "c10d" else ("--master-port", str(free_port()))
    config = tiny(tmp_path, **SEVEN, save={"every": 1})
    process = start(config, tmp_path, script=script, elastic=("--max-restarts", "3", *elastic))
    out, err = finished(process)
    assert process.returncode == 0, err
    assert out.count("done: ") == 1
    assert_undisturbed(tmp_path / "run", undisturbed)


KILLS = ((0, 4), (1, 2), (1, 5))
"""Ranks that die in the thread that writes a checkpoint, and the steps of the checkpoints."""


@pytest.mark.parametrize(
    "kills", [KILLS[:1], pytest.param(KILLS[1:], marks=pytest.mark.random)], ids=len
)
def test_kills_in_the_threads_that_write_checkpoints_cost_nothing_but_the_steps_since_the_last(
    tmp_path, undisturbed, kills
):
    dying = {number: (rank, f".writing-{step:08d}") for number, (rank, step) in enumerate(kills)}
    before = (
        "if threading.current_thread().name == 'moesaic-checkpoint' and (rank, "
        f"given[0].parents[1].name) == {dying}.get(attempt): print('killed', flush=True); kill()"
    )
    script = disturbing(tmp_path, "distributed_checkpoint.checksum", before)
    config = tiny(tmp_path, **SEVEN, save={"every": 1, "keep": 1, "background": True})
    process = start(
        config, tmp_path, script=script, elastic=("--standalone", "--max-restarts", "3")
    )
    out, err = finished(process)
    assert process.returncode == 0, err
    assert out.count("killed") == len(kills)
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000007"]


@pytest.mark.slow
def test_a_refusal_after_a_restart_is_still_said(tmp_path):
    script = disturbing(tmp_path, "loop.Trainer._step", DIES)
    config = tiny(tmp_path, **SEVEN | {"existing": "refuse", "save": {"every": 1}})
    process = start(
        config, tmp_path, script=script, elastic=("--standalone", "--max-restarts", "1")
    )
    _, err = finished(process)
    assert process.returncode != 0
    assert [line for line in ours(err) if "holds a run already" in line], err


def bare(folder: Path, config: TrainConfig, script: Path | None = None, **said: str) -> Forked:
    """Start one rank without torchrun, with the variables of some launcher."""
    file = write_config(config, folder / "given.json")
    program = ["-m", "moesaic"] if script is None else [str(script)]
    return Forked(
        [
            *program,
            "train",
            "--config",
            str(file),
            "--start-patience",
            f"{config.start_patience:g}",
        ],
        said,
    )


def among(rank: int, port: int, world: int = 2) -> dict[str, str]:
    """Return what a launcher of some ranks sets for one."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


@pytest.mark.parametrize("dies", [False, True])
def test_any_launcher_that_sets_rank_and_world_size_will_do_and_where_the_store_dies_one_line_says_so(  # noqa: E501
    tmp_path, dies
):
    config = tiny(tmp_path, steps=1_000_000 if dies else 2, batch_size=4, mesh={"ep": 2})
    port = free_port()
    ranks = [bare(tmp_path, config, **among(rank, port)) for rank in range(2)]
    if dies:
        wait_for(lambda: has_lines(tmp_path / "run", 2), ranks[0])
        ranks[0].kill()
    (out, _), (silent, err) = (rank.communicate(timeout=300) for rank in ranks)
    assert "x 2 ranks (dp 2, tp 1; edp 1, ep 2, etp 1)" in out
    assert silent == ""
    if not dies:
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert "done: " in out
        return
    assert ranks[1].returncode == 1
    (line,) = ours(err)
    assert re.match(r"moesaic train: rank 0 died .*, in step \d+; ", line)
    assert "Traceback" not in err


PLACES = {
    "before it listens": ("moesaic.cli.train._start_patience", True),
    "before the ranks met": ("launch.meet", True),
    "after it was met": ("launch.meet", False),
    "in the start": ("loop.train", True),
    "in the reading": ("loop.open_run", True),
}
LOST_0 = "rank 0(, which keeps the ranks' store,)? (died|is stopped|did not answer|does not answer)"
"""What may be said of rank 0, which is lost before, while or after it is asked: its number, and no
other cause."""
UNHEARD_0 = "rank 0, which keeps the ranks' store, does not answer"
STOPPED_1 = r"rank 1 is stopped \(process"
STRIKES = [
    ("kill", 0, "before it listens", UNHEARD_0),
    ("kill", 0, "after it was met", LOST_0),
    ("kill", 1, "before it listens", "rank 1 did not come"),
    (
        "kill",
        1,
        "after it was met",
        "rank 1 died (by SIGKILL )?.*, while the ranks met: start the run again",
    ),
    (
        "kill",
        1,
        "in the reading",
        "rank 1 died (by SIGKILL )?.*, in the start; start the run again",
    ),
    ("kill", 0, "in the reading", LOST_0),
    ("stop", 0, "before it listens", UNHEARD_0),
    ("stop", 0, "after it was met", LOST_0),
    ("stop", 0, "in the start", LOST_0),
    ("stop", 1, "before the ranks met", "rank 1 did not come"),
    ("stop", 1, "after it was met", STOPPED_1),
    ("stop", 1, "in the reading", STOPPED_1),
]
"""What strikes, which rank, when, and what the others say."""


@pytest.mark.parametrize(
    ("strike", "rank", "when", "line"),
    [*STRIKES[:5], *(pytest.param(*case, marks=pytest.mark.random) for case in STRIKES[5:])],
)
def test_a_rank_that_dies_or_stops_in_the_start_is_named_without_torchruns_store(
    tmp_path, strike, rank, when, line
):
    where, is_before = PLACES[when]
    strikes = f"if rank == {rank}: {strike}()"
    script = disturbing(tmp_path, where, *((strikes,) if is_before else ("pass", strikes)))
    config = tiny(tmp_path, batch_size=3, start_patience=4, patience=600)
    port = free_port()
    ranks = [bare(tmp_path, config, script, **among(number, port, 3)) for number in range(3)]
    others = [number for number in range(3) if number != rank]
    try:
        said = [
            line for number in others for line in ours(ranks[number].communicate(timeout=300)[1])
        ]
        assert [ranks[number].returncode for number in others] == [1, 1]
    finally:
        ranks[rank].kill()
    assert said
    assert [each for each in said if not re.search(line, each)] == []


def test_frames_of_torch_are_not_printed_where_rank_0_dies(tmp_path):
    """By an interpreter of its own, since torch reads its level of messages when it is imported."""
    script = tmp_path / "dies.py"
    port = free_port()
    script.write_text(
        f"import os, torch.distributed as dist\nstore = dist.TCPStore('127.0.0.1', {port}, "
        "is_master=True)\nstore.wait(['moesaic/comes/1'])\nos._exit(1)\n"
    )
    rank_0 = Forked([str(script)], {})
    words = [
        "-m",
        "moesaic",
        "train",
        "--config",
        str(write_config(tiny(tmp_path), tmp_path / "given.json")),
    ]
    rank_1 = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=os.environ | among(1, port),
        check=False,
    )
    finished(rank_0)
    assert rank_1.returncode == 1
    line = r"moesaic train: rank 1 of 2 did not meet .*rank 0 did not answer.*\n"
    assert re.fullmatch(line, rank_1.stderr), rank_1.stderr


@pytest.mark.parametrize(
    ("said", "fragments"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            ["RANK=1, WORLD_SIZE=2 but not MASTER_ADDR and MASTER_PORT", "torchrun"],
        ),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 but not RANK"]),
        (among(0, 1) | {"RANK": "x"}, ["RANK=x: must be a whole number"]),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            ["mpirun started 4 processes", "RANK=$OMPI_COMM_WORLD_RANK", "MASTER_ADDR"],
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
            ["srun started 4", "WORLD_SIZE=$SLURM_STEP_NUM"],
        ),
    ],
)
def test_a_launcher_that_does_not_say_enough_is_told_what_is_missing(monkeypatch, said, fragments):
    for name in {name for _, *names in OTHERS for name in names} | set(NEEDED):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert [part for part in fragments if part not in refused(launch)] == []


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


@pytest.mark.parametrize(
    "said", [{"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}]
)
def test_one_process_that_a_launcher_started_is_alone(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert launch().is_first
