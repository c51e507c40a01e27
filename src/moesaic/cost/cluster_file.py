"""Clusters as TOML: presets by name, or a file. Every refusal names the field and what would be right."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from moesaic.configfile import build, read_table, suggestion
from moesaic.cost.cluster import ClusterSpec
from moesaic.errors import InputError


def presets() -> list[str]:
    """Return the names of the clusters that come with the package."""
    folder = resources.files("moesaic.cost").joinpath("presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_cluster(name: str, *, nodes: int | None = None) -> ClusterSpec:
    """Return a cluster.

    Args:
        name: a preset, or the path of a TOML or JSON file.
        nodes: use so many of its nodes, or more of the same; None for the file's number.

    Raises:
        InputError: for an unknown preset, a file that does not parse, an unknown field, or a value that cannot be.
    """
    if name.endswith((".toml", ".json")):
        table = read_table(Path(name))
    elif name in presets():
        with resources.as_file(resources.files("moesaic.cost").joinpath("presets", f"{name}.toml")) as path:
            table = {"name": name, **read_table(path)}
    else:
        raise InputError(f"cluster {name!r} is unknown{suggestion(name, presets())}; or give a path that ends in .toml")
    return build(ClusterSpec, table if nodes is None else table | {"nodes": nodes}, source=f"cluster {name}")
