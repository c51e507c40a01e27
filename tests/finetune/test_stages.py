"""`moesaic finetune --pp`: layers in stages over ranks, equal to one process."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import torch
from finetuned import FLAGS, RESULT, finetune, write_model, write_text
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from forked import Forked
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.finetune.stages import StageCut, require_stages
from moesaic.storage.nested import read_nested

IMPORTS = ("transformers", "moesaic.finetune.recipe")
METHOD = ("--method", "qlora", "--micro-batch", "2", "--batch", "8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of three layers, a text, and a finished run of one process."""
    path = tmp_path_factory.mktemp("stages")
    write_model(path / "model", num_hidden_layers=3)
    write_text(path / "text.txt")
    assert finetune(path, path / "one", "--merge", *METHOD) == 0
    return path


def started(place: Path, out: str, ranks: int, *flags: str) -> Forked:
    words = [str(place / "model"), str(place / "text.txt"), "--out", str(place / out)]
    words += [*FLAGS, *METHOD, "--ranks", str(ranks)]
    return Forked(["-m", "moesaic", "finetune", *words, *flags], {}, IMPORTS)


def on_ranks(place: Path, out: str, ranks: int, *flags: str) -> str:
    """Run the command on several ranks; return what it printed."""
    command = started(place, out, ranks, *flags)
    said, errors = command.communicate(timeout=500)
    assert command.returncode == 0, errors
    return said


def logged(out: Path, name: str = "loss") -> list[float]:
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry]


def require_equal(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Compare losses, norms of gradients, adapters and merged models of two runs."""
    for name in ("loss", "grad_norm"):
        assert logged(other, name) == pytest.approx(logged(one, name), abs=1e-6)
    for name in (RESULT, "merged/model-00001.safetensors"):
        expected, found = (load_file(each / name) for each in (one, other))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=tolerance)


def test_two_stages_train_and_merge_like_one_process_and_go_on_as_another_split(place):
    on_ranks(place, "two", 2, "--pp", "2", "--merge")
    require_equal(place / "one", place / "two")
    for rank in range(2):  # none has the layers of the other
        states = read_nested(place / "two" / "checkpoint-4" / f"states-{rank}-of-2.safetensors")
        layers = {name.split(".layers.")[1][0] for name in states["names"]}
        assert layers == ({"0", "1"}, {"2"})[rank]
    shutil.copytree(place / "two", place / "again")
    shutil.rmtree(place / "again" / "checkpoint-4")
    shutil.rmtree(place / "again" / "merged")
    assert finetune(place, place / "again", "--merge", *METHOD, "--resume") == 0
    require_equal(place / "one", place / "again")


@pytest.mark.random
def test_four_ranks_share_experts_in_stages_and_go_on_as_another_split(place):
    on_ranks(place, "four", 4, "--pp", "2", "--merge")
    require_equal(place / "one", place / "four")
    shutil.copytree(place / "four", place / "spread")
    shutil.rmtree(place / "spread" / "checkpoint-4")
    shutil.rmtree(place / "spread" / "merged")
    on_ranks(place, "spread", 2, "--resume", "--merge")
    require_equal(place / "one", place / "spread")


@pytest.mark.random
@pytest.mark.parametrize(("stages", "plan"), [(1, "default"), (2, "default"), (1, "auto")])
def test_halves_of_a_micro_batch_in_flight_train_the_same(place, stages, plan):
    out = f"flying {stages} {plan}"
    flags = ("--pp", str(stages), "--micro-batches-in-flight", "2", "--plan", plan, "--merge")
    on_ranks(place, out, 2 * stages, *flags)
    require_equal(place / "one", place / out)


@pytest.mark.random
def test_the_command_of_a_plan_runs(place, capsys):
    words = ["--model", str(place / "model" / "config.json"), "--cluster", "2x4090-pcie"]
    words += ["--seq-len", "16", "--json"]
    assert main(["plan", "finetune", *words]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert set(planned["splits"]) == {
        "experts",
        "layers, micro-batches",
        "layers, one rank at a time",
    }
    split = planned["splits"][planned["fastest"]]
    command = planned["command"].replace(" DATA ", f" {place / 'text.txt'} ")
    assert (f"--pp {split['stages']}" in command) == (split["stages"] != 1)
    more = ["--out", str(place / "planned"), "--steps", "1", "--device", "cpu"]
    run = Forked(["-m", *shlex.split(command), *more], {}, IMPORTS)
    said, errors = run.communicate(timeout=500)
    assert run.returncode == 0, errors
    assert "done: adapters in" in said


def test_a_stage_of_a_model_has_its_layers_and_nothing_of_others():
    whole = on_meta("qwen3_moe", num_hidden_layers=5)
    names = set(whole.state_dict())
    found = []
    for stage in range(3):
        model = on_meta("qwen3_moe", num_hidden_layers=5)
        StageCut(stage, 3).cut(model)
        found.append(set(model.state_dict()))
    assert set().union(*found) == names
    assert sum(map(len, found)) == len(names)
    layers = [{name.split(".")[2] for name in each if ".layers." in name} for each in found]
    assert layers == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert ["model.embed_tokens.weight" in each for each in found] == [True, False, False]
    assert ["lm_head.weight" in each for each in found] == [False, False, True]


def test_both_ends_have_a_tied_embedding():
    for stage, has in enumerate((True, False, True)):
        model = on_meta("qwen3_moe", num_hidden_layers=3, tie_word_embeddings=True)
        StageCut(stage, 3).cut(model)
        assert ("model.embed_tokens.weight" in dict(model.named_parameters())) == has


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe"])
def test_families_whose_decoder_is_a_list_of_layers_have_stages(family):
    require_stages(on_meta(family, num_hidden_layers=2), 2, family)


@pytest.mark.random
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("granitemoe", "changes what passes between its layers"),
        ("jamba", "has no embedding before its layers"),
        ("deepseek_v4", "has hc_head beside its layers"),
    ],
)
def test_other_families_are_refused_in_one_line(family, reason):
    with pytest.raises(InputError, match=f"--pp 2: {family} {reason}.*leave --pp out"):
        require_stages(on_meta(family), 2, family)


def on_meta(family: str, **fields: Any) -> Any:
    """Return a model of a family without elements."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
