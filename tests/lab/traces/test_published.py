"""What LAER-MoE and SmartMoE recorded is read as it stands, and damaged files are refused in one
line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.traces.load import faults, max_violation
from moesaic.traces.trace import Trace, TraceSegment, segment_name, write_segment
from moesaic_lab.traces.command import picked
from moesaic_lab.traces.published import read_laer, read_smartmoe
from moesaic_lab.traces.synthetic import SyntheticRouting, make_trace

FIXTURES = Path(__file__).parent / "fixtures"
HEAD = "rank,method,model_name,layer,iter,token_num\n"


def test_laer_has_the_rows_of_its_file():
    trace = Trace.of(read_laer(FIXTURES / "laer.csv", method="FSDP"))
    assert (trace.steps, trace.shape.num_layers, trace.shape.num_experts) == ([0, 1, 2], 2, 32)
    with (FIXTURES / "laer.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "FSDP"]
    for row in rows:
        layer = {"0": 0, "31": 1}[row["layer"]]
        assert trace.samples(layer, int(row["iter"]))[0, int(row["rank"])] == int(row["token_num"])
    assert faults(trace) == []


def test_smartmoe_lines_are_layers(tmp_path):
    (tmp_path / "gpt_iter11_rank0.log").write_text("0:[[3, 1], [2, 2]]\n1:[[4, 0], [0, 4]]\n")
    (tmp_path / "gpt_iter11_rank1.log").write_text("0:[[1, 3], [0, 4]]\n1:[[2, 2], [1, 3]]\n")
    trace = Trace.of(read_smartmoe(tmp_path, top_k=1))
    assert (trace.steps, trace.shape.accumulation, trace.shape.sequences, trace.shape.seq_len) == (
        [11],
        2,
        2,
        4,
    )
    assert trace.samples(0, 11, 1).tolist() == [[2, 2], [0, 4]]
    assert trace.counts(1, 11, 0).tolist() == [[4, 0], [2, 2]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank,layer\n1,2\n", "is not a LAER file"),
        (HEAD + "0,A,m,0,x,3\n", "line 2: is not a row of numbers"),
        (HEAD + "0" * 200_000, "is not a row of numbers"),
        (HEAD + "0,A,m,0,0,1" + "0" * 30, "has a number that no run reaches"),
        (HEAD + "0,A,m,0,0,1\n1,A,m,1,0,1", "some ranks of a layer"),
        (
            HEAD + "0,A,m,0,0,1\n0,B,m,0,0,1",
            "2 of its recordings match the options: choose one of --method A",
        ),
    ],
)
def test_damaged_counts_of_laer_are_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as refused:
        read_laer(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["0:" + "[" * 100_000, '0:{"a": 1}', "0 [[1]]\n"])
def test_damaged_gate_tables_are_refused_in_one_line(tmp_path, text):
    (tmp_path / "a_iter0_rank0.log").write_text(text)
    with pytest.raises(InputError, match="line 1: is not a gate table") as refused:
        read_smartmoe(tmp_path, top_k=1)
    assert "\n" not in str(refused.value)


def test_the_command_writes_traces(tmp_path, capsys):
    out = tmp_path / "a.npz"
    assert (
        main(
            [
                "bench",
                "trace",
                "laer",
                str(FIXTURES / "laer.csv"),
                "--method",
                "FSDP",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert Trace.open(out).shape.num_experts == 32
    (tmp_path / "gpt_iter0_rank0.log").write_text("0:[[2, 2]]\n")
    assert (
        main(["bench", "trace", "smartmoe", str(tmp_path), "--top-k", "2", "--out", str(out)]) == 0
    )
    assert Trace.open(out).loads().tolist() == [[[2, 2]]]
    options = (
        "--steps",
        "3",
        "--sequences",
        "4",
        "--seq-len",
        "64",
        "--max-vio",
        "1.5",
        "--skew",
        "0",
    )
    assert main(["bench", "trace", "make", str(out), *options]) == 0
    assert "steps 0 to 2" in capsys.readouterr().err
    assert max_violation(Trace.open(out).loads()[0, 0]) == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["draw"], "unknown word draw: write make, laer, smartmoe"),
        (["make", "a.txt"], "trace a.txt: choose a name that ends in .npz"),
        (
            ["make", "a.npz", "--max-vio", "8"],
            "these numbers of experts and experts per token allow 0 to 7",
        ),
        (["smartmoe", ".", "--top-k", "0", "--out", "a.npz"], "--top-k 0: must be at least 1"),
        (["smartmoe", ".", "--top-k", "1", "--out", "a.npz"], "holds no file named like"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "trace", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_picked_steps_are_those_of_the_trace(tmp_path, capsys):
    recorded = make_trace(
        SyntheticRouting(steps=6, num_layers=2, num_experts=4, sequences=3, seq_len=8, drift=0.5)
    )
    parts = [next(recorded.segments()).before(3), next(recorded.segments())]
    late = TraceSegment(recorded.shape, recorded.holds, parts[1].steps[3:], parts[1].table[3:])
    for part in (parts[0], late):
        write_segment(part, tmp_path / "routing" / segment_name(int(part.steps[0])))
    out = tmp_path / "few.npz"
    assert (
        main(["bench", "trace", "pick", str(tmp_path), "--out", str(out), "--steps", "1", "2", "5"])
        == 0
    )
    capsys.readouterr()
    few = Trace.open(out)
    assert few.steps == [1, 2, 5]
    for layer, step in ((0, 1), (1, 2), (1, 5)):
        assert few.samples(layer, step).tolist() == recorded.samples(layer, step).tolist()
    with pytest.raises(InputError, match=r"--steps 7: .* has 0 to 5: choose of these"):
        picked(recorded, (1, 7))
