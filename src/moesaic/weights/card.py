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
    head = re.match(r"---\n(.*?)\n---\n", before, re.DOTALL)
    kept = [line for line in head[1].splitlines() if line.startswith(KEPT)] if head else []
    made_from = receipt.get("source", {}).get("format")
    rows = {
        "made by": f"Moesaic {__version__}"
        + (f", from a checkpoint in the format {made_from}" if made_from else ""),
        "parameters": f"{receipt['parameters']:,}" if "parameters" in receipt else None,
        "tensors, bytes": f"{receipt['tensors']:,}, {receipt['bytes']:,}"
        if "tensors" in receipt
        else None,
        "made sparse": ", ".join(
            f"{name} {value}" for name, value in (receipt.get("upcycled") or {}).items()
        ),
        "not converted": first_names(receipt["left_behind"])
        if receipt.get("left_behind")
        else None,
        "largest difference of logits to the source": (receipt["logits"] or {}).get(
            "largest_difference"
        ),
        "verified": "every element, by the hashes in receipt.json: `moesaic convert verify`"
        if made_from
        else None,
    }
    table = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
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
    ]
    use += ['model = AutoModelForCausalLM.from_pretrained(".")', "```"]
    title = f"# A Mixture-of-Experts model ({model_type})"
    return "\n".join(
        ["---", *metadata, "---", "", title, "", "| | |", "|---|---|", *table, "", *use, ""]
    )
