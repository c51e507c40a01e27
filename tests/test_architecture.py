"""The rules of the code base that a machine can hold: who imports whom, sizes, docstrings, state,
machine paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from moesaic.codecs import CODECS, NO_CODEC
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.order import ORDERS
from moesaic.program.plan import AllToAll
from moesaic_lab import house
from moesaic_lab.import_graph import (
    PARTS,
    TORCH_FREE,
    Function,
    called,
    cycles,
    imported_names,
    nodes,
    parsed,
    parts_imported,
    upward,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "moesaic"
LAB = ROOT / "lab" / "moesaic_lab"
TESTBED = ROOT / "lab" / "moesaic_testbed"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LAB_SOURCES = [*sorted(LAB.rglob("*.py")), *sorted(TESTBED.rglob("*.py"))]
FACES = ("__init__", "__main__")
"""Files of the package itself, which belong to no part."""
HOOKS = {"forward", "backward", "setup_context", "extra_repr"}
"""Methods that PyTorch documents."""
MUTABLE = {
    "list",
    "dict",
    "set",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "WeakKeyDictionary",
    "local",
    "count",
}
CHANGING = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "discard",
    "clear",
}
"""Methods that change a list, a set or a dict."""
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:root|work|home|Users|mnt|scratch)/\w")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> frozenset[str]:
    """Return everything that a file of the package or the laboratory imports, by absolute name."""
    return imported_names(path, LAB.parent if LAB.parent in path.parents else PACKAGE.parent)


def test_every_file_belongs_to_a_part():
    assert {part_of(path) for path in SOURCES} - set(PARTS) - set(FACES) == set()
    assert len(SOURCES) > 40


def test_parts_import_only_parts_before_them():
    assert upward(PACKAGE) == []


@pytest.mark.parametrize("package", [PACKAGE, LAB, TESTBED], ids=lambda package: package.name)
def test_no_files_and_no_folders_import_each_other_in_a_circle(package):
    assert cycles(package) == []


def test_the_library_does_not_know_the_laboratory():
    outside = ("moesaic_lab", "moesaic_testbed")
    found = [
        name_of(p) for p in SOURCES if any(name.split(".")[0] in outside for name in imports_of(p))
    ]
    assert found == []


def test_the_test_bed_stands_alone():
    used = {name for path in sorted(TESTBED.rglob("*.py")) for name in imports_of(path)}
    ours = {
        name.rpartition(".")[0] for name in used if name.startswith(("moesaic.", "moesaic_lab"))
    }
    assert ours == {"moesaic.errors", "moesaic.cli.arguments", "moesaic.measure.together"}


def test_reports_read_nothing_of_training_but_its_metrics():
    allowed = "moesaic.train.metrics"
    used = {
        name
        for path in SOURCES
        if part_of(path) == "report"
        for name in imports_of(path)
        if re.match(
            (
                r"moesaic\.(?!__version__|errors\b|files\b|configfile\b|report\b|program\b|"
                r"traces\b|balance\b|planner\b)"
            ),
            name,
        )
    }
    assert {name for name in used if not name.startswith(allowed)} == set()


def test_parts_that_plan_and_report_do_not_import_torch():
    free = [path for path in SOURCES if part_of(path) in TORCH_FREE]
    assert [
        name_of(p) for p in free if any(name.split(".")[0] == "torch" for name in imports_of(p))
    ] == []


def test_importing_the_package_does_not_import_torch():
    """Nor do beds for commands need it, nor does the summary of a run need what draws pages."""
    modules = ["moesaic", "moesaic.__main__", "moesaic.train.metrics", "moesaic_testbed.launcher"]
    for path in SOURCES:
        if part_of(path) in (*TORCH_FREE, "cli"):
            modules.append(
                ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
                    ".__init__"
                )
            )
    code = "import sys, moesaic.report.summary; assert 'plotly' not in sys.modules; "
    code += f"import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_figures_of_the_house_do_not_rise():
    """`benchmarks/house.toml` holds what each figure may be at most, with the reason of every
    raise."""
    figures = house.measure(ROOT)
    most = house.maxima(ROOT)
    assert figures.keys() == most.keys()
    risen = {name: (figures[name], most[name]) for name in most if figures[name] > most[name]}
    assert risen == {}, (
        "lower the figure; for tokens, or say in benchmarks/house.toml what they are for"
    )


def documented_in_interfaces() -> set[str]:
    """Return the names of methods that an abstract class of the package documents."""
    return {
        method.name
        for path in [*SOURCES, *LAB_SOURCES]
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Abstract")
        for method in node.body
        if isinstance(method, Function) and ast.get_docstring(method)
    }


def undocumented(path: Path, inherited: set[str]) -> list[str]:
    """Return the places in a file that miss a docstring."""
    module = parsed(path)
    missing = [] if ast.get_docstring(module) else [f"{name_of(path)}: module"]

    def node_token(body: list[ast.stmt], bases: list[str]) -> None:
        for node in body:
            if not isinstance(node, (*Function.__args__, ast.ClassDef)) or node.name.startswith(
                "_"
            ):
                continue
            overrides = bool(bases) and (node.name in HOOKS or node.name in inherited)
            overloaded = any("overload" in ast.unparse(d) for d in node.decorator_list)
            if not ast.get_docstring(node) and not overrides and not overloaded:
                missing.append(f"{name_of(path)}:{node.lineno} {node.name}")
            if isinstance(node, ast.ClassDef):
                node_token(node.body, [ast.unparse(base) for base in node.bases])

    node_token(module.body, [])
    return missing


def test_everything_public_has_a_docstring():
    inherited = documented_in_interfaces()
    assert {"encode", "scores", "choose"} <= inherited
    assert [
        place for path in [*SOURCES, *LAB_SOURCES] for place in undocumented(path, inherited)
    ] == []


def module_state(path: Path) -> list[str]:
    """Return the places where a file makes or changes state of its module."""
    module = parsed(path)
    wrong = []
    constants = set()
    for node in module.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            name = ast.unparse(target)
            value = node.value
            constants.add(name)
            made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE
            literal = isinstance(
                value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            )
            if made or (literal and not name.isupper() and name != "__all__"):
                wrong.append(f"{name_of(path)}:{node.lineno} {name}")
    for node in nodes(path):
        changed = ""
        if isinstance(node, ast.Global):
            changed = f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = ast.unparse(node.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGING
        ):
            changed = ast.unparse(node.func.value)
        if changed.startswith("global ") or (changed in constants and changed.strip("_").isupper()):
            wrong.append(f"{name_of(path)}:{node.lineno} changes {changed}")
    return wrong


def test_modules_hold_no_mutable_state():
    assert [place for path in [*SOURCES, *LAB_SOURCES] for place in module_state(path)] == []


def test_nothing_reads_environment_variables_but_what_the_launcher_says():
    reads = re.compile(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import\b.*\b(environ|getenv)\b")
    found = [
        name_of(path)
        for path in [*SOURCES, *LAB_SOURCES]
        if reads.search(path.read_text(encoding="utf-8"))
    ]
    allowed = [
        "src/moesaic/cli/finetune.py",  # reads RANK, WORLD_SIZE: whether a launcher has started it
        # reads RANK: whether this process is the first, before PyTorch is loaded
        "src/moesaic/cli/train.py",
        "src/moesaic/comm/mesh.py",  # reads LOCAL_WORLD_SIZE: how many ranks share a node
        # reads RANK, WORLD_SIZE and their like: whether others were started, which attempt
        "src/moesaic/train/launch.py",
        # reads GROUP_RANK, LOCAL_RANK and their like: which machine this is, of how many
        "src/moesaic/train/machines.py",
        # reads WORLD_SIZE: how many ranks were started
        "src/moesaic/transformers/expert_parallel.py",
        "lab/moesaic_lab/chaos/planted.py",  # sets, as a launcher does, what its ranks are to read
        "lab/moesaic_lab/chaos/struck.py",  # sets, as a launcher does, what its ranks are to read
        "lab/moesaic_lab/device/ranks.py",  # sets what NCCL reads, for ranks that share a GPU
        # passes its own environment on to its steps, with what Triton reads
        "lab/moesaic_lab/device/steps.py",
        "lab/moesaic_lab/extending.py",  # passes its own environment on to a copy of the package
        # sets where a command that is tried finds its home and temporary files
        "lab/moesaic_lab/fuzz/writes.py",
        "lab/moesaic_lab/hf.py",  # sets, as a launcher does, what transformers reads
        # passes its own environment on to a process, with what Triton reads
        "lab/moesaic_lab/operators.py",
        # reads MASTER_ADDR, GLOO_SOCKET_IFNAME: which network leads to the others
        "lab/moesaic_lab/sockets.py",
        "lab/moesaic_testbed/rank.py",  # sets, as a launcher does, what its ranks are to read
    ]
    assert found == allowed


def test_no_file_names_a_path_of_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        data = path.read_bytes()
        text = "" if b"\0" in data else data.decode("utf-8", errors="replace")
        found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = []\n", 1),
        ("X = {}\ndef f():\n    X[1] = 2\n", 1),
        ("X = []\ndef f():\n    X.append(2)\n", 1),
        ("X = dict()\n", 1),
        ("def f():\n    global X\n    X = 1\n", 1),
        ("X = {1: 2}\n_Y = [1]\n__all__ = ['f']\ndef f():\n    x = []\n    x.append(X[1])\n", 0),
    ],
)
def test_the_search_for_state_finds_it(tmp_path, monkeypatch, source, count):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(module_state(path)) == count


def test_the_search_for_imports_finds_lazy_and_relative_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "moesaic")
    path = tmp_path / "moesaic" / "routing" / "gates.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moesaic.cli import "
        "main\ndef f():\n    import moesaic.train.loop\n    from ..models import gpt\n    "
        "import_module('moesaic.report.page')\nfrom moesaic import layer, __version__\n"
    )
    assert parts_imported(path, tmp_path, PARTS) == {"cli", "train", "models", "report", "layer"}


REGISTERED = {*ALL_TO_ALLS, *CODECS, *ORDERS, *SCHEDULES, *get_args(AllToAll)} - {NO_CODEC}
"""Names of schedules, all-to-alls, codecs and orders. A property says what a caller needs to know
of one."""
ASKS_FOR_NOTHING = re.compile(r"codec|replication|lending")


def test_no_registered_name_is_compared_outside_the_file_of_what_it_names():
    found = []
    for path in SOURCES:
        for node in nodes(path):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if isinstance(node, ast.MatchValue):
                sides = [node.value]
            words = {
                each.value
                for side in sides
                for each in ast.walk(side)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
            names = {word for word in words & REGISTERED if path.stem != word}
            if NO_CODEC in words and ASKS_FOR_NOTHING.search(ast.unparse(node)):
                names.add(NO_CODEC)
            found += [
                f"{name_of(path)}:{node.lineno} compares with {name!r}" for name in sorted(names)
            ]
    assert found == []


def test_nothing_but_methods_of_an_abstract_class_is_overridden_in_the_models_of_time_and_plans():
    """A class of these parts is abstract or final: whoever extends one has no method of another
    concrete one to know.

    Records that add fields, and places of ranks (`NodeMap`), whose methods all are public, may
    extend one.
    """
    trees = [parsed(path) for path in SOURCES if part_of(path) in ("planner", "program")]
    classes = {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    free = {"Exception", "Enum", "NodeMap"}
    wrong = [
        f"{each.name} extends {base}"
        for each in classes.values()
        if not any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list)
        for base in map(ast.unparse, each.bases)
        if base in classes and not base.startswith(("Abstract", "_Comparable")) and base not in free
    ]
    assert wrong == []


OPENED_ELSEWHERE = {
    "cli/output.py": "the null device, for what nobody can read",
    "finetune/folder.py": "a whole folder gets its final name",
    "testing/runner.py": "results of test processes, in a temporary folder that was just made",
    "resuming.py": "whole folders get their final names, and files that were written are flushed",
    "train/signals.py": "a stream of the process, whose terminal is gone",
    "weights/tensor_files.py": "the claim on an output, which must be new",
}
"""Files of the package that write without `moesaic.files`, and what."""
WRITERS = {
    "write_text",
    "write_bytes",
    "touch",
    "rename",
    "symlink_to",
    "hardlink_to",
    "mkstemp",
    "NamedTemporaryFile",
    "copyfile",
    "copy2",
    "copytree",
    "tofile",
}

WRITES = {"open": "os.open", "replace": "os.replace", "rename": "os.rename", "move": "shutil.move"}


def writes(node: ast.Call) -> bool:
    """Return whether a call opens a file for writing, or puts one in place."""
    name = called(node)
    if name in WRITERS or (name in WRITES and ast.unparse(node.func) in WRITES.values()):
        return True
    words = [*node.args, *(keyword.value for keyword in node.keywords)]
    modes = [
        word.value
        for word in words
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]
    return name == "open" and any(
        re.fullmatch(r"[rwaxbt+]+", mode) and set(mode) & set("wax+") for mode in modes
    )


def test_files_are_opened_for_writing_in_one_place():
    """A file that a stranger made may be a link: `moesaic.files` sees to that."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Call) and writes(node)
    }
    assert found - {"files.py"} == OPENED_ELSEWHERE.keys()
