"""The one command of a GPU: no step stops another, results stand as they come, and without a GPU every step still runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.planner.cluster import read_cluster
from moesaic_lab.gpu import command, profile
from moesaic_lab.gpu.command import FILES, GpuStep, run
from moesaic_lab.gpu.shapes import LAYERS

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')


def step(name: str, code: str, *, seconds: float = 30.0, **options) -> GpuStep:
    return GpuStep(name=name, command=(sys.executable, "-c", code), seconds=seconds, **options)


def test_a_step_that_crashes_or_hangs_costs_its_own_figures_alone(tmp_path: Path, monkeypatch) -> None:
    layer = next(iter(LAYERS)).name
    held = {"rows": {"dense": {"name": "dense", "tflops": 700.0}}}
    lines = [
        step("compile", "import time; time.sleep(0.2)", background=True),
        step("tests", "print('all well')", output="tests.txt"),
        step(f"layer.{layer}", "print('before'); import os; os.abort()"),
        step("hangs", "import time; time.sleep(60)", seconds=1.0),
        step("absent", "", needs="no-such-program"),
        step("rows", f"import json; json.dump({held!r}, open({str(tmp_path / 'rows.json')!r}, 'w'))"),
    ]
    monkeypatch.setattr(command, "steps", lambda *_, **__: lines)
    run(tmp_path, dry=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    ended = {each["name"]: each["ended"] for each in found["rows"][0]["steps"]}
    assert ended["compile"] == ended["tests"] == ended["rows"] == "ok"
    assert ended[f"layer.{layer}"] == "exit code -6"
    assert ended["hangs"] == "ended after 1 s, its limit"
    assert ended["absent"] == "not begun: the program no-such-program is not installed"
    assert (tmp_path / "tests.txt").read_text() == "all well\n"
    claims = {claim["name"]: claim for claim in found["claims"]}
    assert claims["gpu.tests_failed"]["value"] == 0
    assert claims[f"gpu.{layer}.forward_tflops"]["value"] is None
    assert "exit code -6" in claims[f"gpu.{layer}.forward_tflops"]["reason"]
    assert {"dense"} <= {row["name"] for row in found["rows"]}
    assert "DRY RUN" in found["notes"]


def test_nothing_begins_after_the_deadline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command, "steps", lambda *_, **__: [step("late", "")])
    found = run(tmp_path, dry=True, seconds=-1.0)
    assert found.rows[0]["steps"][0]["ended"] == "not begun: no time was left"


def test_the_steps_fit_the_time_and_the_files(tmp_path: Path) -> None:
    """Layers are cut off by the whole command's deadline, last the profiler and SonicMoE, whose compiler is slow."""
    planned = command.steps(tmp_path, tmp_path, dry=False)
    before = sum(
        each.seconds
        for each in planned
        if not each.background and not each.name.startswith(("layer", "tune", "ncu", "sonic"))
    )
    tuned = sum(each.seconds for each in planned if each.name.startswith("tune"))
    assert before + tuned + 10 * len(LAYERS) < command.SECONDS
    assert {each.output for each in planned if each.output} <= set(FILES)
    assert [each.name for each in planned if each.name.startswith("layer.")] == [
        f"layer.{each.name}" for each in LAYERS
    ]


@pytest.mark.slow
def test_a_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    found = run(tmp_path, dry=True, seconds=550.0)
    for each in found.rows[0]["steps"]:
        assert each["ended"] == "ok" or each["ended"].startswith(
            ("not begun: the program", "not begun: the package")
        ), each
    assert {path.name for path in tmp_path.iterdir()} <= set(FILES)
    assert json.loads((tmp_path / "compiled.json").read_text())["failures"] == []
    assert {claim.name for claim in found.claims if claim.value == 0} >= {"gpu.tests_failed", "gpu.checks_failed"}


def test_the_planner_reads_the_profile(tmp_path: Path) -> None:
    assert profile.write(tmp_path / "cluster.json", dry=True) == 0
    found = read_cluster(str(tmp_path / "cluster.json"))
    device = found.device
    assert (found.world, found.links, device.memory_gib) == (1, (), 1.0)
    assert device.gemm_rows == tuple(map(float, profile.DRY.rows))
    assert all(0 < share <= 1 for share in device.gemm_share)
    assert min(getattr(device.tflops, name) for name in ("bf16", "fp16", "fp32", "tf32")) > 0
    assert device.tflops.fp8 == 0, "nobody measured it"
    assert device.memory_gigabytes_per_second > 0


def test_two_steps_may_write_to_one_file(tmp_path: Path, monkeypatch) -> None:
    lines = [step(name, f"print({name!r})", output="tests.txt") for name in ("tests", "memcheck")]
    monkeypatch.setattr(command, "steps", lambda *_, **__: lines)
    run(tmp_path, dry=True)
    assert (tmp_path / "tests.txt").read_text() == "tests\nmemcheck\n"


def test_unknown_words_are_refused_in_one_line() -> None:
    for words in (["x"], ["--seconds", "y"]):
        with pytest.raises(InputError, match="--help lists all") as refused:
            command.main(words)
        assert "\n" not in str(refused.value)
