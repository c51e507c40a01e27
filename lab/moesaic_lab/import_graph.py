"""Who imports whom: the import graph of a package, its cycles, and the order in which its parts
build on each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

PARTS = (
    "errors",
    "files",
    "resuming",
    "configfile",
    "codecs",
    "shapes",
    "traces",
    "program",
    "kernels",
    "comm",
    "initial_values",
    "draw",
    "storage",
    "routing",
    "experts",
    "runtime",
    "policies",
    "given_routing",
    "chosen",
    "layer",
    "interleaved",
    "cuda_graphs",
    "compile_ahead",
    "balance",
    "planner",
    "measure",
    "auto",
    "models",
    "parallel",
    "transformers",
    "train",
    "weights",
    "finetune",
    "testing",
    "report",
    "cli",
)
"""In this order: a part imports itself and parts that stand before it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(parsed(path)))


def functions(path: Path) -> Iterator[Function]:
    """Yield every function of a file, nested ones too."""
    return (
        node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def called(node: ast.Call) -> str:
    """Return the name of the function or method that a call names."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@cache
def imported_names(path: Path, root: Path) -> frozenset[str]:
    """Return everything that a file imports, by absolute name: `from a import b` is `a.b`.

    Imports inside functions, those for type checking and strings passed to `import_module` count
    too.

    Args:
        root: the folder that holds its top-level package.
    """
    found: set[str] = set()
    package = path.relative_to(root).parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _absolute("." * node.level + (node.module or ""), package)
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node) == "import_module" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(_absolute(name.value, package))
    return frozenset(found)


def _absolute(name: str, package: tuple[str, ...]) -> str:
    """Return the absolute name of a module whose name may begin with dots, in a file of
    `package`."""
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    above = package[: len(package) - level + 1] if level else ()
    return ".".join([*above, *([bare] if bare else [])])


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """Return the import graph of a package: for each module, the package's modules that it
    imports."""
    root = package.parent
    modules = {_module(path, root): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = imported_names(path, root)
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (targets & set(modules)) - {module}
    return graph


def parts_imported(path: Path, root: Path, parts: Sequence[str]) -> set[str]:
    """Return the parts of the package below `root` that a file imports."""
    package = path.relative_to(root).parts[0]
    names = (name.split(".") for name in imported_names(path, root))
    return {words[1] for words in names if words[0] == package and len(words) > 1} & set(parts)


def upward(package: Path, parts: Sequence[str] = PARTS) -> list[str]:
    """Return the imports of a part that stands after the importing one, as "FILE imports PART"."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        if part not in parts:
            continue
        above = parts[parts.index(part) + 1 :]
        name = path.relative_to(package).as_posix()
        found = parts_imported(path, package.parent, parts)
        wrong += [f"{name} imports {other}" for other in sorted(found & set(above))]
    return wrong


def cycles(package: Path) -> list[list[str]]:
    """Return the groups of modules, and of folders below the package, that import each other in a
    cycle."""
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
    """Return the module that a file defines."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, package: Path) -> str:
    """Return the folder below the package that holds a module, with its subfolders, as a path with
    a trailing slash.

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
