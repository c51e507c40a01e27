"""Fixtures of the tests of training: no measurement of the machine's matmul rate, and a finished
run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from runs import run_quietly, skip_measuring, tiny


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_measuring(monkeypatch)


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_quietly(tiny(folder, steps=2, save={"every": 1}))
    return folder


@pytest.fixture
def ran(_finished: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of a tiny run of two steps, each of which has a checkpoint."""
    shutil.copytree(_finished, tmp_path, dirs_exist_ok=True)
    return tmp_path
