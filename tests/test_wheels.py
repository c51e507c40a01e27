"""The installed files: the wheel has the library and nothing of the laboratory, which has a wheel of its own."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent


def names_in_wheel(project: Path, folder: Path) -> set[str]:
    """Build a project's wheel and return the names of its files, without its metadata."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


def tracked(folder: str) -> set[str]:
    """Return the files below a folder, relative to the folder from which its package is imported."""
    base = (ROOT / folder).parent
    return {
        Path(place, name).relative_to(base).as_posix()
        for place, _, names in os.walk(ROOT / folder)
        for name in names
        if "__pycache__" not in place
    }


def test_the_wheel_is_the_library_and_nothing_else(tmp_path: Path) -> None:
    names = names_in_wheel(ROOT, tmp_path)
    assert names == tracked("src/moesaic")
    assert not [name for name in names if "lab" in Path(name).parts[0] or name.startswith(("benchmarks", "tests"))]


def test_the_laboratory_has_a_wheel_of_its_own(tmp_path: Path) -> None:
    names = names_in_wheel(ROOT / "lab", tmp_path)
    assert names == tracked("lab/moesaic_lab") | tracked("lab/moesaic_testbed")
    assert {"moesaic_lab/configs/comm.toml", "moesaic_lab/reproduce/data/constants.toml"} <= names
