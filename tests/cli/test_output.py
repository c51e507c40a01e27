"""Commands that write a folder go on when nobody reads what they print any more."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli import main as cli
from moesaic.cli.main import main
from moesaic.cli.output import LASTING, WIDEST, LastingStream, folded
from moesaic.train.checkpoint import list_checkpoints
from runs import losses, tiny, write_config


class Failing(io.StringIO):
    """A text stream that fails from a write or a flush on.

    Args:
        at: the number of writes and flushes that succeed.
        number: of the error.
    """

    def __init__(self, at: int, number: int = errno.EPIPE) -> None:
        super().__init__()
        self.left = at
        self.number = number

    def write(self, text: str) -> int:
        self.count()
        return super().write(text)

    def flush(self) -> None:
        self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, "No space left on device")


@pytest.mark.parametrize("at", range(4))
def test_what_follows_a_failed_write_goes_nowhere(at: int) -> None:
    stream = Failing(at)
    other = io.StringIO()
    lasting = LastingStream(stream, other, "output is lost ({})")
    for line in ("a\n", "b\n", "c\n"):
        lasting.write(line)
    lasting.writelines(["d", "e"])
    lasting.flush()
    assert stream.getvalue() == "a\nb\nc\n"[: 2 * ((at + 1) // 2)]
    assert other.getvalue() == "output is lost (No space left on device)\n"
    assert lasting.encoding == stream.encoding


@pytest.mark.parametrize("command", sorted(LASTING))
@pytest.mark.parametrize("lost", ["stdout", "stderr", "both"])
def test_a_command_that_writes_a_folder_ends_as_without(monkeypatch, command, lost):
    def run(arguments):
        print("out")
        print("err", file=sys.stderr)
        return 0

    monkeypatch.setattr(cli, "_command", lambda name: run)
    streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for name in streams if lost == "both" else [lost]:
        streams[name] = Failing(0, errno.ENOSPC)
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert main([command]) == 0
    assert (sys.stdout, sys.stderr) == (streams["stdout"], streams["stderr"])
    if lost != "both":
        (other,) = set(streams) - {lost}
        assert (
            "cannot be written (No space left on device): it goes on without"
            in streams[other].getvalue()
        )


@pytest.mark.parametrize("words", [["plan"], ["train", "--help"], ["--version"]])
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (errno.EPIPE, 141, ""),
        (
            errno.ENOSPC,
            2,
            "standard output cannot be written (No space left on device): free space, or send it "
            "elsewhere\n",
        ),
    ],
)
def test_other_commands_end_with_their_output(monkeypatch, words, number, code, line):
    monkeypatch.setattr(cli, "_command", lambda name: lambda arguments: print("out") or 0)
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Failing(0, number))
    monkeypatch.setattr(sys, "stderr", err)
    assert main(words) == code
    assert err.getvalue() == (line and f"moesaic {words[0]}: {line}")


def test_a_command_whose_output_is_lost_keeps_its_exit_code(monkeypatch):
    def run(arguments):
        print("out")
        sys.exit(3)

    monkeypatch.setattr(cli, "_command", lambda name: run)
    monkeypatch.setattr(sys, "stdout", Failing(0))
    with pytest.raises(SystemExit) as stop:
        main(["train"])
    assert stop.value.code == 3


def test_other_commands_go_on_without_their_errors(monkeypatch, capsys):
    def run(arguments):
        print("err", file=sys.stderr)
        print("out")
        return 0

    monkeypatch.setattr(cli, "_command", lambda name: run)
    monkeypatch.setattr(sys, "stderr", Failing(0, errno.ENOSPC))
    assert main(["plan"]) == 0
    assert capsys.readouterr().out == "out\n"  # a machine may read it


def test_without_output_a_command_answers_nothing(monkeypatch, capsys):
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(["plan", "--help"]) == 0
        assert main(["plan", "--no-such-flag"]) == 2
    assert "unknown argument --no-such-flag" in capsys.readouterr().err
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        assert main(["plan", "--no-such-flag"]) == 2
    assert capsys.readouterr().out == ""  # a machine may read it


@pytest.mark.random
@pytest.mark.parametrize("where", ["pipe", "full"])
def test_a_training_outlives_the_reader_and_the_disk_of_its_log(tmp_path: Path, where: str) -> None:
    config = write_config(tiny(tmp_path, steps=6), tmp_path / "config.json")
    words = [sys.executable, "-m", "moesaic", "train", "--config", str(config)]
    if where == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
            )
        code = done.returncode
        errors = done.stderr
    else:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait(timeout=300)
    reason = "Broken pipe" if where == "pipe" else "No space left on device"
    assert errors == (
        f"moesaic train: standard output cannot be written ({reason}): it goes on without; "
        "metrics.jsonl in the folder of the run has the numbers\n"
    )
    assert code == 0
    run = tmp_path / "run"
    assert [step for step, _ in losses(run)] == list(range(1, 7))
    assert [path.name for path in list_checkpoints(run / "checkpoints")][-1] == "step-00000006"
    assert all(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())


def test_a_folded_command_is_the_same_words_in_a_shell():
    command = "torchrun --nnodes 2 -m moesaic finetune " + " ".join(
        f"--flag-{number} {number}" for number in range(30)
    )
    lines = folded(f"    {command}").splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= WIDEST
    shell = subprocess.run(
        ["sh", "-c", "\n".join(lines).replace("torchrun", "echo torchrun", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout.split() == command.split()
    assert not any(line.endswith("\\") for line in folded("said " * 60).splitlines())
