"""Benchmarks on an emulated cluster: what they need is asked for in one line before anything runs."""

from __future__ import annotations

import pytest

from moesaic.cli.main import main
from moesaic_lab import benchmark as frame


@pytest.mark.parametrize("benchmark", ["comm", "layer", "train", "model"])
def test_without_torch_the_package_is_named(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no process that imports torch could be started the bed itself would only say that its process ended."""

    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(frame, "import_module", import_module)
    assert main(["bench", benchmark]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs the package torch: in a clone" in error
