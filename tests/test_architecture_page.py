"""docs/architecture.md: the files and functions that it names exist, its picture has the rooms of
the import graph, and a call, a plan and a checkpoint run as its walks say."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

import torch

from moesaic.cli.main import main
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab import rooms_picture
from moesaic_lab.import_graph import PARTS, parsed
from runs import run_quietly, tiny
from worlds import on_ranks

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "moesaic"
PAGE = ROOT / "docs" / "architecture.md"


def sections() -> dict[str, str]:
    """Return the page's sections by title."""
    parts = PAGE.read_text("utf-8").split("\n## ")[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def named(text: str) -> Iterator[tuple[str, str]]:
    """Yield each file or folder with "", and each name in backquotes with the file before it in the
    same paragraph, item or row."""
    for item in re.split(r"\n(?=\d+\. |\||\n)", text):
        file = ""
        for word in re.findall(r"`([\w./]+)`", item):
            if "/" in word or word.endswith(".py"):
                file = word
                yield file, ""
            elif file.endswith(".py"):
                yield file, word


def path_of(file: str) -> Path:
    """Return a file or folder that the page names: of the package, or else of the repository."""
    path = PACKAGE / file
    return path if path.exists() else ROOT / file


def definitions(path: Path) -> dict[str, ast.AST]:
    """Return classes, functions, methods and constants of a file, by qualified name."""
    found: dict[str, ast.AST] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                found.update({prefix + ast.unparse(target): node for target in targets})

    add(parsed(path).body, "")
    return found


def test_the_page_is_short() -> None:
    """A third of it is the table of places, which readers who were asked for ten changes missed
    rows of; the walks alone stay under 1,000 words."""
    page = PAGE.read_text("utf-8")
    assert len(page.split()) < 1_250
    assert len(page.split("\n## Where do I change")[0].split()) < 1_000


def test_the_files_and_functions_that_the_page_names_exist() -> None:
    every = list(named(PAGE.read_text("utf-8")))
    assert len(every) > 100
    missing = [
        (file, name)
        for file, name in every
        if not path_of(file).exists() or (name and name not in definitions(path_of(file)))
    ]
    assert missing == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "1. `layer.py`, `MoE.forward` and\n`MoE.gone`.\n2. `gone/` or\n\n`gone.py`, `MoE`"
    assert list(named(text)) == [
        ("layer.py", ""),
        ("layer.py", "MoE.forward"),
        ("layer.py", "MoE.gone"),
        ("gone/", ""),
        ("gone.py", ""),
        ("gone.py", "MoE"),
    ]
    assert "MoE.forward" in definitions(PACKAGE / "layer.py")
    assert "MoE.gone" not in definitions(PACKAGE / "layer.py")


def test_the_picture_has_every_room_in_the_order_of_the_imports() -> None:
    text = rooms_picture.PICTURE.read_text("utf-8")
    assert text == rooms_picture.picture(), "run make docs and commit docs/images/rooms.svg"
    rooms = [
        element.text
        for element in ElementTree.fromstring(text).iter()
        if element.get("class") == "room"
    ]
    assert rooms == list(reversed(PARTS))


Code = tuple[str, int]
"""The file of a function, with its first line."""


def may_run(file: str, name: str) -> set[Code]:
    """Return the functions that run where the page names one: those of its folder that implement
    it, if it is abstract."""
    path = path_of(file)
    node = definitions(path)[name]
    if "abstractmethod" not in map(ast.unparse, getattr(node, "decorator_list", ())):
        return {_code(path, node)}
    method = name.rpartition(".")[2]
    return {
        _code(other, found)
        for other in path.parent.glob("*.py")
        for full_name, found in definitions(other).items()
        if full_name.rpartition(".")[2] == method
    }


def _code(path: Path, node: ast.AST) -> Code:
    """Return what identifies a function while it runs."""
    decorators = getattr(node, "decorator_list", [])
    return str(path), min(each.lineno for each in (node, *decorators))


class Calls:
    """Records the calls of the package's functions in this thread, in order."""

    def __init__(self) -> None:
        self.codes: list[Code] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call; this is the signature that `sys.setprofile` requires."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.codes.append((code.co_filename, code.co_firstlineno))


def calls_of(work: Callable[[], object]) -> list[Code]:
    """Return the calls of the package's functions while `work` runs in this thread."""
    calls = Calls()
    before = sys.getprofile()
    sys.setprofile(calls)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls.codes


def not_in_turn(text: str, codes: list[Code]) -> str:
    """Return the first function of a walk that is not called after those before it; "" if all
    are."""
    rest = iter(codes)
    for file, name in named(text):
        wanted = may_run(file, name) if name else set()
        if name and not any(code in wanted for code in rest):
            return f"{file}, {name}"
    return ""


def of_steps(text: str) -> str:
    """Return the numbered steps of a text."""
    return "\n".join(re.findall(r"^\d+\. .*(?:\n   .*)*", text, re.MULTILINE))


def test_a_call_runs_as_the_walk_says() -> None:
    found: list[list[Code]] = []

    def rank(transport: AbstractTransport) -> None:
        torch.manual_seed(0)
        moe = MoE(16, 8, num_experts=4, shared_hidden=8)
        x = torch.randn(10, 16, requires_grad=True)
        moe.parallelize(Mesh(Grid(world=2, ep=2), transport), Plan())

        def call() -> None:
            moe(x).sum().backward()

        call()  # the first one also announces the length of its counts
        if transport.rank == 0:
            found.append(calls_of(call))
        else:
            call()

    run_ranks(2, rank)
    walk = sections()["One call of `MoE`"]
    assert not_in_turn(of_steps(walk), found[0]) == ""
    (issue,) = may_run("comm/loopback.py", "LoopbackTransport.issue")
    assert "second call under the default plan makes five exchanges" in walk
    assert found[0].count(issue) == 5


def test_a_plan_runs_as_the_walk_says(capsys) -> None:
    words = "plan --model demo --cluster bed-2x2 --pp 1 --ep 2 --schedules s1 --all-to-alls linear"
    codes = calls_of(lambda: main([*words.split(), "--chunks", "1", "--orders", "fifo"]))
    assert "speed:" in capsys.readouterr().out
    assert not_in_turn(of_steps(sections()["One `moesaic plan`"]), codes) == ""


def save_on_a_rank(folder: Path) -> list[Code]:
    """Train a tiny run on two ranks that share its experts, and save it; return the calls."""
    return calls_of(lambda: run_quietly(tiny(folder, steps=1, mesh={"ep": 2})))


def test_a_checkpoint_is_saved_and_resumed_as_the_walk_says(tmp_path: Path) -> None:
    tiny(tmp_path)  # writes the text
    saving, resuming = sections()["One checkpoint"].split("Resuming")
    on_first = on_ranks(2, save_on_a_rank, tmp_path)[0]
    assert not_in_turn(of_steps(saving), on_first) == ""

    words = ["--config", str(tmp_path / "run" / "config.json"), "--existing", "resume"]
    codes = calls_of(lambda: main(["train", *words, "--steps", "2", "--mesh.ep", "1"]))
    assert not_in_turn(of_steps(resuming), codes) == ""


def test_a_walk_in_another_order_is_found() -> None:
    text = "1. `errors.py`, `suggestion`\n2. `errors.py`, `in_one_line`"
    codes = [
        _code(PACKAGE / "errors.py", definitions(PACKAGE / "errors.py")[name])
        for name in ("suggestion", "in_one_line")
    ]
    assert not_in_turn(text, codes) == ""
    assert not_in_turn(text, codes[::-1]) == "errors.py, in_one_line"
