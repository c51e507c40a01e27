"""`moesaic plan finetune`: what it prints, and what it refuses in one line."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.cli.output import WIDEST
from moesaic.cli.plan_finetune import _command
from moesaic.planner.answer import SPEED_RATIOS
from moesaic.planner.cluster import read_cluster
from moesaic.planner.finetune import (
    LOSS_TOKENS,
    FinetunePrediction,
    SplitPrediction,
    predict_finetune,
)
from moesaic.planner.hub import HubShape
from moesaic.planner.presets import CONFIGS, read_job
from moesaic.planner.rank_memory import GIB
from moesaic.program.plan import Plan

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 32000,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["plan", "finetune", "--model", str(tmp_path / "config.json"), "--seq-len", "512"]
    return [*words, "--cluster", "2x2x4090-10gbe"]


def test_it_says_what_fits_which_split_is_fastest_and_what_would_help(command, capsys):
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= WIDEST
    assert sum("; recommended" in line for line in lines) == 1
    text = unfolded("\n".join(lines))
    for words in (
        "logits and loss 0.",
        "of 24: experts 0.",
        "layers, one rank at a time",
        " likely; a step of 8,192 tokens takes ",
        "a second NIC",
    ):
        assert words in text
    command_line = lines.index("run on each of 2 machines, HOST being the first one's name:") + 1
    assert lines[command_line].startswith("    torchrun --nnodes 2 ")


def printed(words: list[str], capsys) -> str:
    """Return what a command prints, with folded lines whole again."""
    assert main(words) == 0
    return unfolded(capsys.readouterr().out)


def unfolded(text: str) -> str:
    """Return printed text with its folded lines whole again."""
    return re.sub(r"( \\)?\n {4,}", " ", text)


STAGES_WIN = ["plan", "finetune", "--model", "qwen3-30b-a3b", "--cluster", "2x4x4090-25gbe"]
"""A plan whose recommended split is into stages of one rank."""


def test_what_is_printed_is_of_the_recommended_split(capsys) -> None:
    found = predict_finetune(
        read_job("qwen3-30b-a3b").model,
        cluster=read_cluster("2x4x4090-25gbe"),
        ranks=8,
        memory_bytes=None,
        tokens=4096,
        length=4096,
        method="qlora",
        rank=16,
        logits=LOSS_TOKENS,
        projections=4,
    )
    best = found.splits["layers, micro-batches"]
    assert best == found.recommended
    assert sum(best.parts.values()) == pytest.approx(best.bytes)
    assert best.interval is not None
    low, high = best.interval
    seconds = 8 * 4 * 4096 / best.tokens_per_second

    text = printed(STAGES_WIN, capsys)
    assert (
        f"recommended: 8 stages of 1 rank: {best.tokens_per_second:,.0f} tokens/s, "
        f"{low:,.0f} to {high:,.0f} likely; a step of 131,072 tokens takes {seconds:.2f} s\n"
    ) in text
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in best.parts.items())
    assert f"  its fullest rank: {best.bytes / GIB:.1f} GiB, " in text
    assert f" of 24: {parts}\n" in text
    # of experts spread, the line of the table alone
    assert text.count("experts spread") == 1
    for words in ("plan of the experts' messages", "busy", "fp8"):
        assert words not in text


def test_plan_and_busy_links_are_printed_where_experts_spread_are_recommended(
    command, tmp_path: Path, capsys
) -> None:
    one_layer = {**CONFIG, "num_hidden_layers": 1}  # no stages
    (tmp_path / "config.json").write_text(json.dumps(one_layer))
    text = printed(command, capsys)
    assert "recommended: experts spread: " in text
    for words in (
        "plan of the experts' messages: ",
        "seconds of a step in which each is busy: ",
        "rows in fp8 on the wire: ",
    ):
        assert words in text


def test_each_change_says_whose_speed_it_compares_and_whose_bytes_it_tells(capsys) -> None:
    text = printed(STAGES_WIN, capsys)
    speed = re.search(r"recommended: 8 stages of 1 rank: ([\d,]+) tokens/s", text)
    assert speed is not None
    assert (
        "what would change most, each predicted again, as tokens/s of what is recommended then "
        f"over the {speed[1]} of 8 stages of 1 rank now:\n"
    ) in text
    changes = text.split("rank now:\n")[1].splitlines()
    assert [line.split(":")[0].strip() for line in changes] == [
        "twice the sequences in a micro-batch",
        "links inside machines twice as fast",
    ], "those that gain nothing are left out"
    for line in changes:
        assert re.fullmatch(r"  .*: \d\.\d\d times \(\d stages of \d ranks?, [\d.]+ GiB\)", line)


def test_splits_have_the_names_of_the_docs_and_come_with_the_flags_that_run_them(capsys) -> None:
    lines = printed(STAGES_WIN, capsys).splitlines()
    rows = [re.split(r"  +", line.strip())[:2] for line in lines[2:7]]
    assert rows == [
        ["experts spread", "--plan auto"],
        ["2 stages of 4 ranks", "--pp 2"],
        ["4 stages of 2 ranks", "--pp 4"],
        ["8 stages of 1 rank", "--pp 8"],
        ["layers, one rank at a time", "no flag runs it"],
    ]
    assert "layers, one rank at a time: accelerate's device_map" in lines[7]
    docs = Path(__file__).parents[2] / "docs" / "finetune.md"
    assert "| experts spread | stages of 2 ranks | stages of 1 rank |" in docs.read_text()


def test_halves_in_flight_are_named_with_their_flags(command, capsys) -> None:
    text = printed([*command, "--batch-size", "8"], capsys)
    assert re.search(
        r"\n  2 stages of 2 ranks, halves in flight +--micro-batches-in-flight 2 --pp 2 ", text
    )
    assert re.search(
        r"\n  experts spread, halves in flight +--micro-batches-in-flight 2 (--plan auto )? ", text
    )


def test_a_cluster_of_a_file_has_the_name_of_the_file_or_its_own(
    command, tmp_path: Path, capsys
) -> None:
    boxes = tmp_path / "boxes.toml"
    text = (resources.files("moesaic.planner") / "clusters" / "8x4090-pcie.toml").read_text()
    boxes.write_text(text)
    words = [*command[:-1], str(boxes)]
    assert " on boxes.toml: qlora" in printed(words, capsys)
    boxes.write_text(f'name = "the two boxes"\n{text}')
    assert " on the two boxes: qlora" in printed(words, capsys)


def test_the_folder_of_a_model_is_read(command, tmp_path: Path, capsys) -> None:
    of_file = printed(command, capsys)
    folder = [*command]
    folder[3] = str(tmp_path)
    assert printed(folder, capsys) == of_file.replace(command[3], str(tmp_path))
    (tmp_path / "empty").mkdir()
    folder[3] = str(tmp_path / "empty")
    assert "empty: the folder has no config.json: " in refused(folder, capsys)


def test_what_is_no_model_of_the_hub_is_refused_with_names_and_files_that_are(command, capsys):
    """The help says the same."""
    names = ", ".join(CONFIGS)
    ways = f"name one ({names}), or give a model's config.json or its folder"
    for preset in ("demo", "gpt-small"):
        assert ways in refused([*command[:3], preset, *command[4:]], capsys)
    assert f"--model is missing: name one ({names}), or a model's " in refused(command[:2], capsys)
    for name in CONFIGS:
        assert isinstance(read_job(name).model, HubShape)
    assert main([*command[:2], "--help"]) == 0
    told = " ".join(re.sub("[│╭╰─]", "", capsys.readouterr().out).split())
    assert f"A Hugging Face model: {names}, or a config.json, or its folder. To plan " in told


def test_unknown_ports_of_known_cards_are_refused_with_the_known_ones(command, capsys) -> None:
    assert (
        "'2x4x4090-1gbe' is unknown: a port has 10, 25 or 100 Gb/s: choose one of "
        "2x4x4090-10gbe, 2x4x4090-25gbe, 2x4x4090-100gbe"
    ) in refused([*command[:-1], "2x4x4090-1gbe"], capsys)


@pytest.mark.parametrize(("flags", "whose"), [([], "the default"), (["512"], "--seq-len")])
def test_sequences_that_the_model_was_not_made_for_get_a_note_and_the_command_their_length(
    command, tmp_path: Path, capsys, flags: list[str], whose: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 256}))
    words = [*command[:4], *command[6:]]
    length = 4096
    if flags:
        words += ["--seq-len", *flags]
        length = 512
    text = printed(words, capsys)
    assert f"note: sequences of {length:,} tokens ({whose}) are longer than the 256 that " in text
    assert f" --length {length} " in text
    text = printed([*words, "--seq-len", "256"], capsys)
    assert "note: " not in text
    assert " --length 256 " in text


def test_json_has_everything(command, capsys):
    assert main([*command, "--json", "--rank", "4", "--batch-size", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["rank"], found["accumulation"]) == (1024, 4, 4)
    assert found["bytes"] == pytest.approx(sum(found["parts"].values()))
    assert found["tokens_per_second"] == pytest.approx(
        SPEED_RATIOS[1] * 4 * 4 * 1024 / found["seconds"]
    )
    assert found["fastest"] in found["splits"]
    halved = next(
        change
        for change in found["changes"]
        if change["what"] == "half the sequences in a micro-batch"
    )
    assert halved["bytes"] < found["bytes"]
    assert {"what", "speedup", "split", "bytes", "fits"} == set(halved)


def refused(words: list[str], capsys) -> str:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_what_does_not_fit_is_refused_with_what_does(capsys):
    words = ["plan", "finetune", "--model", "qwen3-30b-a3b", "--cluster", "2x3090-pcie"]
    assert (
        "does not fit: with experts spread, it needs 39.1 GiB of 24 on a device; smallest that "
        "fits: 4 such devices; or --method qlora"
    ) in refused([*words, "--method", "lora"], capsys)


def test_flags_and_models_that_have_no_meaning_are_refused(command, capsys):
    for flag in (["--ep", "2"], ["--allow-lossy"], ["--reserve-gib", "2"]):
        assert f"unknown argument {flag[0]}" in refused([*command, *flag], capsys)
    assert "--rank 0: must be at least 1" in refused([*command, "--rank", "0"], capsys)
    assert "give a model's config.json or its folder" in refused(
        ["plan", "finetune", "--model", "demo", "--cluster", "2x4090-pcie"], capsys
    )


def command_of(split: SplitPrediction, plan: Plan) -> str:
    """Return the printed command of a split, the only one."""
    found = FinetunePrediction(parts={}, fits=True, plan=plan, splits={"a split": split})
    sizes = {
        "ranks": 4,
        "method": "qlora",
        "rank": 16,
        "length": 128,
        "tokens": 256,
        "accumulation": 2,
    }
    return _command("model", read_cluster("4x4090-pcie"), found, sizes)


@pytest.mark.parametrize(
    ("plan", "stages", "flag"),
    [(Plan(), 1, ""), (Plan(all_to_all="hier2d"), 1, "--plan auto "), (Plan(chunks=2), 4, "")],
)
def test_a_speed_of_another_plan_than_the_default_comes_with_a_plan_that_is_timed(
    plan: Plan, stages: int, flag: str
) -> None:
    split = SplitPrediction(
        stages=stages, tokens_per_second=1.0, bytes=0.0, fits=True, bottleneck="compute"
    )
    pipeline = "" if stages == 1 else f"--pp {stages} "
    assert command_of(split, plan) == (
        f"moesaic finetune MODEL DATA --ranks 4 {pipeline}{flag}--method qlora --rank 16 "
        "--length 128 --micro-batch 2 --batch 16"
    )


@pytest.mark.parametrize(
    ("plan", "stages", "flags"),
    [
        (Plan(), 1, "--micro-batches-in-flight 2"),
        (Plan(chunks=2), 1, "--micro-batches-in-flight 2"),
        (Plan(all_to_all="hier2d"), 1, "--micro-batches-in-flight 2 --plan auto"),
        (Plan(), 2, "--micro-batches-in-flight 2 --pp 2"),
    ],
)
def test_a_split_with_halves_in_flight_is_run_so(plan: Plan, stages: int, flags: str) -> None:
    split = SplitPrediction(
        stages=stages,
        in_flight=2,
        tokens_per_second=1.0,
        bytes=0.0,
        fits=True,
        bottleneck="compute",
    )
    assert f"--ranks 4 {flags} --method" in command_of(split, plan)


@pytest.mark.parametrize(
    ("model", "first"), [("qwen3-30b-a3b", "| Qwen3-30B-A3B,"), ("mixtral-8x7b", "| Mixtral 8x7B,")]
)
def test_the_pages_table_is_what_is_printed(model: str, first: str, capsys) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    for line, cluster in zip(lines[start:], ("4x4090-pcie", "2x4x4090-25gbe")):
        said = printed(["plan", "finetune", "--model", model, "--cluster", cluster], capsys)
        for cell in line.strip("|").replace("*", "").split("|")[1:]:
            speed, gib = cell.strip().rsplit(", ", 1)
            assert re.search(rf" {speed} +{re.escape(gib)} ", said), (cluster, cell)
