"""`moesaic demo --model`: both halves are trained and compared, and the sparse one is used."""

from __future__ import annotations

import pytest

from moesaic.cli.main import main
from moesaic.train import loop, machine
from moesaic.train.example_text import PACKAGE, VERSION


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loop, machine):
        monkeypatch.setattr(module, "matmul_flops_per_second", lambda *_, **__: 1e9)


def test_a_demo_compares_the_two_halves(tmp_path, capsys, quick):
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    assert f"files of {PACKAGE} {VERSION}" in said
    assert "sparse (MoE)" in said
    assert "gain of the sparse model" in said
    assert "def solve(equation, symbol):" in said
    assert (tmp_path / "demo" / "report.html").exists()


def test_a_link_for_the_report_is_refused_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "report.html").symlink_to(tmp_path / "elsewhere")
    assert main(["demo", "--steps", "2", "--out", str(tmp_path)]) == 2
    assert "report.html: is a symbolic link, and the report is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_vision_demo_is_the_laboratorys(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "moesaic.cli.main._command", lambda name: lambda words: taken.append((name, *words)) or 0
    )
    from moesaic.cli import demo

    assert demo.run(["--model", "vision", "--steps", "3", "--out", str(tmp_path)]) == 0
    assert taken == [
        ("vision", "--ffn", ffn, "--out", str(tmp_path / ffn), "--steps", "3")
        for ffn in ("moe", "dense")
    ]
