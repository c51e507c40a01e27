"""`moesaic convert SOURCE OUT --to FORMAT` converts a checkpoint or a run;
`moesaic convert verify OUT` checks the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line

if TYPE_CHECKING:
    from moesaic.weights.upcycle import Upcycling

LOGITS = {"auto": None, "yes": True, "no": False}
"""What each value of --logits means to `convert`."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `moesaic convert`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of a checkpoint, or of a run of moesaic train, which is exported as a Hugging Face
    model (--to hf)."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write; must be empty or not exist."""
    to: str
    """Target format: hf (safetensors with Hugging Face names), moesaic, torchtitan or megatron."""
    source_format: str | None = None
    """Format of the source, a name as for --to; None detects it."""
    config: str | None = None
    """The config.json of the model (transformers); needed if the source folder has none."""
    experts: int | None = None
    """Turn each feed-forward layer of a dense model into this many experts; None converts the model
    unchanged."""
    top_k: int = 2
    """With --experts: experts per token."""
    granularity: int = 1
    """With --experts: shards that a dense layer is cut into, each of which becomes an expert; 1
    copies the whole layer."""
    router_std: float = 0.02
    """With --experts: standard deviation of the random router weights."""
    seed: int = 0
    """With --experts: seed of the router weights."""
    logits: Literal["auto", "yes", "no"] = "auto"
    """Run the model before and after the conversion and compare logits; auto does so for models of
    at most 2 GiB."""
    json: bool = False
    """Print the receipt as JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `moesaic convert verify`."""

    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder that moesaic convert wrote."""
    json: bool = False
    """Print what was compared, as JSON."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments and arguments[0] == "verify":
        return _verify(arguments[1:])
    options = parse(
        ConvertOptions,
        arguments,
        prog="moesaic convert",
        description="Convert a checkpoint into another format, compare the result with the source, "
        "and write a receipt. moesaic convert verify OUT compares a converted folder "
        "with its receipt.",
    )
    from moesaic.weights.convert import convert
    from moesaic.weights.run import is_run

    upcycle = _upcycling(options)
    if is_run(Path(options.source)):
        if options.to != "hf" or upcycle is not None:
            raise InputError(
                f"{options.source}: a run can only be exported as a Hugging Face model: --to "
                "hf, no --experts"
            )
        return _export(options)
    receipt = convert(
        options.source,
        options.out,
        to=options.to,
        source_format=options.source_format,
        config=options.config,
        upcycle=upcycle,
        logits=LOGITS[options.logits],
    )
    lines = _receipt_lines(receipt, f"{options.out}/receipt.json")
    print(json.dumps(receipt) if options.json else "\n".join(map(in_one_line, lines)))
    return 0


def _upcycling(options: ConvertOptions) -> Upcycling | None:
    """Return how a dense model becomes a sparse one; None if it is converted unchanged.

    Raises:
        InputError: an option of --experts is given without it.
    """
    from moesaic.weights.upcycle import Upcycling

    names = ("top_k", "granularity", "router_std", "seed")
    values = {name: getattr(options, name) for name in names}
    defaults = {name: getattr(ConvertOptions, name) for name in names}
    if options.experts is not None:
        return Upcycling(num_experts=options.experts, **values)
    if values != defaults:
        raise InputError(
            "top-k, granularity, router-std and seed are of --experts: give the number of "
            "experts too"
        )
    return None


def _export(options: ConvertOptions) -> int:
    """Export a run as a Hugging Face model; returns the exit code."""
    from moesaic.weights.run import export_run

    summary = export_run(Path(options.source), Path(options.out), logits=LOGITS[options.logits])
    about_tokenizer = "without a tokenizer, since the run's .bin files name none"
    if summary["tokenizer"]:
        about_tokenizer = "with its tokenizer"
    lines = [
        f"{summary['model']}: {summary['parameters']:,} parameters in {options.out}; "
        f"{about_tokenizer}",
        *_logits_lines(summary["logits"]),
    ]
    print(json.dumps(summary) if options.json else "\n".join(map(in_one_line, lines)))
    return 0


def _receipt_lines(receipt: dict[str, Any], path: str) -> list[str]:
    """Return the lines that summarize a receipt; its experts are those of all layers together."""
    num_experts = 0
    for sums in receipt["sha256"]["weights"].values():
        if isinstance(sums, list):  # of the experts of a layer: one hash for each expert
            num_experts += len(sums)
    lines = [
        f"{receipt['model']}: {receipt['source']['format']} to {receipt['target']['format']}, "
        f"{receipt['tensors']} tensors, {receipt['bytes']:,} bytes, {num_experts} experts"
    ]
    for state, counts in receipt["moments"].items():
        lines.append(f"{state}: {counts['placed']} of {counts['in the source']} placed")
    left_behind = receipt["left_behind"]
    if left_behind:
        lines.append(f"entries not converted: {len(left_behind)}, for example {left_behind[0]}")
    return [*lines, *_logits_lines(receipt["logits"]), f"compared with the source; receipt: {path}"]


def _logits_lines(found: dict[str, Any] | None) -> list[str]:
    """Return the lines about the comparison of logits; none if there was no comparison."""
    if found is None:
        return []
    lines = [f"largest difference of logits: {found['largest_difference']:.3g}"]
    if found["not_finite"]:
        lines.append(
            f"{found['not_finite']} logits are not finite, neither before nor after: look for "
            "them in the source"
        )
    return lines


def _verify(arguments: Sequence[str]) -> int:
    """Run `moesaic convert verify`."""
    options = parse(
        VerifyOptions,
        arguments,
        prog="moesaic convert verify",
        description="Compare a folder that moesaic convert wrote with its receipt.",
    )
    from moesaic.weights.convert import verify

    verified = verify(options.out)
    optimizer_states = verified["states"][1:]  # the first one is "weights"
    states = ""
    if optimizer_states:
        states = f", and {', '.join(optimizer_states)} of an optimizer"
    line = (
        f"{options.out}: {verified['tensors']} entries and {verified['experts']} experts are what "
        f"the receipt says{states}"
    )
    print(json.dumps(verified) if options.json else in_one_line(line))
    return 0
