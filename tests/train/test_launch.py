"""`torchrun -m moesaic train`: one line on behalf of all ranks, signals, and a rank that dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.test_train import has_lines, wait_for
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.config import TrainConfig
from moesaic.train.launch import launch
from runs import losses, tiny, write_config

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


def start(config: TrainConfig, folder: Path, *flags: str, script: Path | None = None) -> subprocess.Popen[str]:
    """Start two ranks by torchrun."""
    file = write_config(config, folder / "given.json")
    program = ["-m", "moesaic"] if script is None else [str(script)]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words += ["train", "--config", str(file), *flags]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ours(text: str) -> list[str]:
    """Return the lines that are ours, not torchrun's."""
    return [line for line in text.splitlines() if line.startswith("moesaic train:")]


def test_without_torchrun_one_process_is_all():
    place = launch()
    assert place.is_first
    assert place.fails_first()
    assert place.fails_first()
    place.leave()


def test_flags_choose_mesh_and_plan(tmp_path):
    flags = ["--mesh.ep=2", "--plan.schedule=s2", "--plan.chunks=4", "--plan.all-to-all=hier2d", "--plan.codec=int8"]
    process = start(tiny(tmp_path, batch_size=4, steps=2), tmp_path, *flags)
    out, err = process.communicate(timeout=120)
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
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    (said,) = ours(err)
    assert said.startswith(line)
    assert set(re.findall(r"exitcode *: (\d+)", err)) == {"2"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sigterm_saves_on_all_ranks(tmp_path):
    config = tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"tp": 2, "ep": 2}, plan={"schedule": "s1"})
    run = tmp_path / "run"
    process = start(config, tmp_path)
    wait_for(lambda: has_lines(run, 3), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    step = losses(run)[-1][0]
    assert (
        f"stopped by SIGTERM after step {step}, saved; go on with torchrun --nproc-per-node 2 -m moesaic train" in out
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
    begin = time.monotonic()
    process = start(tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2}), tmp_path, script=script)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert time.monotonic() - begin < 60
    assert err.count(said) == 1
    assert err.count("Traceback") <= (1 if "bug" in said else 0) + 1  # torchrun's own is the other
    assert "onnection" not in err
