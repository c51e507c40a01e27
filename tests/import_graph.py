"""The import graph of a package, and the groups of its modules and folders that import each other in a cycle."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(parsed(path)))


def imports(package: Path) -> dict[str, set[str]]:
    """Return the import graph of a package: for each module, the package's modules that it imports.

    Imports inside functions and those for type checking count too.
    """
    root = package.parent
    modules = {_module(path, root): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        targets: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = inside[: len(inside) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                targets |= {
                    f"{source}.{a.name}" if f"{source}.{a.name}" in modules else source
                    for a in node.names
                }
        graph[name] = (targets & set(modules)) - {name}
    return graph


def cycles(package: Path) -> list[list[str]]:
    """Return the groups of modules, and of folders below the package, that import each other in a cycle."""
    of_files = imports(package)
    face = package.name
    of_files = {name: targets - {face} for name, targets in of_files.items() if name != face}
    folders = {name: _folder(name, package) for name in of_files}
    of_folders: dict[str, set[str]] = defaultdict(set)
    for name, targets in of_files.items():
        of_folders[folders[name]] |= {folders[target] for target in targets} - {folders[name]}
    return [
        *_circles(of_files),
        *(each for each in _circles(of_folders) if not set(each) <= set(of_files)),
    ]


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, package: Path) -> str:
    """Return the folder below the package that holds a module, with its subfolders, as a path with a trailing slash.

    A file at the top of the package counts as its own folder.
    """
    parts = module.split(".")
    room = package.parent.joinpath(*parts[:2])
    return "/".join(parts[:2]) + "/" if len(parts) > 1 and room.is_dir() else module


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have at least two nodes."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), set()) - seen:
                seen.add(target)
                waiting.append(target)
        reached[start] = seen
    groups = {
        frozenset(b for b in graph if b in reached[a] and a in reached[b])
        for a in graph
        if a in reached[a]
    }
    return sorted(sorted(group) for group in groups)


def package(folder: Path, **files: str) -> Path:
    """Write a package named `rooms`; `a__b` stands for a/b.py."""
    made = folder / "rooms"
    for name, text in files.items():
        path = made / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            path.joinpath("__init__.py").touch()
    return made
