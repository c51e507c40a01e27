"""A table of user errors: each exits with code 2, prints one line (what, where, what to write
instead), and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli.main import main
from runs import (
    TINY,
    lines,
    run_quietly,
    seal,
    skip_measuring,
    snapshot,
    tiny,
    write_config,
    write_text,
)


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_measuring(monkeypatch)


def base(folder: Path, *words: str) -> list[str]:
    """Return the command line of a valid tiny run, with further arguments; `run` is its folder."""
    return ["train", "--config", str(write_config(tiny(folder), folder / "good.json")), *words]


@pytest.fixture(scope="module", autouse=True)
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Train a run with two checkpoints once, for `made`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        run_quietly(tiny(folder, steps=2, save={"every": 1}))
        patch.setattr(f"{__name__}.TRAINED", folder / "run")
        yield


TRAINED = Path()


def made(folder: Path) -> Path:
    """Return the folder of a run with two checkpoints."""
    tiny(folder)  # writes its text
    shutil.copytree(TRAINED, folder / "run")
    return folder / "run"


def harmed(folder: Path, *steps: int) -> Path:
    """Train a run and truncate the parameters of some of its checkpoints; return its folder."""
    run = made(folder)
    for step in steps:
        path = (
            run
            / "checkpoints"
            / f"step-{step:08d}"
            / "shards"
            / "shard-00001-model-00001-of-00001.safetensors"
        )
        path.write_bytes(path.read_bytes()[:200])
    return run


def newer(folder: Path) -> Path:
    """Train a run and give its newest checkpoint a later format version; return its folder."""
    run = made(folder)
    path = run / "checkpoints" / "step-00000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    seal(path.parent)
    return run


def written(folder: Path, name: str, content: str) -> str:
    """Write a file; return its path."""
    (folder / name).write_text(content)
    return str(folder / name)


def tokens(folder: Path, count: int, largest: int) -> str:
    """Write a `.bin` file of 16-bit tokens; return its path."""
    path = folder / "tokens.bin"
    np.full(count, largest, dtype="<u2").tofile(path)
    return str(path)


def resumed(folder: Path, *words: str) -> list[str]:
    """Return the command line that resumes an earlier run."""
    made(folder)
    return base(folder, "--existing", "resume", "--steps", "3", *words)


Case = tuple[Callable[[Path], list[str]], list[str]]
CASES: dict[str, Case] = {
    # Commands and flags
    "unknown command": (lambda f: ["trian"], ["unknown command", "did you mean train?"]),
    "unknown preset": (
        lambda f: ["train", "--preset", "gpt-tny"],
        ["unknown preset gpt-tny", "did you mean gpt-tiny?"],
    ),
    "preset like none": (
        lambda f: ["train", "--preset", "zzz"],
        ["zzz", "choose one of demo, demo-dense, gpt-tiny"],
    ),
    "preset without a name": (lambda f: ["train", "--preset"], ["--preset needs a value"]),
    "unknown flag": (
        lambda f: base(f, "--stps", "3"),
        ["--stps", "did you mean --steps?", "--help"],
    ),
    "wrong type of a flag": (
        lambda f: base(f, "--steps", "many"),
        ["--steps", "'many'", "whole number"],
    ),
    "wrong choice of a flag": (
        lambda f: base(f, "--plan.all-to-all", "best"),
        ["--plan.all-to-all", "best: choose one of", "linear", "hier2d"],
    ),
    "wrong choice in a word": (
        lambda f: base(f, "--model.moe.router", "best"),
        ["model.moe.router=", "'best'", "softmax", "expert_choice"],
    ),
    # Configuration files
    "missing file": (
        lambda f: ["train", "--config", str(f / "no.toml")],
        ["no.toml: no such file"],
    ),
    "bad toml": (
        lambda f: ["train", "--config", written(f, "a.toml", "steps == 3")],
        ["a.toml: does not parse", "line 1"],
    ),
    "unknown field in a file": (
        lambda f: ["train", "--config", written(f, "a.toml", "[model.moe]\ntopk = 3")],
        ["a.toml: unknown field model.moe.topk", "did you mean top_k?"],
    ),
    "wrong type in a file": (
        lambda f: ["train", "--config", written(f, "a.toml", 'steps = "3"')],
        ["a.toml: steps must be a whole number, got '3'"],
    ),
    # Shapes
    "top_k too large": (
        lambda f: base(f, "--model.moe.top-k", "5"),
        ["model.moe.top_k=5", "model.moe.num_experts=4", "choose 1 <= top_k <= 4"],
    ),
    "dim and heads": (
        lambda f: base(f, "--model.dim", "18", "--model.num-heads", "4"),
        ["model.dim=18", "model.num_heads=4", "choose dim as a multiple of 8"],
    ),
    "router option": (
        lambda f: base(
            f, "--model.moe.router", "sigmoid", "--model.moe.router-options", "bias_rat", "0.1"
        ),
        ["router_options: bias_rat is not an option of router='sigmoid'", "did you mean bias_rate"],
    ),
    "bias rate": (
        lambda f: base(
            f, "--model.moe.router", "sigmoid", "--model.moe.router-options", "bias_rate", "-1"
        ),
        ["bias_rate=-1: must be 0 or more and finite"],
    ),
    "noisy top 1": (
        lambda f: base(f, "--model.moe.router", "noisy", "--model.moe.top-k", "1"),
        ["top_k=1", 'write normalize="before"'],
    ),
    "hidden": (
        lambda f: base(f, "--model.moe.hidden", "0"),
        ["model.moe.hidden=0: must be at least 1"],
    ),
    "capacity factor": (
        lambda f: base(f, "--model.moe.capacity-factor", "-1"),
        ["model.moe.capacity_factor=-1.0", "above 0"],
    ),
    "negative loss": (
        lambda f: base(f, "--model.moe.z-loss", "-1"),
        ["model.moe.z_loss=-1.0", "must be 0 or more"],
    ),
    # Numbers of a run
    "no steps": (lambda f: base(f, "--steps", "0"), ["steps=0: must be at least 1"]),
    "device": (
        lambda f: base(f, "--device", "gpu"),
        ["device='gpu' is unknown", "write auto, cpu or cuda"],
    ),
    "absent device": (
        lambda f: base(f, "--device", "cuda:99"),
        ["device='cuda:99'", "write cpu or auto"],
    ),
    # Data
    "missing data": (
        lambda f: base(f, "--data.path", str(f / "no.txt")),
        ["data.path: nothing at", "no.txt", "give a text file"],
    ),
    "empty data": (
        lambda f: base(f, "--data.path", written(f, "a.txt", "")),
        ["a.txt is empty", "give files with text"],
    ),
    "short data": (
        lambda f: base(f, "--data.path", written(f, "a.txt", "short")),
        [
            "training data: 4 tokens",
            "model.seq_len + 1 = 17",
            "give more data or a smaller model.seq_len",
        ],
    ),
    "short validation data": (
        lambda f: base(f, "--data.val-share", "0.001"),
        ["validation data: 6 tokens", "= 17", "raise data.val_share"],
    ),
    "mixed data": (
        lambda f: base(f, "--data.path", tokens(f, 99, 1), written(f, "a.txt", "text")),
        ["data.path", "give one kind"],
    ),
    "bytes and a vocabulary": (
        lambda f: base(f, "--data.vocab-size", "200"),
        ["data.vocab_size=200", "256"],
    ),
    # Run folders
    "existing run": (
        lambda f: base(f, "--out", str(made(f))),
        ["run holds a run already", "--existing resume", "--existing replace", "another --out"],
    ),
    "a file in the way": (
        lambda f: base(f, "--out", written(f, "taken", "x")),
        ["taken: cannot be written", "choose another --out"],
    ),
    "another architecture": (
        lambda f: resumed(f, "--model.dim", "32", "--model.moe.num-experts", "8"),
        [
            "step 2",
            "model.dim (32 and 16)",
            "model.moe.num_experts (8 and 4)",
            "choose another run folder",
        ],
    ),
    "another precision": (
        lambda f: resumed(f, "--precision", "bfloat16"),
        ["precision=bfloat16: the run is in float32", "--precision float32 or auto"],
    ),
    "other training data": (
        lambda f: resumed(f, "--data.path", written(f, "b.txt", "other words " * 99)),
        ["training tokens are not those of the checkpoint of step 2", "choose another --out"],
    ),
    "short data over an old run": (
        lambda f: [*resumed(f), "--existing", "replace", "--model.seq-len", "9999"],
        ["= 10000", "give more data"],
    ),
    "all checkpoints damaged": (
        lambda f: base(f, "--existing", "resume", "--out", str(harmed(f, 1, 2))),
        ["every checkpoint", "step-00000001", "step-00000002", "checksum", "--existing replace"],
    ),
    "newer checkpoint": (
        lambda f: base(f, "--existing", "resume", "--out", str(newer(f))),
        ["step-00000002", "format 99", "reads 4", "use the version"],
    ),
    # Sampling
    "sample nothing": (lambda f: ["sample"], ["needs RUN: moesaic sample RUN"]),
    "sample no run": (
        lambda f: ["sample", str(f)],
        ["config.json: no such file", "name the folder that moesaic train wrote"],
    ),
    "sample an unsaved run": (
        lambda f: ["sample", str(Path(written(f, "config.json", "{}")).parent)],
        ["no checkpoint there", "train first"],
    ),
    "sample damaged checkpoints": (
        lambda f: ["sample", str(harmed(f, 1, 2))],
        ["every checkpoint", "step-00000001", "step-00000002"],
    ),
    "sample without a prompt": (
        lambda f: ["sample", str(f), "--prompt", ""],
        ["prompt", "at least one character"],
    ),
    "sample no tokens": (lambda f: ["sample", str(f), "--tokens", "0"], ["tokens", "at least 1"]),
    "sample on another device": (
        lambda f: ["sample", str(made(f)), "--device", "gpu"],
        ["device='gpu' is unknown", "write auto, cpu or cuda"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_touches_nothing(tmp_path, capsys, case):
    arrange, fragments = CASES[case]
    words = arrange(tmp_path)
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith(f"moesaic {words[0]}: ")
    assert [part for part in fragments if part not in captured.err] == [], captured.err
    assert "done" not in captured.out
    assert snapshot(tmp_path) == before


def test_a_truncated_checkpoint_is_no_error_where_there_is_an_earlier_one(tmp_path, capsys):
    run = harmed(tmp_path, 2)
    capsys.readouterr()
    assert main(base(tmp_path, "--existing", "resume", "--steps", "3")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    said = " ".join(captured.out.split())
    assert (
        "step-00000002: shards/shard-00001-model-00001-of-00001.safetensors does not match "
        "its checksum): tak"
    ) in said
    assert "taking step-00000001 instead" in said
    assert [line["step"] for line in lines(run, "train")] == [1, 2, 3]


def test_a_failed_training_exits_1_in_one_line(tmp_path, capsys):
    assert main(base(tmp_path, "--optimizer.lr", "1e38", "--optimizer.warmup-steps", "0")) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in (
        "moesaic train: the ",
        "of step 4 is not finite",
        "as were the 2 before it: weights of ",
        "no checkpoint was written yet",
        "lower --optimizer.lr",
    ):
        assert part in err


def test_the_good_run_of_the_table_is_good(tmp_path, capsys):
    assert TINY["steps"] == 4
    write_text(tmp_path / "text.txt")
    assert main(base(tmp_path)) == 0
    assert "step 4" in capsys.readouterr().out
