"""`moesaic plan`: what it prints and writes, what it refuses in one line, and that it runs without
torch."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli.main import main
from moesaic.cli.output import WIDEST
from moesaic.cli.plan_words import what_was_measured
from moesaic.planner.cluster import presets, read_cluster
from moesaic.planner.emit import SYSTEMS
from moesaic.planner.plan_files import MESH, SPLIT, read_planned
from moesaic.program.plan import Plan, plan_in_words
from moesaic.train.auto_plan import with_planned
from moesaic.train.config import PlannerConfig, TrainConfig

MODEL = """batch_size = 8
[model]
dim = 64
num_layers = 2
num_heads = 2
seq_len = 64
[model.moe]
num_experts = 4
top_k = 1
hidden = 128
"""
CLUSTER = """nodes = 2
devices_per_node = 2
[device]
memory_gib = 2
memory_gigabytes_per_second = 100
tflops = { bf16 = 10, fp32 = 5 }
[[links]]
name = "bus"
devices = 1
gbps = 40
[[links]]
name = "nic"
devices = 2
gbps = 1
carries = "outside"
"""


def printed(text: str) -> str:
    """Return a text with its lines as they were before they were folded; none is too wide."""
    assert max(map(len, text.splitlines())) <= WIDEST
    return re.sub(r"\n    (?=\S)", " ", text)


FEW = ("--schedules", "s1", "s2", "--all-to-alls", "linear", "hier2d", "--chunks", "1", "2")
"""A part of the space, where the whole one takes seconds to search."""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "gpt.toml").write_text(MODEL)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return [
        "plan",
        "--model",
        str(tmp_path / "gpt.toml"),
        "--cluster",
        str(tmp_path / "cluster.toml"),
    ]


def test_json_ranks_by_time_and_says_why(files: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main([*files, *FEW, "--json", "--top", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranking = found["ranking"]
    assert len(ranking) == 4
    assert [each["seconds"] for each in ranking] == sorted(each["seconds"] for each in ranking)
    best = ranking[0]
    assert best["bottleneck"] in best["limits"]
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert best["memory_bytes"]["total"] < 2 * 2**30
    assert best["over_bound"] >= 1
    assert found["bound_seconds"] <= best["seconds"] / best["over_bound"] * (1 + 1e-9)
    assert Plan(**best["plan"]).is_lossless
    assert {"1", "2", "4"} == set(found["by_ep"])
    assert found["by_ep"]["1"]["best_seconds"] >= found["by_ep"]["1"]["floor_seconds"]
    assert any("ep = 1" in line for line in found["reasons"])
    assert found["layouts"] > found["layouts_left_out"] >= 0
    experts = 2 * 3 * 64 * 128
    around = 2 * (4 * 64 * 64 + 4 * 64) + 256 * 64
    assert found["parameters"] == {"total": 4 * experts + around, "active": experts + around}
    assert found["reasons"][0] == "model: 0.2 million total, 0.1 million active parameters"
    assert found["reasons"][-1] == (
        "measured of cluster.toml: nothing by us; its description does not say where its numbers "
        "come from (source = ...)"
    )


def test_the_answer_goes_to_standard_output(
    files: list[str], capsys: pytest.CaptureFixture
) -> None:
    one = [*files, *FEW, "--tp", "1"]
    assert main([*one, "--verbose"]) == 0
    shown, said = capsys.readouterr()
    assert said.strip() == ""
    for words in (
        "over bound",
        "limited by",
        "best: tp ",
        "times the bound of this layout",
        "memory: ",
        "ep = 1",
    ):
        assert words in shown
    assert main(one) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 25
    assert "measured of" not in short
    assert "measured of" in shown


def test_every_size_of_ep_is_given_a_speed_or_said_not_to_be_searched(hub, capsys):
    """Of four sizes the three best are searched without stages; the line and `--ep` agree."""
    hub = [*hub, "--pp", "1"]
    assert main([*hub, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    low, high = found["speed"]["interval"]
    assert low <= found["speed"]["tokens_per_second"] <= high
    assert found["parameters"]["active"] < found["parameters"]["total"]
    assert "launches" in found["ranking"][0]["parts"]
    line = next(line for line in found["reasons"] if line.startswith("slower: "))
    assert "not searched (--ep does)" in line
    best = found["ranking"][0]["seconds"]
    told = [
        words.split()
        for words in line.removeprefix("slower: ").split("; ")
        if "times the speed" in words
    ]
    assert len(told) == 2
    for words in told:
        assert main([*hub, "--ep", words[1], "--json"]) == 0
        pinned = json.loads(capsys.readouterr().out)["ranking"][0]["seconds"]
        assert float(words[-4]) == pytest.approx(best / pinned, rel=0.02)


@pytest.mark.parametrize("name", presets())
def test_what_was_measured_of_a_preset_is_told(name: str) -> None:
    spec = read_cluster(name)
    said = what_was_measured(read_cluster(name))
    assert said.startswith(f"measured of {name}: {'; '.join(spec.measured) or 'nothing by us'}; ")
    assert said.endswith(spec.source)
    assert "\n" not in said


def test_the_plan_file_is_what_training_takes(files: list[str], tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.toml"
    assert main([*files, *FEW, "--json", "--write", str(path)]) == 0
    best = json.loads(capsys.readouterr().out)["ranking"][0]
    mesh, plan = read_planned(path)
    assert plan == Plan(**best["plan"])
    assert {name: mesh[name] for name in MESH} == {name: best["mesh"][name] for name in MESH}
    split = {name: best["split"][of_split] for name, of_split in SPLIT.items()}
    assert {name: mesh[name] for name in SPLIT} == split
    config = with_planned(TrainConfig(planner=PlannerConfig(plan=str(path))))
    assert (config.layer_plan, config.mesh.ep, config.mesh.etp) == (plan, mesh["ep"], mesh["etp"])


def test_pinned_axes_and_choices_are_kept(files: list[str], capsys: pytest.CaptureFixture) -> None:
    only = [
        "--ep",
        "2",
        "--tp",
        "2",
        "--etp",
        "1",
        "--schedules",
        "s2",
        "--chunks",
        "2",
        "--all-to-alls",
        "linear",
    ]
    assert main([*files, *only, "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["ranking"]:
        assert (each["mesh"]["ep"], each["mesh"]["tp"], each["mesh"]["etp"]) == (2, 2, 1)
        assert (each["plan"]["schedule"], each["plan"]["chunks"], each["plan"]["all_to_all"]) == (
            "s2",
            2,
            "linear",
        )


def test_codecs_only_where_allowed(files: list[str], capsys: pytest.CaptureFixture) -> None:
    few = [
        "--tp",
        "1",
        "--ep",
        "4",
        "--etp",
        "1",
        "--schedules",
        "s1",
        "--all-to-alls",
        "linear",
        "--chunks",
        "1",
    ]
    assert main([*files, *few, "--allow-lossy", "--json"]) == 0
    plans = [each["plan"] for each in json.loads(capsys.readouterr().out)["ranking"]]
    assert {plan["codec"] for plan in plans} != {"none"}


def test_under_counts_no_line_compares_with_even_routing(hub, tmp_path, capsys):
    np.save(tmp_path / "counts.npy", np.array([[9, 1, 1, 1, 1, 1, 1, 1]] * 8))
    flags = [
        "--ep",
        "8",
        "--chunks",
        "1",
        "--all-to-alls",
        "linear",
        "--flags",
        "--expert-model-parallel-size 8",
    ]
    assert main([*under(hub, "explain"), *flags, "--trace", str(tmp_path / "counts.npy")]) == 0
    lines = printed(capsys.readouterr().out).splitlines()

    starts = [line.split(":")[0] for line in lines]
    assert "speed" in starts
    assert "yours" in starts
    assert "yours, under even routing, which is not compared with the plan above" in starts
    assert "change first" not in starts
    assert not any("MaxVio" in line or "as Megatron-LM" in line for line in lines)
    assert not any("layout above" in line or "the speed above" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            ["--cluster", "25gb", "--model", "demo"],
            "cluster '25gb' is unknown: did you mean 25gbe?",
        ),
        (["--cluster", "25gbe", "--model", "dmo"], "model 'dmo' is unknown: did you mean demo?"),
        (["--cluster", "25gbe"], "--model is missing: name one (mixtral-8x7b, olmoe-1b-7b, "),
        (["--model", "demo"], "--cluster is missing: choose one of 100gbe"),
        (["--model", "demo", "--cluster", "25gbe", "--pp", "0"], "--pp 0: must be at least 1"),
        (
            ["--model", "demo", "--cluster", "25gbe", "--pp", "3"],
            "--pp 3: does not divide 16 devices: choose a divisor",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--batch-size", "7", "--pp", "1"],
            "tp 1, ep 1, etp 1: the data-parallel groups, 16 does not divide batch_size=7",
        ),
        (["--model", "demo", "--cluster", "25gbe", "--tp", "0"], "--tp 0: must be at least 1"),
        (["--model", "demo", "--cluster", "25gbe", "--top", "0"], "--top 0: must be at least 1"),
        (
            ["--model", "demo", "--cluster", "25gbe", "--chunks"],
            "--chunks is empty: name at least one",
        ),
        (["--model", "demo", "--cluster", "25gbe", "--chunk", "2"], "did you mean --chunks?"),
        (
            ["--model", "demo", "--cluster", "25gbe", "--ep", "5"],
            (
                "no layout of 16 ranks: ep 5 does not divide them: choose a divisor, or leave "
                "--ep out and every size is tried"
            ),
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--ep", "8", "--etp", "4"],
            "ep 8 x etp 4 does not divide them",
        ),
        (
            [
                "explain",
                "--model",
                "demo",
                "--cluster",
                "25gbe",
                "--flags",
                "--expert-model-parallel-size 5",
            ],
            "16 ranks do not split into tp 1, cp 1, pp 1, ep 5, etp 1",
        ),
        (["--model", "demo", "--cluster", "no.toml"], "cluster no.toml: no such file"),
        (
            ["--model", "demo", "--cluster", "25gbe", "--reserve-gib", "nan"],
            "--reserve-gib nan: must be a finite number",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--reserve-gib", "-1"],
            "--reserve-gib -1.0: must be a finite number",
        ),
        (["--model", "no.toml", "--cluster", "25gbe"], "model no.toml: no such file"),
        (["--model", "demo", "--cluster", "25gbe", "--trace", "no.npz"], "no.npz"),
        (
            ["--model", "demo", "--cluster", "25gbe", "--max-vio", "-1"],
            "--max-vio -1.0: must be a finite number of at least 0",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--max-vio", "nan"],
            "--max-vio nan: must be a finite number of at least 0",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--max-vio", "1", "--trace", "a.csv"],
            "--trace and --max-vio both say how skewed",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--gpus", "4", "--nodes", "2"],
            "--nodes and --gpus both say how large the cluster is",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--price-per-hour", "-1"],
            "--price-per-hour -1.0: must be a finite number above 0",
        ),
        (
            ["explain", "--model", "demo", "--cluster", "25gbe", "--flags", "--nothing"],
            "found no flag of Megatron or torchtitan that splits",
        ),
        (
            ["explain", "--model", "demo", "--cluster", "25gbe"],
            "--flags is missing: give those of your layout in quotes",
        ),
        (["emit", "megatrom", "--model", "demo", "--cluster", "25gbe"], "did you mean megatron?"),
        (["emit", "--model", "demo"], "needs SYSTEM: moesaic plan emit SYSTEM; --help lists all"),
        (
            ["emit", "moesaic", "--model", "demo", "--cluster", "25gbe", "--top", "3"],
            "unknown argument --top",
        ),
        (
            ["--model", "my demo", "--emit", "megatron", "--explain=--tp 2"],
            "--emit is now moesaic plan emit SYSTEM, with the other options",
        ),
        (
            ["--explain", "--tp 2", "--model", "demo"],
            "--explain is now moesaic plan explain --flags FLAGS, with the other options",
        ),
        (
            ["--gpus", "2", "--finetune=lora"],
            "--finetune is now moesaic plan finetune --method METHOD, with the other options",
        ),
        (
            ["--adapter_rank", "4", "--gpus", "2"],
            "--adapter-rank is now moesaic plan finetune --rank RANK, with the other options",
        ),
        (
            ["--model", "demo", "--cluster", "dgx-h100", "--gpus", "12"],
            "12 devices are not whole nodes of dgx-h100, which have 8: try 8",
        ),
        (
            ["--model", "demo", "--cluster", "25gbe", "--write", "plan.txt"],
            "--write plan.txt: choose a name that ends in",
        ),
        (
            ["--model", "gpt-small", "--cluster", "25gbe", "--reserve-gib", "23.9"],
            "the model fits no layout of 16 ranks",
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bad_input_is_one_line(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", *words]) == 2
    out, shown = capsys.readouterr()
    assert out == ""
    last = shown.strip().splitlines()[-1]
    assert last.startswith("moesaic plan: ")
    assert refusal in last


def test_plans_in_words() -> None:
    assert plan_in_words(Plan()) == "s1, linear"
    told = plan_in_words(
        Plan(
            schedule="s2",
            chunks=2,
            gather_weights=0,
            codec="int8",
            overlap_gather=True,
            order="fifo",
            peer_groups=2,
        )
    )
    assert (
        told == "s2, linear, 2 chunks, r = 0, 2 peer groups, overlapped gather, int8 forward, fifo"
    )


HUB = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}


@pytest.fixture
def hub(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    machine = ["--cluster", "dgx-h100", "--gpus", "8", "--tp", "1", "--etp", "1"]
    return ["plan", "--model", str(tmp_path / "config.json"), *machine, *FEW]


def under(words: list[str], *command: str) -> list[str]:
    """Return the words of `moesaic plan` for one of its subcommands."""
    return ["plan", *command, *words[1:]]


def test_skew_costs_time_and_memory_beside_the_even_step(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    spread = [*files, "--tp", "1", "--ep", "4", "--etp", "1", "--top", "2", *FEW]
    found = {}
    for max_vio in ("0", "1", "3"):
        assert main([*spread, "--max-vio", max_vio, "--json"]) == 0
        found[max_vio] = json.loads(capsys.readouterr().out)
        best = found[max_vio]["ranking"][0]
        under = best["under_max_vio"]
        assert (under["seconds"] == pytest.approx(best["seconds"], rel=1e-6)) == (max_vio == "0")
        assert (under["memory_bytes"] == pytest.approx(best["memory_bytes"], rel=1e-6)) == (
            max_vio == "0"
        )
        assert any(
            line.startswith(f"a MaxVio of {max_vio} (one rank's experts get")
            for line in found[max_vio]["reasons"]
        )
    one, three = (found[max_vio]["ranking"][0]["under_max_vio"] for max_vio in ("1", "3"))
    assert one["seconds"] < three["seconds"]
    assert one["memory_bytes"]["total"] < three["memory_bytes"]["total"]
    assert main([*spread, "--max-vio", "1"]) == 0
    text = capsys.readouterr().out
    assert "ms under skew" in text
    assert f"{one['seconds'] * 1e3:,.2f}" in text
    assert main([*files, "--tp", "1", "--ep", "1", "--etp", "1", *FEW, "--max-vio", "1"]) == 0
    assert (
        "a MaxVio of 1: costs nothing, since every rank has all experts" in capsys.readouterr().out
    )


def test_a_skew_that_no_memory_holds_is_refused_in_one_line(files, capsys):
    assert main([*files, "--max-vio", "2", "--ep", "2", *FEW]) == 2
    said = capsys.readouterr().err
    assert "the best layout, tp" in said
    assert said.strip().count("\n") == 0


def test_a_model_of_the_hub_is_answered_in_what_people_ask(
    hub: list[str], capsys: pytest.CaptureFixture
) -> None:
    flags = (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --global-batch-size 64 "
        "--enable-zero-bubble"
    )
    flags += (
        " --recompute-modules moe_act layernorm --fp8-format hybrid "
        "--num-distributed-optimizer-instances 1"
    )
    assert (
        main([*under(hub, "explain"), "--ep", "8", "--price-per-hour", "2.5", "--flags", flags])
        == 0
    )
    text = printed(capsys.readouterr().out)
    for words in (
        "tokens/s and device (",
        "by published steps), a step of 262,144 tokens in",
        "MFU",
        "change first: ",
        "a MaxVio of 1 (one rank's experts get 2 times their share in every layer) makes a step",
        "for a trillion tokens, at 2.5 a device and hour, in the currency of --price-per-hour",
        "yours: ",
        "the layout above reaches",
        "your parts: attention",
        "pipeline",
        "; memory: weights",
        "as Megatron-LM 0.20 runs it: ",
    ):
        assert words in text
    assert ": :" not in text
    assert "sequences, not of" not in text, "both have the batch of the flags"
    best = re.search(r"^ 1 +([\d,]+\.\d\d) ", text, re.MULTILINE)[1]
    said = re.search(
        r"tokens in ([\d,.]+) s \((\S+) ms simulated; published \S+ take (\S+) t", text
    )
    step, simulated, longer = (float(each.replace(",", "")) for each in said.groups())
    assert said[2] == best, "the ranking's step is the simulated one"
    assert step == pytest.approx(simulated / 1e3 * longer, rel=0.01, abs=0.005)
    first = next(line for line in text.splitlines() if line.startswith("change first: "))
    assert " times the speed" in first
    assert ": 0." not in first, "what slows a step down is no change to begin with"


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("megatron", "--expert-model-parallel-size"),
        ("torchtitan", "expert_parallel_degree"),
        ("moesaic", "--mesh.ep"),
        ("automodel", "--distributed.ep_size 8"),
    ],
)
def test_a_layout_is_printed_in_the_words_of_another_system(system, words, hub, capsys):
    assert main([*under(hub, "emit", system), "--ep", "8"]) == 0
    printed = capsys.readouterr()
    assert words in printed.out
    assert all(
        line.startswith(("--", "activation-checkpoint:")) for line in printed.out.splitlines()
    )
    if SYSTEMS[system].version:
        assert f"flags of {SYSTEMS[system].version}" in printed.err.splitlines()


def test_somebodys_layout_is_printed_in_the_words_of_another_system(hub, capsys):
    flags = (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --enable-zero-bubble "
        "--micro-batch-size 2 --num-virtual-stages-per-pipeline-rank 2"
    )
    assert main([*under(hub, "emit", "torchtitan"), "--ep", "8", "--flags", flags]) == 0
    printed = capsys.readouterr().out
    assert "--parallelism.pipeline_parallel_schedule InterleavedZeroBubble" in printed
    assert "--parallelism.expert_parallel_degree 4" in printed


def test_the_best_layout_with_a_pipeline_is_printed_in_the_words_of_megatron(hub, capsys):
    assert main([*under(hub, "emit", "megatron"), "--ep", "8", "--pp", "2"]) == 0
    assert "--pipeline-model-parallel-size 2" in capsys.readouterr().out.splitlines()


def test_the_answer_is_a_page_to_share(
    hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With every line, those on demand and that of a layout whose pipelines lack sequences
    included."""
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    flags = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 2 --global-batch-size 4"
    words = [*under(hub, "explain"), "--ep", "8", "--verbose", "--page", str(page)]
    assert main([*words, "--flags", flags]) == 0
    lines = printed(capsys.readouterr().out).splitlines()
    text = page.read_text(encoding="utf-8")
    layer = "One MoE layer of the best plan, forward"
    for title in (
        "One step of the best plan",
        "One step",
        layer,
        "Memory of a rank",
        "Roofline of products",
    ):
        assert f"{title}<" in text
    starved = "warning: a step has 4 sequences, fewer than its pipelines need: give at least 8"
    for start in (
        "change first",
        starved,
        "price: unknown without --price-per-hour; at 2.5 US dollars a device and hour",
    ):
        line = next(line for line in lines if line.startswith(start))
        assert html.escape(line, quote=False)[:60] in html.unescape(text)
    assert "http://" not in text.split("</script>")[-1]


def test_a_model_that_fits_only_when_blocks_are_recomputed_says_so(hub, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(HUB | {"num_hidden_layers": 60, "hidden_size": 2048})
    )
    assert main([*hub, "--seq-len", "32768", "--ep", "8"]) == 0
    assert (
        "activations are recomputed: otherwise no layout fits the memory" in capsys.readouterr().out
    )


def test_blocks_are_recomputed_where_that_lets_a_faster_layout_fit(capsys):
    """Experts over all ranks fit without recomputation, but stages are four times as fast."""
    command = ["plan", "--model", "olmoe-1b-7b", "--cluster", "2x4x4090-25gbe"]
    assert main([*command, "--accumulation", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main([*command, "--accumulation", "2"]) == 0
    said = capsys.readouterr().out
    longer = float(said.split("fits the memory without takes ")[1].split(" times")[0])
    assert longer > 3
    assert answer["recomputes_blocks"]
    assert answer["ranking"][0]["split"]["pp"] == 4


def test_where_nothing_of_ours_fits_it_says_what_would_and_explains_all_the_same(hub, capsys):
    tight = [*hub, "--reserve-gib", "79.5"]
    assert main(tight) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    for words in (
        "the model fits no layout of 8 ranks, even with blocks recomputed: the smallest, ",
        "what fits: ",
        "sizes of axes left free (",
        " devices, blocks recomputed (",
        "devices of 8",
        "as Megatron-LM 0.20 runs it",
        " total, ",
        " active parameters",
    ):
        assert words in said
    # Recomputation was tried, so it is no advice, and the changes are told of a job that has it.
    assert "(model.checkpoint_activations)" not in said
    flags = "--expert-model-parallel-size 4 --use-distributed-optimizer"
    assert main([*under(tight, "explain"), "--flags", flags]) == 0
    told = capsys.readouterr().out
    assert "the model fits no layout of 8 ranks" in told
    assert "yours: " in told
    assert "your parts: attention" in told
    assert "the layout above" not in told


def test_the_splits_that_choose_a_split_predicts_are_predicted(capsys):
    page = (Path(__file__).parents[2] / "docs" / "choose_a_split.md").read_text()
    rows = page.split("| `moesaic plan` with |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 4
    flags = ""
    for row in rows:
        given, fastest, _ = (cell.strip() for cell in row.strip("|").split("|"))
        told = given.split("`")[1]
        if given.startswith("the same with"):  # --accumulation alone
            told = f"{flags.partition(' --accumulation')[0]} {told}"
        flags = told
        assert main(["plan", *flags.split(), "--json"]) == 0
        best = json.loads(capsys.readouterr().out)["ranking"][0]
        sizes = {"pp": best["split"]["pp"], "ep": best["mesh"]["ep"]}
        assert fastest == ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
