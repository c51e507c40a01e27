"""A smallest valid input for every command of `moesaic`: the one list that fuzzing, the promises of
docs/security.md and the tests of bad input take commands from.

The names of commands are the command line's own (`moesaic.cli.main.COMMANDS`): one that has no
example here fails a test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from moesaic.cli.main import COMMANDS
from moesaic.errors import InputError
from moesaic.finetune.folder import CHECKPOINTS as OF_FINETUNE
from moesaic.finetune.options import MERGED, RUN
from moesaic.resuming import COMPLETE, Checkpoints, DamagedError, sealed_sums
from moesaic.train.checkpoint import CHECKPOINTS as OF_TRAIN
from moesaic.train.checkpoint import SUMS
from moesaic.train.metrics import METRICS, read_metrics

GOES_ON = ("train", "finetune", "convert", "tokenize")
"""Commands that write a folder or a file to go on from: each of their writes fails once."""


def hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of every file at or below some names of a folder."""
    hash_of = {}
    for name in names:
        place = folder / name
        paths = sorted(place.rglob("*")) if place.is_dir() else [place]
        for path in paths:
            if path.is_file():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                hash_of[path.relative_to(folder).as_posix()] = digest
    return hash_of


@dataclass(frozen=True, kw_only=True)
class Example:
    """A command line that succeeds on a smallest input."""

    folders: tuple[str, ...] = ()
    """The folders of `readers.make_bases` that it gets."""
    words: tuple[str, ...]
    """The command and its arguments, which name files below these folders."""
    out: tuple[str, ...] = ()
    """The files and folders that it may write. It may write nothing else."""
    differs: tuple[str, ...] = ()
    """Patterns of files, below `out`, whose bytes are others in each run: they hold times."""
    result: Callable[[Path], object] | None = None
    """Returns what it wrote, the same in each run; None for the bytes of `out`."""
    faults: Callable[[Path], Iterator[str]] = lambda folder: iter(())
    """Yields what is half-written or lost in the folder, whenever the command has ended."""
    again: Callable[[Path], tuple[str, ...]] | None = None
    """Returns the words that go on after a failure; None for the same words."""
    is_slow: bool = False
    """Whether it takes so long that `make test` leaves it out."""

    @property
    def command(self) -> str:
        """The command."""
        return self.words[0]

    def wrote(self, folder: Path) -> object:
        """Return what it wrote, the same in each run."""
        if self.result is not None:
            return self.result(folder)
        found = hashes(folder, self.out)
        return {name: value for name, value in found.items() if not self.may_differ(name)}

    def may_differ(self, name: str) -> bool:
        """Return whether a file's bytes are others in each run."""
        return any(Path(name).match(pattern) for pattern in self.differs)

    def words_again(self, folder: Path) -> tuple[str, ...]:
        """Return the words that go on after a failure."""
        return self.words if self.again is None else self.again(folder)


def _damaged(
    checkpoints: Checkpoints,
    folder: Path,
    sums_of: Callable[[Path], Mapping[str, str]],
    but: str,
    least: int,
) -> Iterator[str]:
    """Yield what is wrong with the checkpoints of a run, of which one has at least `least` steps.

    Args:
        sums_of: returns the checksums that a checkpoint lists.
        but: the file that lists them.
    """
    paths = checkpoints.listed(folder, typed=True)
    if least and not any(checkpoints.step_of(path) >= least for path in paths):
        yield f"the checkpoint of step {least} is lost"
    for path in paths:
        try:
            checkpoints.require_sums(path, sums_of(path), but)
        except (OSError, DamagedError) as error:
            yield f"{path.name} is damaged: {error}"


def _sums_of_train(path: Path) -> dict[str, str]:
    """Return the checksums that a checkpoint of `train` lists, by the name of the file."""
    sums = {}
    for line in (path / SUMS).read_text(encoding="utf-8").splitlines():
        value, name = line.split(maxsplit=1)
        sums[name] = value
    return sums


def _of_train(least: int) -> Callable[[Path], Iterator[str]]:
    """Return a function that yields the faults of the run of `train` in `run`."""

    def faults(folder: Path) -> Iterator[str]:
        """Yield what is damaged or lost in the run's checkpoints and metrics."""
        run = folder / "run"
        yield from _damaged(OF_TRAIN, run / "checkpoints", _sums_of_train, SUMS, least)
        if (run / METRICS).exists():
            try:
                read_metrics(run)
            except InputError as error:
                yield str(error)

    return faults


def _trained(folder: Path) -> object:
    """Return the last checkpoint's tensors and the loss of each step."""
    run = folder / "run"
    newest = OF_TRAIN.listed(run / "checkpoints")[-1]
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    tensors: dict[str, Tensor] = {}
    for path in (newest / "shards").glob("*.safetensors"):
        tensors |= load_file(path)
    sums = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tensors.items())
    }
    return newest.name, sums, [(line["step"], line["loss"]) for line in lines]


def _of_finetune(least: int) -> Callable[[Path], Iterator[str]]:
    """Return a function that yields the faults of the run of `finetune` in `tuned`."""
    return lambda folder: _damaged(OF_FINETUNE, folder / "tuned", sealed_sums, COMPLETE, least)


def _tuned(folder: Path) -> object:
    """Return the adapters, the newest checkpoint's states and the merged model."""
    tuned = folder / "tuned"
    newest = OF_FINETUNE.listed(tuned)[-1]
    names = ["adapter_model.safetensors", "adapter_config.json", newest.name, MERGED]
    return hashes(tuned, names)


def _tune_again(folder: Path) -> tuple[str, ...]:
    """Return the words of a fine-tune that has begun, or not yet."""
    has_begun = (folder / "tuned" / RUN).exists()
    return (*TUNE, "--merge", "--resume") if has_begun else (*TUNE, "--merge")


TRAIN = ("train", "--config", "run/config.json", "--out", "run")
TUNE = (
    *("finetune", "mixtral", "words.txt", "--out", "tuned", "--length", "8", "--batch", "2"),
    *("--steps", "2", "--save-every", "1", "--dtype", "float32", "--learning-rate", "0.01"),
    *("--device", "cpu", "--method", "lora", "--rank", "2", "--memory-gib", "4"),
)
PLAN = (
    *("plan", "--model", "demo", "--cluster", "bed-2x2", "--tp", "1", "--ep", "4", "--etp", "1"),
    *("--schedules", "s1", "--all-to-alls", "linear", "--chunks", "1", "--orders", "fifo"),
)
EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    "train": (
        Example(
            folders=("one",),
            words=("train", "--config", "one/config.json", "--out", "run", "--existing", "resume"),
            out=("run",),
            differs=("*",),
            result=_trained,
            faults=_of_train(0),
        ),
        Example(
            folders=("run",),
            words=(*TRAIN, "--existing", "resume", "--steps", "3"),
            out=("run",),
            differs=("*",),
            result=_trained,
            faults=_of_train(2),
        ),
        Example(
            folders=("run",),
            words=(*TRAIN, "--existing", "replace", "--steps", "1"),
            out=("run",),
            differs=("*",),
            result=_trained,
            faults=_of_train(0),
        ),
    ),
    "tokenize": (
        Example(
            folders=("text",),
            words=("tokenize", "text", "--out", "packed.bin"),
            out=("packed.bin", "packed.json"),
        ),
        Example(
            folders=("text", "one"),
            words=("tokenize", "text", "--out", "one/t.bin", "--tokenizer", "one/tokenizer.json"),
            out=("one/t.bin", "one/t.json", "one/t.tokenizer.json"),
        ),
    ),
    "sample": (
        Example(folders=("run",), words=("sample", "run", "--tokens", "2", "--prompt", "one")),
    ),
    "why-hung": (Example(folders=("run",), words=("why-hung", "run")),),
    "report": (
        Example(
            folders=("run",),
            words=("report", "run", "--perfetto", "timeline.json"),
            out=("run/report.html", "timeline.json"),
        ),
    ),
    "show": (
        Example(
            folders=("one",),
            words=(
                *("show", "--plan-file", "one/plan.json", "--write", "shown.toml"),
                *("--gantt", "gantt.html", "--perfetto", "timeline.json"),
            ),
            out=("shown.toml", "gantt.html", "timeline.json"),
        ),
    ),
    "profile": (
        Example(
            words=("profile", "--out", "machine.toml", "--repeats", "3", "--accept"),
            out=("machine.toml",),
            differs=("*",),
            is_slow=True,
        ),
    ),
    "plan": (
        Example(
            words=(*PLAN, "--write", "planned.toml", "--page", "planned.html"),
            out=("planned.toml", "planned.html"),
        ),
        Example(folders=("whole",), words=("plan", "emit", "megatron", *PLAN[1:])),
        Example(words=("plan", "explain", *PLAN[1:], "--flags", "--expert-model-parallel-size 2")),
        Example(words=("plan", "finetune", "--model", "qwen3-30b-a3b", "--cluster", "4x4090-pcie")),
    ),
    "finetune": (
        Example(
            folders=("mixtral", "words.txt"),
            words=(*TUNE, "--merge"),
            out=("tuned",),
            differs=("*",),
            result=_tuned,
            faults=_of_finetune(0),
            again=_tune_again,
        ),
        Example(
            folders=("mixtral", "words.txt", "tuned"),
            words=(*TUNE, "--merge", "--resume"),
            out=("tuned",),
            differs=("*",),
            result=_tuned,
            faults=_of_finetune(1),
        ),
    ),
    "convert": (
        Example(
            folders=("whole",),
            words=("convert", "whole", "out", "--to", "moesaic", "--logits", "no"),
            out=("out",),
        ),
        Example(
            folders=("whole",),
            words=("convert", "whole", "out", "--to", "megatron", "--logits", "no"),
            out=("out",),
        ),
        Example(
            folders=("run",),
            words=("convert", "run", "out", "--to", "hf", "--logits", "no"),
            out=("out",),
        ),
        Example(folders=("converted",), words=("convert", "verify", "converted")),
    ),
    "check": (Example(words=("check", "--only", "0")),),
    "certify": (
        Example(
            folders=("system.py",),
            words=("certify", "system.py:Experts", "--ranks", "1"),
            is_slow=True,
        ),
    ),
    "trace": (
        Example(
            folders=("one",),
            words=("trace", "show", "one/trace.npz", "--picture", "picture.html"),
            out=("picture.html",),
        ),
        Example(
            folders=("one",),
            words=("trace", "counts", "one/trace.npz", "--out", "counts.csv"),
            out=("counts.csv",),
        ),
        Example(folders=("segments",), words=("trace", "check", "segments")),
        Example(
            folders=("megatron",),
            words=("trace", "convert", "megatron/trace", "--from", "megatron", "--out", "c.npz"),
            out=("c.npz",),
        ),
        Example(
            folders=("megatron",),
            words=(
                *("trace", "convert", "megatron/trace", "--from", "megatron"),
                *("--to", "vllm", "--out", "theirs"),
            ),
            out=("theirs",),
        ),
        Example(folders=("vllm",), words=("trace", "check", "vllm/trace", "--from", "vllm")),
    ),
    "demo": (
        Example(
            words=("demo", "--steps", "1", "--out", "demo"),
            out=("demo",),
            differs=("*",),
            is_slow=True,
        ),
    ),
}
"""By command: command lines that succeed."""


def require_examples() -> None:
    """Raise InputError if a command of the command line has no example, or an example no
    command."""
    wrong = set(COMMANDS.keys() ^ EXAMPLES.keys())  # those in one of the two alone
    for name, examples in EXAMPLES.items():
        wrong |= {example.command for example in examples if example.command != name}
    if wrong or not all(EXAMPLES.values()):
        raise InputError(f"commands without a smallest input: {sorted(wrong)}")


def named_examples() -> dict[str, Example]:
    """Return all examples by name: the command and a number, as "train 2"."""
    require_examples()
    return {
        f"{name} {number}": example
        for name, examples in EXAMPLES.items()
        for number, example in enumerate(examples, 1)
    }
