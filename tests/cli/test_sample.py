"""`moesaic sample`: continues a prompt with what the run folder holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.cli.main import main
from runs import run_quietly, snapshot, tiny, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two tiny models, on bytes and on a BPE."""
    folder = tmp_path_factory.mktemp("sample")
    run_quietly(tiny(folder, steps=3, save={"every": 2}, out=str(folder / "bytes")))
    tokenizer = write_tokenizer(folder / "tokenizer.json")
    run_quietly(tiny(folder, steps=3, out=str(folder / "bpe"), data={"tokenizer": tokenizer}))
    return folder


def sampled(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sample", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("run", ["bytes", "bpe"])
def test_sampling_continues_the_prompt(capsys, folder, run):
    words = [str(folder / run), "--prompt", "abc ", "--tokens", "40"]
    first = sampled(capsys, *words)
    assert first.startswith("abc ")
    assert len(first.encode()) > len("abc ") + 20
    assert sampled(capsys, *words) == first
    assert sampled(capsys, *words, "--seed", "1") != first
    greedy = sampled(capsys, *words, "--temperature", "0")
    assert sampled(capsys, *words, "--temperature", "0", "--seed", "1") == greedy
    assert sampled(capsys, *words, "--top-k", "1") == greedy


def test_sampling_leaves_the_run_alone(capsys, folder):
    before = snapshot(folder)
    sampled(capsys, str(folder / "bpe"), "--tokens", "2")
    assert snapshot(folder) == before


def test_all_tokens_may_be_drawn(capsys, folder):
    out = sampled(
        capsys, str(folder / "bytes"), "--tokens", "50", "--top-k", "None", "--temperature", "9"
    )
    assert len(set(out)) > 20


def test_a_damaged_checkpoint_is_passed_over(capsys, tmp_path):
    run_quietly(tiny(tmp_path, steps=2, save={"every": 1}))
    (
        tmp_path
        / "run"
        / "checkpoints"
        / "step-00000002"
        / "shards"
        / "shard-00001-model-00001-of-00001.safetensors"
    ).write_bytes(b"x")
    assert main(["sample", str(tmp_path / "run"), "--tokens", "2"]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert (
        "step-00000002: shards/shard-00001-model-00001-of-00001.safetensors does not match "
        "its checksum"
    ) in err
    assert "taking step-00000001 instead" in err


@pytest.mark.parametrize("as_folder", [False, True])
def test_token_files_have_no_text(capsys, tmp_path, as_folder):
    (tmp_path / "tokens").mkdir()
    path = tmp_path / "tokens" / "a.bin"
    np.arange(2000, dtype="<u2").tofile(path)
    given = str(path.parent if as_folder else path)
    run_quietly(tiny(tmp_path, steps=1, data={"path": [given], "vocab_size": 2000}))
    assert main(["sample", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.endswith(
        "the run was trained on .bin tokens, whose text is not known\n"
    )


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_that_is_none_is_refused(capsys, folder, temperature):
    assert main(["sample", str(folder / "bytes"), f"--temperature={temperature}"]) == 2
    assert "temperature a finite number of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["1e308", "1e-320"])
def test_no_finite_temperature_is_too_much(capsys, folder, temperature):
    out = sampled(capsys, str(folder / "bytes"), "--tokens", "20", "--temperature", temperature)
    if temperature == "1e-320":
        assert out == sampled(capsys, str(folder / "bytes"), "--tokens", "20", "--temperature", "0")


def test_a_prompt_without_a_word_is_one_line(capsys, folder):
    for words in (["--prompt"], ["--prompt", ""], ["--prompt", "a", ""]):
        assert main(["sample", str(folder / "bytes"), *words]) == 2
        assert "prompt: give at least one character" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "seed"), [("sample", -1), ("sample", 2**70), ("check", 2**70), ("convert", 2**63)]
)
def test_a_seed_that_no_generator_takes_is_refused(capsys, folder, command, seed):
    words = {"sample": [str(folder / "bytes")], "convert": ["a", "b", "--to", "hf"]}
    assert main([command, *words.get(command, []), f"--seed={seed}"]) == 2
    assert f"seed={seed}: choose 0 or more" in capsys.readouterr().err


def test_a_prompt_of_another_encoding_is_one_line(capsys, folder):
    assert main(["sample", str(folder / "bytes"), "--prompt", "\udcff"]) == 2
    assert "prompt: is no UTF-8" in capsys.readouterr().err
