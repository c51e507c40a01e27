"""`moesaic reproduce`: tables, JSON, pictures, and one line for bad input; it needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split('.')[0] in ('torch', 'safetensors', 'tensorboard', 'plotly', 'triton'):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
from moesaic.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_netmoe_as_json_and_picture_without_torch(lab_metadata: Path, tmp_path: Path) -> None:
    data = tmp_path / "netmoe.json"
    picture = tmp_path / "netmoe.svg"
    words = ["reproduce", "netmoe", "--json", str(data), "--picture", str(picture)]
    paths = os.pathsep.join(map(str, (lab_metadata, ROOT / "src", ROOT / "lab")))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    found = json.loads(data.read_text(encoding="utf-8"))
    rows = {row["cell"]: row for row in found["rows"]}
    assert {"machine", "versions", "date", "rows", "claims", "papers"} <= set(found)
    assert rows["netmoe.before.inter.16.S"]["ours"] == pytest.approx(192.0)
    assert rows["netmoe.before.inter.16.S"]["role"] == "arithmetic"
    assert (
        rows["netmoe.before.inter.16.S"]["source"]
        == "Table 5: volume between nodes before, 2 nodes"
    )
    assert rows["netmoe.change.16.S"]["role"] == "fit"
    kept = rows["netmoe.before.inter.32.XXL"]
    assert (kept["role"], kept["published"], kept["error"]) == ("kept back", None, None)
    claims = {claim["name"]: claim for claim in found["claims"]}
    assert claims["reproduce.netmoe.error"]["holds"] is True
    assert claims["reproduce.parm.error"]["value"] is None
    assert claims["reproduce.parm.error"]["reason"]
    constants = {constant["name"]: constant for constant in found["papers"]["netmoe"]["constants"]}
    assert constants["netmoe.concentration"]["cells"] == ["netmoe.change.16.S"]
    assert "netmoe.concentration" in shown
    assert "kept back" in shown
    assert picture.read_text(encoding="utf-8").count("<svg") == 1
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "moesaic reproduce: say what to reproduce: moesaic reproduce PAPER, one of parm, "),
        (["--json", "x"], "moesaic reproduce: say what to reproduce"),
        (["pram"], "moesaic reproduce: paper 'pram' is unknown: did you mean parm?"),
        (
            ["netmoe", "--picture", "x.gif"],
            "moesaic reproduce: --picture x.gif: unknown kind of picture",
        ),
        (
            ["netmoe", "--jsno", "x"],
            "moesaic reproduce: unknown argument --jsno, did you mean --json?",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(line)
    assert errors.count("\n") == 1


def test_help_names_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--help"]) == 0
    assert "parm, schemoe, tutel, netmoe, fastermoe, all" in " ".join(
        capsys.readouterr().out.split()
    )
