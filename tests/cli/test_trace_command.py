"""`moesaic trace`: shows, takes counts, checks, converts, and refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.planner.workload import read_counts
from moesaic.traces.trace import Trace, write_segment
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment


def made(path: Path, **changes: Any) -> Path:
    """Write a synthetic trace of four steps and two layers."""
    sizes = {"steps": 4, "num_layers": 2, "sequences": 8, "seq_len": 64, "groups": 2}
    write_segment(make_segment(SyntheticRouting(**sizes | changes)), path)
    return path


def shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert main(["trace", "show", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_trace_is_shown(tmp_path, capsys):
    path = made(tmp_path / "a.npz", max_vio=1.5, locality=0.4, drift=0.2)
    picture = tmp_path / "a.html"
    found = shown(capsys, path)
    assert (found["holds"], found["steps"], found["bytes_per_step"]) == (
        "counts",
        [0, 1, 2, 3],
        2 * 8 * 16,
    )
    assert found["shape"] == {
        "num_layers": 2,
        "num_experts": 16,
        "top_k": 2,
        "sequences": 8,
        "seq_len": 64,
        "accumulation": 1,
    }
    for layer in found["layers"]:
        assert layer["max_violation"] == pytest.approx([1.5] * 4, abs=0.1)
        assert layer["locality"] == pytest.approx(0.4, abs=0.1)
        assert sum(layer["shares"]) == pytest.approx(1)
    assert main(["trace", "show", str(path), "--picture", str(picture)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{picture}\n"
    assert "steps 0 to 3" in said.err
    assert "Load of the experts, layer 1" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_counts_are_what_the_simulator_reads(tmp_path, capsys, suffix):
    path = made(tmp_path / "a.npz", skew=1.0, tokens=True)
    out = tmp_path / f"a.{suffix}"
    assert (
        main(
            [
                "trace",
                "counts",
                str(path),
                "--out",
                str(out),
                "--layer",
                "1",
                "--step",
                "2",
                "--groups",
                "4",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"{out}: layer 1, step 2, 4 ranks x 16 experts\n"
    assert (read_counts(out) == Trace.open(path).counts(1, 2, groups=4)).all()
    assert main(["trace", "counts", str(path), "--out", str(out)]) == 0
    assert (read_counts(out) == Trace.open(path).counts(0, 3)).all()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["a.npz", out.name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draw"], "unknown word draw: write show, counts, check, convert"),
        (["show"], "moesaic trace: needs FILE: moesaic trace show FILE"),
        (["show", "nowhere"], "trace nowhere: no such file: name a trace"),
        (["show", "a.npz", "--pictur", "1"], "unknown argument --pictur; --help lists all"),
        (
            ["counts", "nowhere", "--out", "a.txt"],
            "--out a.txt: choose a name that ends in .csv or .npy",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words]) == 2
    said = capsys.readouterr().err
    assert message.split(";")[0] in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_check_and_convert(tmp_path, capsys):
    path = made(tmp_path / "a.npz", skew=1.0, tokens=True)
    folder = tmp_path / "megatron"
    back = tmp_path / "b.npz"
    assert main(["trace", "convert", str(path), "--to", "megatron", "--out", str(folder)]) == 0
    assert (
        main(
            [
                "trace",
                "convert",
                str(folder),
                "--from",
                "megatron",
                "--num-experts",
                "16",
                "--out",
                str(back),
            ]
        )
        == 0
    )
    assert (Trace.open(back).experts(1, 3) == Trace.open(path).experts(1, 3)).all()
    capsys.readouterr()
    assert main(["trace", "check", str(back)]) == 0
    assert "no faults; tokens, steps 0 to 3, 2 layers, 16 experts, top 2" in capsys.readouterr().out
    twice = tmp_path / "r.json"
    twice.write_text('{"routed_experts": [[[1, 1]], [[0, 1]]]}')
    assert main(["trace", "check", str(twice), "--from", "vllm"]) == 2
    assert "a token has an expert twice, as padding has" in capsys.readouterr().err
    for wrong in (["--from", "vlm"], ["--from", "vllm"], []):
        assert main(["trace", "convert", str(twice), "--out", str(tmp_path / "x.csv"), *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
