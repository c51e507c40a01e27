"""The script of `make places`: its table and exit codes, its places, its steps, and what it expects
of resolution."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moesaic.configfile import read_table
from places import ground, place, resolution, smoke, visit
from places.__main__ import main
from places.ground import Ground, plain, without_rights
from places.place import PLACES, Kind, Place
from places.resolution import Answer, Question
from places.steps import Step, run
from places.table import Judged, Outcome, Row, exit_code, render
from places.walk import PAGES, QUICK, SHORT, SMALL, runs_here, walk

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "lab" / "places"
NAMES = {each.name for each in PLACES}
SETTINGS = {
    "PIP_FIND_LINKS": "wheels",
    "PIP_CONSTRAINT": "c",
    "UV_INDEX": "i",
    "PYTHONPATH": "p",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with this one's README and one commit."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "README.md").write_text((ROOT / "README.md").read_text("utf-8"), encoding="utf-8")
    (root / ".gitignore").write_text("/build/\n")
    who = {
        f"GIT_{role}_{what}": "someone"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    for words in ("init --quiet", "add .", "commit --quiet --message all"):
        subprocess.run(["git", *words.split()], cwd=root, env=os.environ | who, check=True)
    return root


def of(name: str, *, why_missing: str = "", may_be_missing: bool = False) -> Place:
    """Return a place on this machine."""
    return Place(
        name=name,
        about="a test",
        kind=Kind.README,
        python=lambda: sys.executable,
        why_missing=lambda: why_missing,
        may_be_missing=may_be_missing,
    )


def python_step(name: str, code: str, **others: object) -> Step:
    """Return a step that runs a line of Python."""
    return replace(Step(name=name, command=(sys.executable, "-c", code)), **others)


def judged(outcome: Outcome, *, may_be_missing: bool = False) -> Judged:
    """Return a row of an outcome."""
    return Judged(
        row=Row(place="here", result=outcome.value), outcome=outcome, may_be_missing=may_be_missing
    )


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], 1),
        ([judged(Outcome.OK)], 0),
        ([judged(Outcome.OK), judged(Outcome.MISSING, may_be_missing=True)], 0),
        ([judged(Outcome.OK), judged(Outcome.MISSING)], 1),
        ([judged(Outcome.FAILED), judged(Outcome.OK)], 1),
        ([judged(Outcome.FAILED, may_be_missing=True)], 1),
    ],
)
def test_the_exit_code_says_whether_every_row_is_right(rows: list[Judged], code: int) -> None:
    assert exit_code(rows) == code


def test_the_table_has_a_heading_and_a_column_for_each_fact() -> None:
    row = Row(
        place="debian12",
        result="ok",
        date="2026-11-28",
        processor="A B",
        python="3.11.2",
        torch="2.15.0",
    )
    heading, empty, names, line, first = render([row], "Moesaic 0123456789ab").splitlines()
    assert (heading, empty, set(line)) == ("Moesaic 0123456789ab", "", {"-", " "})
    assert names.split() == [
        "place",
        "result",
        "date",
        "processor",
        "python",
        "torch",
        "seconds",
        "packages",
    ]
    assert re.split(r"\s{2,}", first) == [
        "debian12",
        "ok",
        "2026-11-28",
        "A B",
        "3.11.2",
        "2.15.0",
        "-",
        "-",
    ]


def test_only_these_places_may_be_missing() -> None:
    assert {each.name for each in PLACES if each.may_be_missing} == {
        "python3.14",
        "macos",
        "windows",
        "gpu",
    }
    needed = {
        "resolution",
        "debian12",
        "debian13",
        "python3.10",
        "python3.12",
        "python3.13",
        "stranger",
        "walks",
    }
    assert needed | {"python3.14", "macos", "windows", "gpu"} == NAMES
    lowest = read_table(ROOT / "pyproject.toml")["project"]["optional-dependencies"]["train"]
    assert {f"torch>={each.torch[:4]}" for each in PLACES if each.torch} <= set(lowest)


@pytest.mark.parametrize(
    ("allowed", "code", "said"), [(True, 0, "no GPU"), (False, 1, "no GPU, and it must be here")]
)
def test_a_missing_place_is_a_row(
    repository: Path, allowed: bool, code: int, said: str, capsys
) -> None:
    places = [of("gone", why_missing="no GPU", may_be_missing=allowed)]
    assert main(["gone"], root=repository, places=places) == code
    written = (repository / "build/places/table.txt").read_text("utf-8")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True
    ).stdout[:12]
    assert written.startswith(f"Moesaic {commit}\n")
    assert re.search(rf"^gone\s+missing: {said}\s", written, re.MULTILINE)
    assert written in capsys.readouterr().out


def test_an_unknown_place_is_refused_before_anything_runs(repository: Path, capsys) -> None:
    assert main(["debian12", "debian2"], root=repository) == 2
    assert capsys.readouterr().err.startswith(
        "places: no place is named debian2: take some of resolution, debian12"
    )
    assert not (repository / "build").exists()


def test_a_place_runs_up_to_the_first_step_that_fails(
    repository: Path, monkeypatch, capsys
) -> None:
    """Its row names the step; its log and folder stay, while the folder of a place that passed is
    deleted."""
    steps = {
        "good": [python_step("one", "print('done')")],
        "bad": [
            python_step("one", ""),
            python_step("two", "exit('so it is')"),
            python_step("three", ""),
        ],
    }
    monkeypatch.setattr(visit, "steps_of", lambda where, ground: steps[where.name])
    assert (
        main([], root=repository, places=[of("good"), of("bad"), of("gone", why_missing="x")]) == 1
    )
    out = repository / "build/places"
    rows = {
        line.split()[0]: re.split(r"\s{2,}", line)
        for line in (out / "table.txt").read_text().splitlines()[4:]
    }
    assert rows["good"][1] == "ok"
    assert rows["bad"][1] == "failed at two: exit code 1: so it is"
    assert rows["bad"][-1] == "build/places/bad/packages.txt"
    assert "three" not in capsys.readouterr().out
    assert not (out / "good/work").exists()
    assert (out / "bad/work/moesaic/README.md").exists()
    assert "[exit code 0, " in (out / "good/log.txt").read_text()
    assert main(["good"], root=repository, places=[of("good"), of("bad")]) == 0


def test_a_commit_that_comes_while_the_places_run_is_not_tried(
    repository: Path, monkeypatch
) -> None:
    """What is in the table is what was tried."""
    who = ("-c", "user.name=someone", "-c", "user.email=someone")
    later = ("git", *who, "commit", "--quiet", "--allow-empty", "--message", "later")
    before = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True
    ).stdout.strip()
    read = ("git", "rev-parse", "HEAD")
    steps = {
        "first": [Step(name="commit", command=later, folder="../../../..")],
        "second": [Step(name="read", command=read, says=before)],
    }
    monkeypatch.setattr(visit, "steps_of", lambda where, ground: steps[where.name])
    assert main([], root=repository, places=[of("first"), of("second")]) == 0
    assert (
        (repository / "build/places/table.txt").read_text().startswith(f"Moesaic {before[:12]}\n")
    )


def test_changes_that_are_not_committed_are_named(repository: Path) -> None:
    (repository / "README.md").write_text("other\n")
    main([], root=repository, places=[of("gone", why_missing="x")])
    assert "not committed" in (repository / "build/places/table.txt").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("code", "others", "wrong"),
    [
        ("print('step 20')", {"says": "step 20"}, None),
        ("print('step 2')", {"says": "step 20"}, "did not print 'step 20'"),
        ("open('made', 'w')", {"makes": ("made",)}, None),
        ("", {"makes": ("made", "other")}, "did not write made, other"),
        ("exit(3)", {}, "exit code 3: nothing was printed"),
        ("import sys; print('why', file=sys.stderr); exit(2)", {}, "exit code 2: why"),
    ],
)
def test_a_step_must_end_well_and_leave_what_it_promises(
    tmp_path: Path, code, others, wrong
) -> None:
    (tmp_path / "moesaic").mkdir()
    step = python_step("one", code, **others)
    assert run(step, plain(tmp_path), tmp_path / "log.txt") == wrong
    assert step.command[2] in (tmp_path / "log.txt").read_text()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "moesaic").mkdir()
    wrong = run(
        Step(name="one", command=("moesaic-of-nobody",)), plain(tmp_path), tmp_path / "log.txt"
    )
    assert wrong is not None
    assert wrong.startswith("exit code 127: ")
    assert "moesaic-of-nobody" in wrong


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "moesaic").mkdir()
    child = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)']); "
    )
    step = python_step("one", child + "print(p.pid, flush=True); p.wait()", minutes=2 / 60)
    assert (
        run(step, plain(tmp_path), tmp_path / "log.txt") == "still running after 0.0333333 minutes"
    )
    said = re.search(r"^(\d+)$", (tmp_path / "log.txt").read_text(), re.MULTILINE)
    assert said is not None
    while is_alive(int(said[1])):
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has asked for does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_no_setting_of_this_machine_reaches_a_place(tmp_path: Path, monkeypatch) -> None:
    for name, value in (SETTINGS | {"SSL_CERT_FILE": "cert.pem", "HOME": "mine"}).items():
        monkeypatch.setenv(name, value)
    variables = plain(tmp_path).whole_environment()
    assert not SETTINGS.keys() & variables.keys()
    assert (variables["SSL_CERT_FILE"], variables["HOME"]) == ("cert.pem", str(tmp_path / "home"))
    assert variables["PIP_CONFIG_FILE"] == os.devnull
    kept = {"PATH", "HOME", "PIP_CONFIG_FILE", *ground.REACH}
    assert set(variables) <= kept
    assert set(without_rights(tmp_path / "other").whole_environment()) <= kept - {"HOME"} | {"LANG"}


def test_a_stranger_is_not_root_and_has_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    odd = place.odd_folder(tmp_path / "work")
    try:
        (odd.here() / "moesaic").mkdir()
        odd.give()
        code = (
            "import os, locale; print(os.getuid(), os.getcwd(), 'HOME' in os.environ, "
            "os.environ['LANG'])"
        )
        step = Step(name="who", command=(place.DISTRIBUTIONS_PYTHON, "-c", code))
        assert run(step, odd, tmp_path / "log.txt") is None
        said = (tmp_path / "log.txt").read_text("utf-8")
        assert re.search(
            r"^[1-9]\d* /.* .*é.*/moesaic False C$|^[1-9]\d* /.*é.* .*/moesaic False C$",
            said,
            re.MULTILINE,
        )
    finally:
        visit.clear_work(tmp_path)
    assert not odd.here().exists()


def test_a_folder_with_something_mounted_below_is_not_deleted(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "work" / "root" / "dev").mkdir(parents=True)
    monkeypatch.setattr(visit, "mounts", lambda: [tmp_path / "work" / "root" / "dev"])
    with pytest.raises(OSError, match="is mounted: unmount it"):
        visit.clear(tmp_path)
    assert (tmp_path / "work" / "root" / "dev").exists()


def cloned(folder: Path) -> Ground:
    """Return a place with this repository's README in its clone."""
    (folder / "moesaic").mkdir()
    (folder / "moesaic" / "README.md").write_text(
        (ROOT / "README.md").read_text("utf-8"), encoding="utf-8"
    )
    return plain(folder)


def commands_of(steps: list[Step]) -> dict[str, str]:
    return {step.name: " ".join(step.command) for step in steps}


def test_the_smoke_test_runs_what_the_pages_print(tmp_path: Path) -> None:
    here = cloned(tmp_path)
    set_up = smoke.set_up_from_readme(here, "python3", without_transformers=False, torch=None)
    steps = smoke.whole(here, set_up, without_transformers=False, has_finetune=False)
    found = commands_of(steps)
    assert list(found) == [
        "environment",
        "install",
        "train",
        "resume on 2 ranks",
        "sample",
        "report",
        "README block 1",
        "README block 2",
        "README block 3",
        "README plan",
        "install finetune",
        "tiny model",
        "finetune",
        "check",
    ]
    assert found["install"] == "pip install .[transformers]"
    assert found["train"].startswith("moesaic train --preset demo --steps 20 --save.every 10 ")
    assert found["resume on 2 ranks"].startswith(
        "torchrun --nproc-per-node 2 -m moesaic train --config "
    )
    assert found["README block 3"] == f"torchrun --nproc-per-node 4 {tmp_path / 'block3.py'}"
    assert found["README plan"] == "moesaic plan --model qwen3-30b-a3b --cluster 100gbe --gpus 64"
    written = [(tmp_path / f"block{number}.py").read_text("utf-8") for number in (1, 2, 3)]
    assert all(block in (ROOT / "README.md").read_text("utf-8") for block in written)
    assert '\npip install ".[finetune]"\n' in (ROOT / "docs/transformers.md").read_text("utf-8")
    assert "\n    make setup " in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert (ROOT / found["tiny model"].split()[1]).exists()


def test_pages_are_walked_through_in_their_order_with_their_files(tmp_path: Path) -> None:
    """Only trainings are made shorter, and measurements; what a reader completes, other machines
    and forms in capitals are left out."""
    here = cloned(tmp_path)
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in PAGES}
    found = {name: [*walk(name, text, here)] for name, text in pages.items()}
    commands = [" ".join(step.command) for step in found["planning"]]
    search = "moesaic plan --model gpt.toml --cluster 8x4090-pcie --nodes 4 --write plan.toml"
    shown = "moesaic show --plan-file plan.toml --gantt plan.html"
    assert commands.index(search) < commands.index(shown)
    assert "num_experts = 32" in (tmp_path / "walks/planning/gpt.toml").read_text("utf-8")
    assert "corpus/**/*.txt" in (tmp_path / "walks/training/my.toml").read_text("utf-8")
    assert [step.command for step in found["transformers"]][:2] == [
        ("python", "block4.py"),
        ("torchrun", "--nproc-per-node", "4", "ranks.py"),
    ]
    for step in itertools.chain(*found.values()):
        assert not {"...", "--nnodes", "RUN"} & set(step.command), step
        added = f"{SHORT} {SMALL} {QUICK}".split()
        flags = {word for word in added if word.startswith("--")}
        assert not flags & set(step.command) or {"train", "profile"} & set(step.command), step
    assert sum(map(len, found.values())) > 25


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("moesaic show --plan-file plan.toml", True),
        ("torchrun --nproc-per-node 2 train.py", True),
        ("torchrun ... -m moesaic train", False),
        ("torchrun --nnodes 4 -m moesaic train", False),
        ("moesaic convert RUN OUT --to hf", False),
        ('pip install ".[data]"', False),
    ],
)
def test_what_runs_in_a_place(command: str, runs: bool) -> None:
    assert runs_here(tuple(shlex.split(command))) is runs


def test_the_lowest_python_leaves_out_what_it_cannot_have(tmp_path: Path) -> None:
    here = cloned(tmp_path)
    set_up = smoke.set_up_from_readme(here, "python3", without_transformers=True, torch="2.10.0")
    found = commands_of(smoke.whole(here, set_up, without_transformers=True, has_finetune=False))
    assert found["install"] == "pip install .[train] torch==2.10.0"
    assert not {"README block 1", "install finetune", "tiny model", "finetune"} & found.keys()
    assert {"README block 2", "README block 3", "resume on 2 ranks", "check"} <= found.keys()


def test_other_systems_run_the_planner_before_torch_and_then_the_layer(tmp_path: Path) -> None:
    found = commands_of(smoke.planner_and_layer(cloned(tmp_path), "python3"))
    assert list(found) == [
        "environment",
        "install",
        "README plan",
        "install train",
        "README block 2",
    ]
    assert (found["install"], found["install train"]) == ("pip install .", "pip install .[train]")


@pytest.mark.parametrize("project", ["pyproject.toml", "lab/pyproject.toml"])
def test_every_extra_is_resolved(project: str) -> None:
    text = (ROOT / project).read_text("utf-8")
    extras = list(read_table(ROOT / project)["project"]["optional-dependencies"])
    assert resolution.extras(text) == extras
    name = read_table(ROOT / project)["project"]["name"]
    asked = {question.name for question in resolution.extras_of(ROOT)}
    assert {name, *(f"{name}[{extra}]" for extra in extras)} <= asked


@pytest.mark.parametrize("python", resolution.PYTHONS)
def test_the_set_ups_are_those_of_the_makefile(python: str) -> None:
    setup, demo = resolution.set_ups(ROOT, python)
    assert (setup.name, demo.name) == ("make setup", "make demo")
    assert setup.requirements[0] == "-e .[dev]"
    for question in (setup, demo):
        assert question.constraints == (
            "constraints-3.10.txt" if python == "3.10" else "constraints.txt"
        )
        assert (ROOT / question.constraints).exists()


def test_a_makefile_without_set_up_is_an_error() -> None:
    with pytest.raises(ValueError, match="prints no line"):
        resolution.set_up_line("python3 -m pip install --upgrade pip\n")


def test_what_cannot_be_resolved_is_known_and_nothing_else_is_excused() -> None:
    asked = {question.name for question in resolution.extras_of(ROOT)}
    assert {name for _, _, name, _ in resolution.REFUSED} <= asked
    transformers = Question(name="moesaic[transformers]", requirements=("-e .[transformers]",))
    blamed = "error: No solution found\n  because transformers>=5.23 needs Python>=3.11"
    verdict = resolution.verdict
    assert verdict(transformers, "3.10", "linux", 1, blamed) == ""
    assert verdict(transformers, "3.10", "linux", 1, "no such host") == "no such host"
    assert verdict(transformers, "3.10", "linux", 0, "").startswith(
        "has a solution now: take it out of REFUSED"
    )
    assert verdict(transformers, "3.11", "linux", 1, blamed) == " ".join(
        line.strip() for line in blamed.splitlines()
    )
    assert verdict(transformers, "3.11", "linux", 0, "") == ""
    assert verdict(transformers, "3.11", "linux", 9, "") == "exit code 9"


def test_a_row_of_resolution_names_what_has_no_solution() -> None:
    train, peers = (
        Question(name=name, requirements=()) for name in ("moesaic[train]", "moesaic-lab[peers]")
    )
    right = [
        Answer(question=train, python="3.12", system="linux", wrong="", torch="2.15.0"),
        Answer(question=peers, python="3.12", system="linux", wrong="", torch="-"),
    ]
    assert resolution.summary(right) == ("1 resolve, 1 refused as they must be", "linux 2.15.0")
    wrong = replace(right[0], wrong="triton", torch="-")
    assert resolution.summary([wrong, *right])[0] == "moesaic[train] on linux"
    assert "triton" in resolution.details([wrong])


def test_the_script_needs_the_standard_library_alone() -> None:
    """`tiny_model.py` runs in a place, after its set-up."""
    for path in SCRIPT.glob("*.py"):
        if path.name == "tiny_model.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"), feature_version=(3, 10))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "places"}, (
                path
            )


def test_ci_names_places_that_there_are() -> None:
    ours = re.search(
        r'^make places PLACES="(.*)"$', (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE
    )
    assert ours is not None
    assert ours[1].split() == ["resolution", "debian12", "stranger"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    matrix = {each["place"] for each in workflow["jobs"]["places"]["strategy"]["matrix"]["include"]}
    assert matrix <= NAMES
    assert {"python3.10", "python3.14", "macos", "windows"} <= matrix


def test_the_tiny_model_has_a_tokenizer_that_keeps_a_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install transformers")
    from transformers import AutoConfig, AutoTokenizer

    from places import tiny_model

    tiny_model.write(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    config = AutoConfig.from_pretrained(tmp_path / "tiny")
    ids = tokenizer("A tiny Qwen3-MoE, été.")["input_ids"]
    assert tokenizer.decode(ids) == "A tiny Qwen3-MoE, été."
    assert (config.num_experts, config.vocab_size, len(tokenizer)) == (8, 257, 257)
    assert max(ids) < config.vocab_size
