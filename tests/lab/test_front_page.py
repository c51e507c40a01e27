"""README's tables and its sentence about predictions say what results and ledger say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from moesaic_lab.ledger.page import entries
from moesaic_lab.measured import machine_in_words
from moesaic_lab.step import page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
H200 = [
    result
    for path in RESULTS.glob("*.json")
    if (result := json.loads(path.read_text("utf-8")))["machine"]["gpu"] == "NVIDIA H200"
]
"""Results of the GPU that README names."""


def table(head: str) -> list[list[str]]:
    """Return the cells of README's table whose first row begins with `head`."""
    rows = README[README.index(f"\n| {head}") :].strip().split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def claim(name: str, of: str) -> float:
    return next(each["value"] for each in result(name)["claims"] if each["name"] == of)


def kernels(shape: str) -> list[str]:
    """Return README's figures of one layer on the H200, from the first result that has it."""
    tokens, dim, hidden, experts, top_k = shape.split(", ")
    layer = f"gpu.T{tokens}_H{dim}_I{hidden}_E{experts}_K{top_k}"
    found = next(
        claims
        for each in H200
        if f"{layer}.forward_tflops"
        in (claims := {claim["name"]: claim for claim in each["claims"]})
    )
    speeds = [found[f"{layer}.{direction}_tflops"] for direction in ("forward", "backward")]
    return [
        "/".join(f"{speed['value']:.0f}" for speed in speeds),
        "/".join(f"{speed['target']:.0f}" for speed in speeds),
        f"{found[f'{layer}.over_grouped_mm']['value']:.2f} times as long",
        f"{found[f'{layer}.layer_over_kernels']['value']:.2f} times as long",
    ]


@pytest.mark.skipif(not H200, reason="no result of an H200 is in benchmarks/results")
def test_kernels_are_those_of_the_result() -> None:
    rows = table("tokens, dim, hidden")
    assert len(rows) == 4
    assert [kernels(shape) for shape, *_ in rows] == [cells for _, *cells in rows]


def test_steps_are_those_of_the_results() -> None:
    layers = {
        dtype: [
            row["layer_over"]
            for row in result("device_cpu")["rows"]
            if row.get("method") == "transformers grouped_mm" and row["dtype"] == dtype
        ]
        for dtype in ("float32", "bfloat16")
    }
    spans = [
        f"{min(ratios):.2f} to {max(ratios):.2f} in {dtype}" for dtype, ratios in layers.items()
    ]
    titan = [claim("train", f"train.top{top_k}.step_over_torch_ep") for top_k in (2, 4, 8)]
    alternatives = [words for words, _ in table("alternative")]
    for words, name in zip(alternatives, ("device_cpu", "train", "train"), strict=True):
        assert machine_in_words(result(name)["machine"]) in words
    assert [share for _, share in table("alternative")] == [
        ", ".join(spans),
        f"{', '.join(f'{ratio:.2f}' for ratio in titan)} at 2, 4, 8 experts per token",
        f"{claim('train', 'train.step_over_deepspeed'):.2f}",
    ]


def test_the_share_of_communication_is_that_of_plain_expert_parallelism() -> None:
    """In the cases of README's table."""
    cases = [*(f"demo top {top_k}" for top_k in (2, 4, 8)), "demo beside DeepSpeed"]
    shares = [
        row["communication_share"]
        for row in result("train")["rows"]
        if row.get("case") in cases and row["system"] == "plain expert parallelism, torch's"
    ]
    assert len(shares) == 4
    least, most = min(shares), max(shares)
    told = f"communication takes {least:.0%} to {most:.0%} of a step of plain expert parallelism"
    assert told.replace("%", " %").replace(" % to", " to") in README
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"communication takes {least:.2f} to {most:.2f} of a step of plain expert" in page


def test_predictions_are_those_of_the_ledger() -> None:
    steps = [each for each in entries() if not each.fitted and each.kind == "steps"]
    errors = [each.error for each in steps]
    of_h100 = [each.error for each in steps if each.machine == "dgx-h100"]
    sentence = (
        f"{len(errors)} training steps are {statistics.median(errors):.0%} off in the median, "
        f"{max(errors):.0%} at worst (the {len(of_h100)} on H100 alone: "
        f"{statistics.median(of_h100):.0%}, {max(of_h100):.0%})"
    )
    assert sentence in README


def test_what_the_picture_shows_is_a_run() -> None:
    (picture,) = re.findall(r"^!\[.*\]\((.+)\)$", README, re.MULTILINE)
    assert ROOT / picture == page.PICTURE
    assert (ROOT / picture).stat().st_size < 300_000
