"""Commands on a run folder in which somebody has put links: no file of the reader is written,
emptied or deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moesaic.cli.main import main
from runs import tiny, write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint, TensorBoard's events and recorded routing."""
    folder = tmp_path_factory.mktemp("theirs")
    config = tiny(folder, steps=2, save={"every": 1}, tensorboard=True, record_routing="counts")
    assert main(["train", "--config", str(write_config(config, folder / "given.json"))]) == 0
    return folder / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("existing", ["resume", "replace"])
@pytest.mark.parametrize(
    "name",
    [
        "config.writing",
        ".lock",
        "metrics.jsonl",
        "checkpoints",
        "checkpoints/step-00000001",
        "tensorboard",
        "routing",
    ],
)
def test_training_in_a_folder_with_a_link_changes_nothing_outside(
    run, name, existing, tmp_path, capsys
):
    gift = tmp_path / "gift"
    mine = tmp_path / "mine"
    shutil.copytree(run, gift)
    mine.mkdir()
    place = gift / name
    if place.is_dir():
        shutil.copytree(place, mine / "it")
        shutil.rmtree(place)
    else:
        (mine / "it").write_bytes(place.read_bytes() if place.exists() else b"alias ll='ls -l'\n")
        place.unlink(missing_ok=True)
    place.symlink_to(mine / "it")
    before = contents(mine)
    words = [
        "--config",
        str(gift / "config.json"),
        "--out",
        str(gift),
        "--existing",
        existing,
        "--steps",
        "3",
    ]
    code = main(["train", *words])
    assert contents(mine) == before
    assert code in (0, 2)
    assert len(capsys.readouterr().err.splitlines()) == (1 if code else 0)


def test_a_report_is_not_written_through_a_link(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "gift")
    (tmp_path / "authorized_keys").write_text("ssh-ed25519 AAAA mine\n")
    (tmp_path / "gift" / "report.html").symlink_to(tmp_path / "authorized_keys")
    assert main(["report", str(tmp_path / "gift")]) == 2
    assert (tmp_path / "authorized_keys").read_text() == "ssh-ed25519 AAAA mine\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html" in line
    assert "is a symbolic link" in line


def test_the_name_of_a_folder_does_not_reach_the_terminal(run, tmp_path, capsys):
    gift = tmp_path / "gift\x1b]52;c;bHM=\x07"
    shutil.copytree(run, gift)
    (gift / "text.txt").write_text("one two\n" * 50)
    place = str(gift)
    for words in (
        ["report", place],
        [
            "train",
            "--config",
            f"{place}/config.json",
            "--out",
            place,
            "--existing",
            "resume",
            "--steps",
            "3",
        ],
        ["trace", "counts", f"{place}/routing", "--layer", "0", "--out", f"{place}/counts.csv"],
        ["trace", "check", f"{place}/routing"],
        ["tokenize", f"{place}/text.txt", "--out", f"{place}/packed.bin"],
    ):
        assert main(words) == 0, words
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err, words
        assert "gift\\x1b]52;c;bHM=\\x07" in said.out, words
