"""Every command of the command line has a smallest valid input, and each refuses a bad one in one
line."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from moesaic.cli.main import COMMANDS, main
from moesaic.errors import InputError
from moesaic_lab.fuzz import examples
from moesaic_lab.fuzz.examples import EXAMPLES, GOES_ON, named_examples, require_examples
from moesaic_lab.fuzz.places import Place
from parsing import ParsedError, parse_only

INPUTS = {
    f"{name}: {word}": (name, word)
    for name, example in named_examples().items()
    for word in dict.fromkeys(example.words[1:])
    if any(word == folder or word.startswith(f"{folder}/") for folder in example.folders)
    and not any(word == out or word.startswith(f"{out}/") for out in example.out)
}
"""Every file or folder that an example's words name for reading alone."""


def test_every_command_has_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    require_examples()
    assert EXAMPLES.keys() == COMMANDS.keys()
    assert set(GOES_ON) < EXAMPLES.keys()
    monkeypatch.setitem(COMMANDS, "sing", "a command that nobody tries")
    with pytest.raises(InputError, match=r"commands without a smallest input: \['sing'\]"):
        require_examples()


def test_an_example_of_another_command_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {name: of for name, of in EXAMPLES.items() if name != "convert"}
    monkeypatch.setattr(examples, "EXAMPLES", lost)
    with pytest.raises(InputError, match="convert"):
        require_examples()
    monkeypatch.setattr(examples, "EXAMPLES", lost | {"convert": EXAMPLES["report"]})
    with pytest.raises(InputError, match="report"):
        require_examples()


@pytest.mark.parametrize("name", named_examples())
def test_every_flag_of_an_example_is_one_of_its_command(
    name: str, made_bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = named_examples()[name]
    parse_only(import_module(f"moesaic.cli.{example.command.replace('-', '_')}"), monkeypatch)
    monkeypatch.chdir(Place(made_bases, example).made())
    with pytest.raises(ParsedError):
        main(example.words)


@pytest.mark.parametrize("kind", ["nothing", "empty", "other"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_bad_input_is_refused_in_one_line_and_nothing_is_written(
    name: str,
    kind: str,
    made_bases: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named, word = INPUTS[name]
    place = Place(made_bases, named_examples()[named])
    folder = place.made()
    spoil(folder / word, kind)
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    try:
        code = main(list(place.example.words))
        assert code == 2, capsys.readouterr()
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if line.startswith("moesaic ")]) == 1, lines
        assert not any("Traceback" in line for line in lines)
        assert sorted(folder.rglob("*")) == before
    finally:
        place.remove()


def spoil(path: Path, kind: str) -> None:
    """Put nothing, an empty file or folder, or a folder in place of a file and a file in place of
    a folder."""
    is_folder = path.is_dir()
    if is_folder:
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "nothing":
        return
    if is_folder == (kind == "empty"):
        path.mkdir()
    else:
        path.write_bytes(b"" if kind == "empty" else b"\0\xff" * 99)
