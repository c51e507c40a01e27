"""Makes the laboratory's commands known to `moesaic`, whether the package is installed or not, from
its own pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moesaic.configfile import read_table

if TYPE_CHECKING:
    from moesaic_lab.ledger.records import Entry

LAB = Path(__file__).resolve().parents[2] / "lab"


@pytest.fixture(scope="session")
def lab_metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the metadata that installing the laboratory leaves: its name and its entry
    points."""
    project = read_table(LAB / "pyproject.toml")["project"]
    folder = tmp_path_factory.mktemp("metadata")
    about = folder / f"moesaic_lab-{project['version']}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: moesaic-lab\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items())
        for group, of in project["entry-points"].items()
    ]
    about.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def ledger_entries() -> list[Entry]:
    """Every entry of the ledger."""
    from moesaic_lab.ledger.page import entries

    return list(entries())


@pytest.fixture(scope="session")
def made_bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of valid files of every kind that Moesaic reads."""
    from moesaic_lab.fuzz.readers import make_bases

    folder = tmp_path_factory.mktemp("bases")
    make_bases(folder)
    return folder


@pytest.fixture
def fuzz_bases(made_bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of these folders: some readers change what they read, such as the run that they
    resume."""
    return shutil.copytree(made_bases, tmp_path_factory.mktemp("bases") / "copied")


@pytest.fixture(autouse=True)
def installed(lab_metadata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the metadata where `importlib.metadata` looks."""
    monkeypatch.setattr(sys, "path", [str(lab_metadata), *sys.path])
