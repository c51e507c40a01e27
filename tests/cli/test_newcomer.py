"""What a newcomer types by mistake is answered in one line that says what to type, and lines that
count one thing say so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.cli.train import TAKEN, USUAL
from moesaic.errors import counted
from moesaic.planner.presets import CONFIGS
from moesaic.traces.trace import write_segment
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment

ROOT = Path(__file__).resolve().parents[2]
SHOW = "show --mesh.tp 1 --mesh.etp 1 --plan.schedule s1"
PLURAL_OF_ONE = re.compile(r"(?<![\d.,])\b1 (?:nodes|ranks|sequences|files)\b")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("train --planner.plan serach", "planner.plan=serach is unknown: did you mean search?"),
        ("train --plan searhc", "planner.plan=searhc is unknown: did you mean search?"),
        ("train --plan my-plan", "or give a file that moesaic plan --write wrote, .toml or .json"),
        ("train --config run", "config run: is a folder: name a file, such as run/config.json"),
        ("train --config gone.toml", "config gone.toml: no such file"),
        ("train --plan gone.toml", "plan gone.toml: no such file"),
        ("show --plan-file gone.toml", "plan gone.toml: no such file"),
        ("show --plan-file run", "plan run: is a folder: name a file, such as run/plan.json"),
        ("plan --model gone.toml --cluster 25gbe", "model gone.toml: no such file"),
        ("plan --model demo --cluster gone.toml", "cluster gone.toml: no such file"),
        ("sho", "moesaic sho: unknown command: did you mean show? (--help lists all)"),
        ("finetun", "unknown command: did you mean finetune? (--help lists all)"),
        (
            "plan --model demo --cluster 4x3090",
            "cluster '4x3090' is unknown: did you mean 4x3090-pcie?",
        ),
        (
            "plan --model demo --cluster 2x4x4090",
            "cluster '2x4x4090' is unknown: did you mean 2x4x4090-25gbe?",
        ),
        ("plan --model demo --cluster 25gb", "cluster '25gb' is unknown: did you mean 25gbe?"),
        ("certify gone.py:Layer", "gone.py:Layer: gone.py: no such file"),
        ("convert verify run", "that of a run of moesaic train compares logits at once"),
    ],
)
def test_what_is_misspelt_is_answered(tmp_path, monkeypatch, capsys, words, answer):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert answer in said


def test_one_thing_is_counted_in_the_singular():
    assert [counted(number, "node") for number in (0, 1, 2, 1000)] == [
        "0 nodes",
        "1 node",
        "2 nodes",
        "1,000 nodes",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "plan --model demo --cluster dgx-h100 --gpus 2 --schedules s1 --all-to-alls linear",
        "plan explain --model demo --cluster dgx-h100 --gpus 2 --schedules s1 --all-to-alls linear "
        "--pp 2 --flags --pipeline-model-parallel-size=2",
        f"{SHOW} --mesh.world 1 --mesh.ep 1 --mesh.ranks-per-node 1",
        f"{SHOW} --mesh.world 4 --mesh.ep 4 --mesh.ranks-per-node 4",
    ],
)
def test_no_line_says_one_nodes(capsys, words):
    assert main(words.split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert not PLURAL_OF_ONE.search(said), PLURAL_OF_ONE.search(said)


def test_a_layout_of_another_system_names_all_that_prints_it(capsys):
    words = ["--model", "olmoe-1b-7b", "--cluster", "dgx-h100", "--gpus", "16"]
    words += ["--batch-size", "32", "--reserve-gib", "2.0"]
    few = ["--schedules", "s1", "--all-to-alls", "linear", "--chunks", "1", "--ep", "8"]
    assert main(["plan", *words, *few]) == 0
    said = capsys.readouterr().out.replace("\\\n", "")  # lines of one command
    advice = re.search(r"^ +moesaic (plan emit megatron --pp \d+ .*)  # prints", said, re.MULTILINE)
    assert advice is not None
    command = shlex.split(advice[1])
    assert command[5:] == words
    layout = re.search(r"as Megatron-LM \S+ runs it: (.*?): ", " ".join(said.split()))
    assert layout is not None
    assert main(command) == 0
    flags = " ".join(capsys.readouterr().out.split())
    for name, flag in (("ep", "expert-model-parallel-size"), ("micro-batch", "micro-batch-size")):
        size = re.search(rf"{name} (\d+)", layout[1])
        assert size is not None
        assert f"--{flag} {size[1]} " in flags


def test_the_help_of_plan_names_every_model(capsys):
    assert main(["plan", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert [name for name in CONFIGS if name not in said] == []


def test_the_table_of_a_trace_is_whole_in_a_narrow_place(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    sizes = {"steps": 4, "num_layers": 2, "sequences": 8, "seq_len": 64, "groups": 2}
    write_segment(make_segment(SyntheticRouting(**sizes)), tmp_path / "a.npz")
    assert main(["trace", "show", str(tmp_path / "a.npz")]) == 0
    said = capsys.readouterr().err
    assert "…" not in said
    for name in ("MaxVio first", "largest", "busiest", "locality"):
        assert name in said


def test_in_one_node_no_time_is_spent_across_nodes(capsys):
    words = f"{SHOW} --mesh.world 4 --mesh.ep 4 --mesh.ranks-per-node 4"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    # after the head of the table of times: a line of each program
    totals = [line.split() for line in lines if " in all " in line][1:3]
    assert [total[0] for total in totals] == ["forward", "backward"]
    for _program, _in, _all, _tasks, _computing, inside, across, *_rest in totals:
        assert float(inside) > 0
        assert float(across) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_help_of_train_has_every_flag_of_the_first_pages(page):
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"moesaic train\b([^\n`#]*)", text)
    flags = {flag for words in commands for flag in re.findall(r" (--[\w.-]+)", words)}
    assert flags
    assert sorted(flags - {*USUAL, *TAKEN}) == []
