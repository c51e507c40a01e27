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
TORCH_FREE = (
    "errors",
    "files",
    "resuming",
    "configfile",
    "codecs",
    "shapes",
    "program",
    "traces",
    "planner",
    "report",
)
"""Parts that neither import torch nor a part that does: planning and reporting work without it."""

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
    """Return the name of the function or method that a call names; "" for another expression."""
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
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute("." * node.level + (node.module or ""), package)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module" and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.add(_absolute(argument.value, package))
    return frozenset(found)


def _absolute(name: str, package: tuple[str, ...]) -> str:
    """Return the absolute name of a module whose name may begin with dots, in a file of
    `package`."""
    bare = name.lstrip(".")
    num_dots = len(name) - len(bare)
    if not num_dots:
        return bare
    above = package[: len(package) - num_dots + 1]  # one dot is the package itself
    return ".".join([*above, bare] if bare else above)


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """Return the import graph of a package: for each module, the package's modules that it
    imports."""
    root = package.parent
    modules = {_module(path, root): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = imported_names(path, root)
        # `from a import b` imports the module a.b if there is one, and otherwise a.
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (targets & set(modules)) - {module}
    return graph


def parts_imported(path: Path, root: Path, parts: Sequence[str]) -> set[str]:
    """Return the parts of the package below `root` that a file imports."""
    package = path.relative_to(root).parts[0]
    found = set()
    for name in imported_names(path, root):
        words = name.split(".")
        if len(words) > 1 and words[0] == package and words[1] in parts:
            found.add(words[1])
    return found


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
    # The package's own __init__ imports everything, and everything may import it.
    face = package.name
    graph = imports(package)
    of_files = {name: targets - {face} for name, targets in graph.items() if name != face}

    folder_of = {name: _folder(name, package) for name in of_files}
    of_folders: dict[str, set[str]] = defaultdict(set)
    for name, targets in of_files.items():
        folder = folder_of[name]
        of_folders[folder] |= {folder_of[target] for target in targets} - {folder}

    # A file at the top is its own folder: a cycle of such files alone is listed already.
    circles_of_folders = [
        circle for circle in _circles(of_folders) if not set(circle) <= set(of_files)
    ]
    return _circles(of_files) + circles_of_folders


def _module(path: Path, root: Path) -> str:
    """Return the module that a file defines."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _folder(module: str, package: Path) -> str:
    """Return the folder below the package that holds a module, with its subfolders, as a path with
    a trailing slash.

    A file at the top of the package counts as its own folder.
    """
    top = module.split(".")[:2]
    is_folder = len(top) == 2 and package.parent.joinpath(*top).is_dir()
    return "/".join(top) + "/" if is_folder else module


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have at least two nodes."""
    # The nodes that a path leads to from each node; from a node on a cycle, also the node itself.
    reached_from: dict[str, set[str]] = {}
    for start in graph:
        reached: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), set()) - reached:
                reached.add(target)
                waiting.append(target)
        reached_from[start] = reached

    components = set()
    for node, reached in reached_from.items():
        if node in reached:
            both_ways = (other for other in reached & set(graph) if node in reached_from[other])
            components.add(frozenset(both_ways))
    return sorted(sorted(component) for component in components)
