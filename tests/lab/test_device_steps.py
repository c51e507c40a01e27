"""The steps on a GPU: none stops another, a later call goes on, results stand as they come, and a
dry run goes through all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic import layer as layer_module
from moesaic.errors import InputError
from moesaic.planner.cluster import read_cluster
from moesaic_lab.device import layers, profile, ranks, steps, whole
from moesaic_lab.device.__main__ import main
from moesaic_lab.device.shapes import LAYERS, GpuLayer
from moesaic_lab.device.steps import FILES, GpuStep, claims, run

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')


def step(name: str, code: str, *, seconds: float = 30.0, **options) -> GpuStep:
    return GpuStep(name=name, command=(sys.executable, "-c", code), seconds=seconds, **options)


def ended(rows: list[dict]) -> dict[str, str]:
    return {row["step"]: row["ended"] for row in rows if row.get("what") == "step"}


def test_a_step_that_crashes_or_hangs_costs_its_own_figures_alone(
    tmp_path: Path, monkeypatch
) -> None:
    layer = steps.FIRST[0]
    held = {
        "rows": {
            "dense": {"name": "dense", "tflops": 700.0},
            "plans": {"name": "plans", "worst": 1e-7},
        }
    }
    lines = [
        step("compile", "import time; time.sleep(0.2)", background=True),
        step("tests", "print('all well')", output="tests.txt"),
        step(f"layer.{layer}", "print('before'); import os; os.abort()"),
        step("sonic", "import time; time.sleep(60)", seconds=1.0),
        step("absent", "", needs="no-such-program"),
        step(
            "rows", f"import json; json.dump({held!r}, open({str(tmp_path / 'rows.json')!r}, 'w'))"
        ),
        step("memcheck", "print('two steps may write to one file')", output="tests.txt"),
    ]
    monkeypatch.setattr(steps, "steps", lambda *_, **__: lines)
    found = ended(run(tmp_path, dry=True))
    assert found["compile"] == found["tests"] == found["rows"] == "ok"
    assert found[f"layer.{layer}"] == "exit code -6"
    assert found["sonic"] == "ended after 1 s, its limit"
    assert found["absent"] == "not begun: no-such-program is not installed"
    assert (tmp_path / "tests.txt").read_text() == "all well\ntwo steps may write to one file\n"
    written = json.loads((tmp_path / "gpu.json").read_text())
    by_name = {claim["name"]: claim for claim in written["claims"]}
    assert by_name["gpu.tests_failed"]["value"] == 0
    assert by_name["gpu.plans.worst_error"]["holds"]
    assert "exit code -6" in by_name[f"gpu.{layer}.forward_tflops"]["reason"]
    assert (
        "ended after 1 s" in by_name[f"gpu.{layer}.over_sonic"]["reason"]
        or by_name[f"gpu.{layer}.over_sonic"]["reason"]
    )
    assert next(row for row in written["rows"] if row.get("name") == f"sonic.{layer}")[
        "error"
    ].startswith("ended after 1 s")
    assert "DRY RUN" in written["notes"]


def test_a_later_call_runs_what_did_not_end_well(tmp_path: Path, monkeypatch) -> None:
    well = step("tests", "print('once')", output="tests.txt")
    badly = step("checks", "raise SystemExit(1)")
    monkeypatch.setattr(steps, "steps", lambda *_, **__: [well, badly])
    assert ended(run(tmp_path, dry=True)) == {"tests": "ok", "checks": "exit code 1"}
    mended = step("checks", "")
    monkeypatch.setattr(steps, "steps", lambda *_, **__: [well, mended])
    assert ended(run(tmp_path, dry=True, only="check")) == {"tests": "ok", "checks": "ok"}
    assert (tmp_path / "tests.txt").read_text() == "once\n"
    monkeypatch.setattr(steps, "_gpu", lambda: "another GPU")
    run(tmp_path, dry=True)
    assert (tmp_path / "tests.txt").read_text() == "once\nonce\n"


def test_a_later_call_finds_the_kernels_of_an_earlier_one(tmp_path: Path, monkeypatch) -> None:
    code = "import os, pathlib; pathlib.Path(os.environ['TRITON_CACHE_DIR']).mkdir(exist_ok={})"
    lines = [step(f"at {number}", code.format(bool(number))) for number in range(2)]
    monkeypatch.setattr(steps, "steps", lambda *_, **__: lines)
    for line in lines:
        assert ended(run(tmp_path, dry=True, only=line.name))[line.name] == "ok"
    assert (tmp_path / "triton").is_dir()


def test_layers_are_made_where_they_are_measured(monkeypatch) -> None:
    """A layer of 11 billion parameters that the host draws takes minutes and 45 GB."""
    made: list[object] = []
    monkeypatch.setattr(layer_module, "MoE", lambda *_, **options: made.append(options) or 1 / 0)
    inputs = layers.Inputs.untouched(GpuLayer(4, 8, 8, 2, 1))
    with pytest.raises(ZeroDivisionError):
        layers.layer_of(inputs)
    assert made[0]["device"] == inputs.x.device
    assert made[0]["dtype"] == torch.bfloat16


@pytest.mark.parametrize("is_clamped", [False, True])
def test_the_compiler_gets_leaves_that_have_gradients(is_clamped: bool) -> None:
    """Without them no backward kernel of the layer is compiled ahead."""
    inputs = layers.Inputs.untouched(GpuLayer(4, 8, 8, 2, 1, is_clamped=is_clamped))
    assert len(inputs.leaves) == (6 if is_clamped else 4)
    assert all(leaf.requires_grad for leaf in inputs.leaves)


def test_nothing_begins_after_the_deadline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(steps, "steps", lambda *_, **__: [step("late", "")])
    assert ended(run(tmp_path, dry=True, seconds=-1.0)) == {"late": "not begun: no time was left"}


def test_the_steps_fit_three_calls_and_the_files(tmp_path: Path) -> None:
    planned = steps.steps(tmp_path, dry=False)
    names = [each.name for each in planned]
    assert {each.output for each in planned if each.output} <= set(FILES)
    assert {name for name in names if name.startswith("layer.")} == {
        f"layer.{each.name}" for each in LAYERS
    }
    assert names[:12] == [
        *("compile", "checks", "whole"),
        *(f"layer.{name}" for name in steps.FIRST),
        *("sonic", "transformers", "plans", "training", "sharded"),
    ]
    others = [name for name in names if name.startswith("layer.") and name not in names[:12]]
    assert names[12 : 12 + len(others) + 2] == ["finetune", *others, "tests"]
    first = planned[:8]
    assert sum(each.seconds for each in first if not each.background) <= steps.SECONDS
    assert names[-3:] == ["memcheck", "racecheck", "ncu"]
    usual = sum(
        7.5 if each.name.startswith("layer") else each.seconds
        for each in planned
        if not each.background
    )
    assert usual < 3 * steps.SECONDS


@pytest.mark.slow
def test_a_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    rows = run(tmp_path, dry=True, seconds=1500.0)
    for name, end in ended(rows).items():
        assert end == "ok" or end.startswith("not begun: "), (name, end)
    assert {path.name for path in tmp_path.iterdir()} <= set(FILES)
    assert json.loads((tmp_path / "compiled.json").read_text())["failures"] == []
    found = {claim.name: claim for claim in claims(rows)}
    assert found["gpu.tests_failed"].value == found["gpu.checks_failed"].value == 0
    assert all(
        found[f"gpu.{name}"].holds
        for name in ("plans.worst_error", "training.worst_difference_of_a_loss")
    )


def test_the_planner_reads_the_profile(tmp_path: Path) -> None:
    assert profile.profile(tmp_path, dry=True) == 0
    found = read_cluster(str(tmp_path / "cluster.json"))
    device = found.device
    assert (found.world, found.links, device.memory_gib) == (1, (), 1.0)
    assert device.gemm_rows == tuple(map(float, profile.DRY.rows))
    assert all(0 < share <= 1 for share in device.gemm_share)
    assert min(getattr(device.tflops, name) for name in ("bf16", "fp16", "fp32", "tf32")) > 0
    assert device.tflops.fp8 == 0, "nobody measured it"
    assert device.memory_gigabytes_per_second > 0


def test_a_plan_with_a_wrong_result_or_an_error_is_the_worst() -> None:
    well = [
        {"plan": "a", "error": 1e-7, "is_lossless": True},
        {"plan": "b", "error": 1e-2, "is_lossless": False},
    ]
    assert ranks.worst_of([well, [well[0] | {"error": 1e-3}, well[1]]])["worst"] == 1e-3
    assert ranks.worst_of([well, well])["worst"] == 1e-7
    broken = {"plan": "b", "reason": "ValueError: no", "is_lossless": False}
    assert ranks.worst_of([well, [well[0], broken]]) == {"plans": [well[0], broken], "worst": 1.0}


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_that_share_a_gpu_have_hosts_of_their_own(rank: int, monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    assert ranks._as_host(lambda device, *others: (device, *others), "cpu", 1) == ("cpu", 1)
    assert os.environ == ranks.NCCL | {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": "0"}


@pytest.mark.random
def test_plans_and_training_of_four_ranks_equal_one_process() -> None:
    rows = {"plans": ranks.plans_row(dry=True), "training": ranks.training_row(dry=True)}
    assert {row["plan"] for row in rows["plans"]["plans"]} >= {
        "s2",
        "multicast",
        "hier2d",
        "int8",
        "shadow",
    }
    assert rows["plans"]["worst"] < 1e-5
    assert set(rows["training"]["losses"]) == {
        "one process",
        "one process, halves",
        *ranks.RUNS,
        "resumed on another mesh",
    }
    assert rows["training"]["worst"] < 1e-4


def test_a_layer_is_timed_in_every_way_that_it_can_run(monkeypatch) -> None:
    monkeypatch.setattr(whole, "REPEATS", 1)
    monkeypatch.setattr(torch, "compile", lambda layer, backend: layer)
    row = whole.layer_row(dry=True)
    assert "x is on cpu" in row["replayed_absent"]
    assert {name for name in row if name.endswith("_ms")} == {
        f"{way}_{what}ms" for way in ("eager", "compiled") for what in ("", "gpu_", "host_")
    }


def test_a_failure_is_printed_before_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_wrong():\n    assert 1 == 2\n\ndef test_killed():\n    import os\n    "
        "os._exit(3)\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "moesaic_lab.device.failures"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "==== " in done.stdout
    assert "assert 1 == 2" in done.stdout


def test_a_step_writes_a_row_for_each_of_its_words(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        whole,
        "model_row",
        lambda family, *, dry: {"family": family} if family != "gpt_oss" else 1 / 0,
    )
    assert main(["transformers", str(tmp_path), *steps.FAMILIES, "--dry"]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row.get("error", "") for row in rows.values()] == [
        "",
        "",
        "ZeroDivisionError: division by zero",
    ]
    assert set(rows) == {f"transformers.{family}" for family in steps.FAMILIES}
    assert set(whole.FAMILIES) == set(steps.FAMILIES)
    monkeypatch.setattr(whole, "layer_row", lambda *, dry: {"eager_ms": 1.0})
    assert main(["whole", str(tmp_path), "--dry"]) == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"]["whole"]["eager_ms"] == 1.0


def test_unknown_words_are_refused_in_one_line(capsys) -> None:
    for words in (["x"], ["plans"]):
        assert main(words) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(InputError, match="finds none"):
        steps.require(dry=False)


def test_a_dry_step_without_a_folder_is_refused_in_one_line(capsys) -> None:
    assert main(["measure", "--dry"]) == 2
    assert "measure --dry: write one of" in capsys.readouterr().err
