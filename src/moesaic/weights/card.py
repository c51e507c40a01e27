"""A model card for the hub (README.md): what a converted or exported model is, what it was made
from, how that was verified."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesaic import __version__
from moesaic.weights.layout import first_names

CARD = "README.md"
"""The model card's file, as the hub names it."""
KEPT = ("license: ", "license_name: ", "license_link: ")
"""Beginnings of the lines that the source's card hands on."""


def card(model_type: str, receipt: Mapping[str, Any], before: str = "") -> str:
    """Return a model card: the hub's metadata in YAML, and a table of what a receipt says.

    Args:
        model_type: the model's family in transformers.
        receipt: what `convert` or `export_run` returns.
        before: the source's model card, whose license stays; "" if it has none.
    """
    kept = []
    front_matter = re.match(r"---\n(.*?)\n---\n", before, re.DOTALL)
    if front_matter:
        kept = [line for line in front_matter[1].splitlines() if line.startswith(KEPT)]
    table = [f"| {name} | {value} |" for name, value in _rows(receipt).items()]
    metadata = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- moe",
        "- moesaic",
        *kept,
    ]
    use = [
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        "# or this folder's name on the hub",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        "```",
    ]
    title = f"# A Mixture-of-Experts model ({model_type})"
    return "\n".join(
        ["---", *metadata, "---", "", title, "", "| | |", "|---|---|", *table, "", *use, ""]
    )


def _rows(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table says, by the words of its first column."""
    made_from = receipt.get("source", {}).get("format")  # None of an exported run
    rows: dict[str, Any] = {"made by": f"Moesaic {__version__}"}
    if made_from:
        rows["made by"] += f", from a checkpoint in the format {made_from}"
    if "parameters" in receipt:
        rows["parameters"] = f"{receipt['parameters']:,}"
    if "tensors" in receipt:
        rows["tensors, bytes"] = f"{receipt['tensors']:,}, {receipt['bytes']:,}"
    if receipt.get("upcycled"):
        settings = receipt["upcycled"].items()
        rows["made sparse"] = ", ".join(f"{name} {value}" for name, value in settings)
    if receipt.get("left_behind"):
        rows["not converted"] = first_names(receipt["left_behind"])
    if receipt["logits"]:
        difference = receipt["logits"]["largest_difference"]
        rows["largest difference of logits to the source"] = difference
    if made_from:
        rows["verified"] = "every element, by the hashes in receipt.json: `moesaic convert verify`"
    return rows
