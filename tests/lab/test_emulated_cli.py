"""Benchmarks on an emulated cluster: what they need is asked for in one line before anything
runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic_lab import benchmark as frame
from moesaic_lab.layer.config import read_config


@pytest.mark.parametrize("benchmark", ["comm", "layer", "train", "model"])
def test_without_torch_the_package_is_named(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no process that imports torch could be started the bed itself would only say that its
    process ended."""

    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(frame, "import_module", import_module)
    assert main(["bench", benchmark]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs the package torch: in a clone" in error


@pytest.mark.parametrize("benchmark", ["comm", "layer", "train", "balance"])
def test_bad_input_and_missing_rights_are_refused_before_anything_is_measured(
    benchmark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = "no emulated cluster on this machine: tc is missing: install iproute2"
    monkeypatch.setattr("moesaic_testbed.refusal", lambda: missing)
    bad = {
        ("--picture", str(tmp_path / "x.gif")): "end its name with .svg, .png, .pdf",
        ("--only", "9x9"): "--only 9x9: ",
        ("--repeats", "0"): "repeats=0: must be above 0",
        ("--config", str(tmp_path / "none.toml")): "none.toml",
        (): missing,
    }
    for words, message in bad.items():
        assert main(["bench", benchmark, *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error


def test_a_configuration_narrows_to_parts_and_repeats() -> None:
    config = read_config().narrowed(only=("pipelining", "ablation"), repeats=3)
    assert [cell.section for cell in config.cells] == ["pipelining", "orders", "orders", "ablation"]
    assert {cell.repeats for cell in config.cells} == {cell.pairs for cell in config.cells} == {3}
    with pytest.raises(
        InputError, match="--only codec: the configuration has no such part: did you mean codecs"
    ):
        read_config().narrowed(only=("codec",))
    with pytest.raises(InputError, match="--only codecs: the configuration has no such part"):
        config.narrowed(only=("codecs",))
