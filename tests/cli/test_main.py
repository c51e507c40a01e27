"""The command: help, versions, exit codes, and that planning needs no torch."""

from __future__ import annotations

import errno
import subprocess
import sys
from importlib import import_module

import pytest

from moesaic import __version__
from moesaic.cli import sample
from moesaic.cli.main import COMMANDS, LABORATORY, main
from moesaic.errors import InputError, TrainingError


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_usage_lists_every_command(capsys, words):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: moesaic COMMAND")
    for command, summary in {**COMMANDS, **LABORATORY}.items():
        assert f"{command} " in out
        assert summary in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moesaic {__version__}\n"


def test_the_words_come_from_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moesaic", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"moesaic {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert f"moesaic {command}" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("command", LABORATORY)
def test_a_command_of_the_laboratory_says_how_to_get_it(capsys, monkeypatch, command):
    monkeypatch.setattr("moesaic.cli.main.entry_points", lambda **_: ())
    assert main([command]) == 2
    line = (
        f"moesaic {command}: needs the package moesaic-lab: in a clone of the repository, pip "
        'install "./lab"\n'
    )
    assert capsys.readouterr().err == line


def test_a_command_of_another_package_is_found(capsys, monkeypatch, tmp_path):
    about = tmp_path / "others-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[moesaic.commands]\nsing = others_song:run\n")
    (tmp_path / "others_song.py").write_text("def run(words):\n    print(*words)\n    return 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["sing", "la", "la"]) == 7
    assert capsys.readouterr().out == "la la\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("no: do this"), 2, "moesaic sample: no: do this"),
        (TrainingError("went wrong"), 1, "moesaic sample: went wrong"),
        (KeyboardInterrupt(), 130, "moesaic sample: interrupted"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300),
            2,
            (
                f"moesaic sample: {'x' * 200}: cannot be reached (File name too long): name "
                "another path"
            ),
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a\nb"),
            2,
            "moesaic sample: a\\nb: cannot be reached (Permission denied): name another path",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "plan.toml"),
            2,
            "moesaic sample: plan.toml: cannot be written (No space left on device): free space, "
            "or name another path",
        ),
        (
            RuntimeError("Error while serializing: I/O error: Input/output error (os error 5)"),
            2,
            "moesaic sample: a file: cannot be read or written (Input/output error): look at its "
            "disk, or name another path",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            (
                "moesaic sample: needs the package torch: in a clone of the repository, pip "
                'install ".[train]"'
            ),
        ),
        (
            ModuleNotFoundError(
                "No module named 'plotly.graph_objects'", name="plotly.graph_objects"
            ),
            2,
            "moesaic sample: needs the package plotly.graph_objects: in a clone of the repository, "
            'pip install ".[report]"',
        ),
    ],
)
def test_errors_become_one_line_and_an_exit_code(capsys, monkeypatch, error, code, line):
    def fail(words):
        raise error

    monkeypatch.setattr(sample, "run", fail)
    assert main(["sample", "x"]) == code
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_installed_package_that_cannot_be_imported_is_named(
    capsys, monkeypatch, tmp_path, is_wrapped
):
    (tmp_path / "broken_pkg").mkdir()
    (tmp_path / "broken_pkg" / "__init__.py").write_text("from broken_pkg import inner")
    (tmp_path / "broken_pkg" / "inner.py").write_text('raise RuntimeError("no such symbol")')
    monkeypatch.syspath_prepend(tmp_path)

    def fail(words):
        try:
            import_module("broken_pkg")
        except RuntimeError as error:
            if is_wrapped:
                raise ModuleNotFoundError("Could not import module 'A'") from error
            raise

    monkeypatch.setattr(sample, "run", fail)
    assert main(["sample", "x"]) == 2
    assert capsys.readouterr().err == (
        "moesaic sample: the package broken_pkg is installed and cannot be imported (no such "
        "symbol): install it anew, or take it away\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("x", name="moesaic.lost"),
        OSError(errno.ECHILD, "x"),
        ZeroDivisionError(),
        SystemExit(3),
    ],
)
def test_errors_of_our_own_are_not_hidden(monkeypatch, error):
    def fail(words):
        raise error

    monkeypatch.setattr(sample, "run", fail)
    with pytest.raises(type(error)):
        main(["sample", "x"])


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", "xyz"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"moesaic xyz: unknown command: choose one of {', '.join([*COMMANDS, *LABORATORY])} "
        "(--help lists all)\n"
    )


@pytest.mark.parametrize("words", [["train", "--preset", "demo", "--help"], ["show", "--json"]])
def test_a_reader_that_stops_reading_is_no_error(words):
    """As in `moesaic show | head -1`: the pipe breaks while the program prints, or when it flushes
    at the end."""
    script = f"import sys; from moesaic.cli.main import main; sys.exit(main({words}))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 141
    process.stderr.close()
