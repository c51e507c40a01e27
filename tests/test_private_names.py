"""Private names of other packages stand in the table of docs/versions.md, each with what happens if
it goes."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from moesaic_lab.import_graph import nodes

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
"""What Python documents about named tuples."""
OF_MODULES = {name for name in dir(nn.Module()) if name.startswith("_")}
"""Private names of torch's modules."""


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith(("__", "_moesaic"))
        and name not in ({"_"} | OF_TUPLES)
    )


def own_names(tree: list[ast.AST]) -> Iterator[str]:
    """Yield the private names that a file of ours defines, but not those by which it overrides
    torch's."""
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and dotted(node).startswith("self.")
        ):
            yield node.attr


def dotted(node: ast.AST) -> str:
    """Return a chain of attributes as written, without a call or an index at its start."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: list[ast.AST]) -> dict[str, str]:
    """Return the dotted names that imports of a file give to its names."""
    names: dict[str, str] = {}
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def foreign_names(tree: list[ast.AST], own: set[str]) -> Iterator[str]:
    """Yield the private names of other packages that a file uses, with their module where an import
    tells it."""
    names = imported(tree)
    yield from (name for name in names.values() if any(map(is_private, name.split("."))))
    for node in tree:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, _, rest = dotted(node).partition(".")
            if root in names:
                yield f"{names[root]}.{rest}"
            elif node.attr not in own:
                yield node.attr
        elif (
            isinstance(node, ast.FunctionDef) and is_private(node.name) and node.name in OF_MODULES
        ):
            yield node.name
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield name.value


def used_names() -> set[str]:
    """Return the private names of other packages that the library uses; the standard library's are
    left out."""
    own = {name for path in SOURCES for name in own_names(nodes(path))} - OF_MODULES
    names = {name for path in SOURCES for name in foreign_names(nodes(path), own)}
    names = {
        name
        for name in names
        if name.partition(".")[0] not in {"moesaic", *sys.stdlib_module_names}
    }
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_private_names_of_other_packages_stand_in_the_table() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([\w.]*\b_\w[\w.]*)`", row)]
    assert sorted(listed) == sorted(used_names())
