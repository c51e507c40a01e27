"""`moesaic plan finetune`: what fits, how fast each split of a model is, and which change would
help most.

A *split* is a way to use several ranks: experts spread over them, stages of layers, or copies. In
this file, `sizes` are the arguments of `predict_finetune` that say what is fine-tuned: ranks,
tokens per rank and micro-batch, tokens per sequence (`length`), method and rank of the adapters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moesaic.cli.arguments import parse
from moesaic.cli.output import folded
from moesaic.cli.plan_search import JobOptions
from moesaic.errors import InputError, counted
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.finetune import (
    CODED,
    IN_FLIGHT,
    LOSS_TOKENS,
    WEIGHT_BYTES,
    FinetunePrediction,
    Method,
    SplitPrediction,
    predict_finetune,
)
from moesaic.planner.halves import without_chunks
from moesaic.planner.hub import HubShape
from moesaic.planner.job import Job
from moesaic.planner.rank_memory import FRAGMENTED, GIB
from moesaic.program.plan import Plan, plan_in_words

MOST_TIMES = 16
"""Largest factor by which devices are multiplied, or sequences are shortened, to find what fits."""
ONE_AT_A_TIME = "layers, one rank at a time"
"""Name of the split that `moesaic finetune` has not."""


@dataclass(frozen=True, kw_only=True)
class FinetuneChange:
    """The effect of one change, predicted again."""

    what: str
    """The change, in words."""
    speedup: float
    """Tokens per second of the recommended split after it over those of the one before it."""
    split: str
    """Name of the recommended split after it."""
    bytes: float
    """Bytes of tensors on the fullest rank of that split."""
    fits: bool
    """Whether a device holds them."""


@dataclass(frozen=True, kw_only=True)
class PlanFinetuneOptions(JobOptions):
    """Options of `moesaic plan finetune`."""

    accumulation: int = 4
    """Micro-batches per optimizer step."""
    method: Method = "qlora"
    """Precision of the frozen experts: NF4 (qlora; qlora-double: with scales in eight bits) or 16
    bits (lora)."""
    rank: int = 16
    """Rank of the adapters."""
    json: bool = False
    """Print one JSON document."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        InputError: nothing fits; the message says what is missing and what fits.
    """
    options = parse(
        PlanFinetuneOptions,
        arguments,
        prog="moesaic plan finetune",
        description=(
            "Predict a fine-tune of adapters on a frozen Hugging Face model: what fits, how fast "
            "it is if ranks share experts or layers, and what would help."
        ),
    )
    cluster = options.simulator().cluster
    job = options.job(cluster)
    model = options.model
    length = job.model.seq_len
    ranks = cluster.world
    sizes: dict[str, Any] = {
        "ranks": ranks,
        "memory_bytes": None,  # those of the cluster's devices
        "tokens": max(job.batch_size // ranks, 1) * length,
        "length": length,
        "method": options.method,
        "rank": options.rank,
        "accumulation": options.accumulation,
        "logits": LOSS_TOKENS,  # tokens whose logits exist at once
        "projections": 4,  # linear layers of attention with adapters: q, k, v and o
    }

    predicted = predict_finetune(job.model, cluster=cluster, **sizes)
    if not any(split.fits for split in predicted.splits.values()):
        raise InputError(
            f"{model} on {cluster.name} does not fit: {_what_fits(job, cluster, predicted, sizes)}"
        )

    changes = sorted(_changes(job, cluster, predicted, sizes), key=lambda change: -change.speedup)
    if options.json:
        data = {
            "model": model,
            "cluster": cluster.name,
            **sizes,
            **asdict(predicted),
            "bytes": predicted.bytes,
            "fastest": predicted.fastest,
            "recommended": _best(predicted)[0],
            "command": _command(model, cluster, predicted, sizes),
            "changes": [asdict(change) for change in changes],
        }
        print(json.dumps(data, indent=2))
        return 0
    lines = _lines(model, cluster, predicted, changes, sizes)
    if isinstance(job.model, HubShape):
        lines = chain(_note_of_length(job.model, options), lines)
    print(*map(folded, lines), sep="\n")
    return 0


def _note_of_length(model: HubShape, options: PlanFinetuneOptions) -> Iterator[str]:
    """Yield a line if sequences are longer than those that the model was made for."""
    if model.positions is not None and model.seq_len > model.positions:
        whose = "the default" if options.seq_len is None else "--seq-len"
        yield (
            f"note: sequences of {model.seq_len:,} tokens ({whose}) are longer than the "
            f"{model.positions:,} that {options.model} was made for (max_position_embeddings): "
            f"give --seq-len {model.positions} or less"
        )


def _lines(
    model: str,
    cluster: ClusterSpec,
    found: FinetunePrediction,
    changes: list[FinetuneChange],
    sizes: dict[str, Any],
) -> Iterator[str]:
    """Yield the lines of the answer: each split, the recommended one, its command, and what would
    change most."""
    ranks = sizes["ranks"]
    yield (
        f"{model} on {cluster.name}: {sizes['method']}, adapters of rank {sizes['rank']}, "
        f"{sizes['tokens']:,} tokens in sequences of {sizes['length']:,} for each of "
        f"{counted(ranks, 'rank')}, {sizes['accumulation']} micro-batches a step"
    )
    yield from _table(found, ranks)
    yield from _lines_of_best(cluster, found, sizes)

    where = "run"
    if cluster.nodes > 1:
        where += f" on each of {cluster.nodes} machines, HOST being the first one's name"
    yield f"{where}:"
    yield f"    {_command(model, cluster, found, sizes)}"

    gains = [change for change in changes if change.speedup > 1.005]
    if not gains:
        return
    name, best = _best(found)
    yield (
        "what would change most, each predicted again, as tokens/s of what is recommended then "
        f"over the {best.tokens_per_second:,.0f} of {in_words(name, ranks)} now:"
    )
    for change in gains[:6]:
        needs = f"{in_words(change.split, ranks)}, {change.bytes / GIB:.1f} GiB"
        if not change.fits:
            needs += ", does not fit"
        yield f"  {change.what}: {change.speedup:.2f} times ({needs})"


def _table(found: FinetunePrediction, ranks: int) -> Iterator[str]:
    """Yield a table with a line for each split of the model, and what its names mean."""
    best_name, _ = _best(found)
    rows = []
    for name, split in found.splits.items():
        flags = " ".join(_words(_split_flags(split, found.plan))) or "none needed"
        mark = ""
        if split.stages is None:
            flags = "no flag runs it"
        if not split.fits:
            mark = "; does not fit"
        elif name == best_name and split.stages is not None:
            mark = "; recommended"
        speed = f"{split.tokens_per_second:>12,.0f}{split.bytes / GIB:>19.1f}"
        rows.append((in_words(name, ranks), flags, f"{speed}  {split.bottleneck}{mark}"))

    heads = ("split over ranks", "flags")
    wide, wide_flags = (max(len(row[at]) for row in [heads, *rows]) for at in (0, 1))
    columns = f"{'tokens/s':>12}{'fullest rank, GiB':>19}  limited by"
    yield f"{heads[0]:<{wide + 2}}  {heads[1]:<{wide_flags}}{columns}"
    for split_name, flags, figures in rows:
        yield f"  {split_name:<{wide}}  {flags:<{wide_flags}}{figures}"
    if ONE_AT_A_TIME in found.splits:
        yield (
            f"{in_words(ONE_AT_A_TIME, ranks)}: accelerate's device_map, under which the others "
            "wait; a comparison, moesaic finetune has no such split"
        )


def _lines_of_best(
    cluster: ClusterSpec, found: FinetunePrediction, sizes: dict[str, Any]
) -> Iterator[str]:
    """Yield what is known of the recommended split: speed, memory by part, and, if experts are
    spread over all ranks, the plan of their messages."""
    name, best = _best(found)
    says = "recommended" if best.stages is not None else "fits, but is for comparison only"
    low, high = best.interval or (0.0, 0.0)
    step_tokens = sizes["ranks"] * sizes["accumulation"] * sizes["tokens"]
    yield (
        f"{says}: {in_words(name, sizes['ranks'])}: {best.tokens_per_second:,.0f} tokens/s, "
        f"{low:,.0f} to {high:,.0f} likely; a step of {step_tokens:,} tokens takes "
        f"{step_tokens / best.tokens_per_second:.2f} s"
    )
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in best.parts.items())
    yield (
        f"  its fullest rank: {best.bytes / GIB:.1f} GiB, {_reserved(best.bytes):.1f} with "
        f"fragments, of {cluster.device.memory_gib:g}: {parts}"
    )
    is_spread = best.stages == 1 and sizes["ranks"] > 1
    if is_spread and found.plan is not None:
        plan = found.plan if best.in_flight == 1 else without_chunks(found.plan)
        yield f"  plan of the experts' messages: {plan_in_words(plan)}"
    if is_spread and best.in_flight == 1:
        busiest_first = sorted(found.limits, key=lambda limit: -found.limits[limit])
        busy = ", ".join(f"{limit} {found.limits[limit]:.2f}" for limit in busiest_first[:3])
        yield f"  seconds of a step in which each is busy: {busy}"


def _best(found: FinetunePrediction) -> tuple[str, SplitPrediction]:
    """Return the recommended split and its name; if `moesaic finetune` has none that fits, the
    fastest one."""
    for name, split in found.splits.items():
        if split is found.recommended:
            return name, split
    return found.fastest, found.splits[found.fastest]


def in_words(name: str, ranks: int) -> str:
    """Return what a split of a model over some ranks is called in print."""
    flying = ", halves in flight" if name.endswith(IN_FLIGHT) else ""
    split = name.removesuffix(IN_FLIGHT)
    words = {
        "experts": "experts spread" if ranks > 1 else "one rank",
        "layers, micro-batches": f"{ranks} stages of 1 rank",
        ONE_AT_A_TIME: "layers, one rank at a time",
    }
    return words.get(split, split) + flying


def _split_flags(split: SplitPrediction, spread_plan: Plan | None) -> dict[str, Any]:
    """Return the flags of `moesaic finetune` that choose a split, by name; `spread_plan` is that of
    experts that are spread over all ranks."""
    flags: dict[str, Any] = {}
    plan = spread_plan or Plan()
    if split.in_flight != 1:
        flags["micro-batches-in-flight"] = split.in_flight
        plan = without_chunks(plan)
    if split.stages != 1:
        flags["pp"] = split.stages
    elif plan != Plan():
        flags["plan"] = "auto"  # the speed is of a plan that the default is not
    return flags


def _words(flags: dict[str, Any]) -> list[str]:
    """Return flags as words of a command line."""
    return [f"--{name} {value}" for name, value in flags.items()]


def _command(
    model: str, cluster: ClusterSpec, found: FinetunePrediction, sizes: dict[str, Any]
) -> str:
    """Return the command of the fastest split that fits, of those that `moesaic finetune` has."""
    best = found.recommended
    if best is None:
        return "none of moesaic finetune's splits fits"
    path = Path(model)
    folder: Path | str = "MODEL"
    if path.is_dir():
        folder = path
    elif path.is_file():  # a config.json
        folder = path.parent

    starts = "moesaic"
    if cluster.nodes > 1:
        starts = (
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m moesaic"
        )

    flags: dict[str, Any] = {}
    if cluster.nodes == 1:
        flags["ranks"] = sizes["ranks"]
    flags |= _split_flags(best, found.plan)
    flags["method"] = sizes["method"]
    flags["rank"] = sizes["rank"]
    flags["length"] = sizes["length"]
    flags["micro-batch"] = sizes["tokens"] // sizes["length"]
    step_tokens = sizes["ranks"] * sizes["accumulation"] * sizes["tokens"]
    flags["batch"] = step_tokens // sizes["length"]
    return " ".join([f"{starts} finetune {shlex.quote(str(folder))} DATA", *_words(flags)])


def _reserved(num_bytes: float) -> float:
    """Return the GiB that tensors take with the allocator's fragments."""
    return num_bytes * FRAGMENTED / GIB


def _changes(
    job: Job, cluster: ClusterSpec, found: FinetunePrediction, sizes: dict[str, Any]
) -> Iterator[FinetuneChange]:
    """Yield single changes of a fine-tune, each predicted again."""

    _, before = _best(found)

    def change(what: str, other: ClusterSpec = cluster, **changed: Any) -> FinetuneChange:
        """Return how a change speeds up what is recommended; `other` is the changed cluster, and
        `changed` are changed sizes."""
        after = predict_finetune(job.model, cluster=other, **{**sizes, **changed})
        name, split = _best(after)
        return FinetuneChange(
            what=what,
            speedup=split.tokens_per_second / before.tokens_per_second,
            split=name,
            bytes=split.bytes,
            fits=split.fits,
        )

    tokens = sizes["tokens"]
    length = sizes["length"]
    if cluster.nodes > 1:
        yield change("a second NIC per machine", cluster.with_links("outside", 2.0))
    if cluster.devices_per_node > 1:
        yield change("links inside machines twice as fast", cluster.with_links("inside", 2.0))
    if cluster.world > 1 and before.stages == 1:  # stages have no other plan than the default
        yield change("rows in fp8 on the wire", codecs=CODED)
    yield change("twice the sequences in a micro-batch", tokens=2 * tokens)
    if tokens > length:
        sequences = tokens // length
        yield change("half the sequences in a micro-batch", tokens=sequences // 2 * length)
    elif length % 2 == 0:
        yield change("sequences of half the length", tokens=tokens // 2, length=length // 2)
    yield change("transformers' own loss, with the logits of all tokens at once", logits=None)


def _what_fits(
    job: Job, cluster: ClusterSpec, found: FinetunePrediction, sizes: dict[str, Any]
) -> str:
    """Return a clause with what is missing, and the smallest single changes after which experts
    spread over ranks fit."""
    memory = cluster.device.memory_gib

    def fits(**changed: Any) -> bool:
        """Return whether the fine-tune fits with some sizes changed."""
        limited = {**sizes, "memory_bytes": memory * GIB}
        return bool(predict_finetune(job.model, **{**limited, **changed}).fits)

    fitting = []
    factors = [2**power for power in range(1, MOST_TIMES.bit_length())]  # 2, 4, ... MOST_TIMES
    for factor in factors:
        ranks = cluster.world * factor
        if job.model.moe.num_experts % ranks == 0 and fits(ranks=ranks):
            fitting.append(f"{ranks} such devices")
            break
    for factor in factors:
        length = sizes["length"] // factor
        if length and fits(tokens=length, length=length):
            fitting.append(f"one sequence of {length:,} tokens")
            break
    own_bytes = WEIGHT_BYTES[sizes["method"]]
    for method, weight_bytes in WEIGHT_BYTES.items():
        if weight_bytes < own_bytes and fits(method=method):
            fitting.append(f"--method {method}")
            break
    # the framework itself uses 1 GiB
    needed = _reserved(found.bytes) + 1
    which = "with experts spread, it " if cluster.world > 1 else ""
    needs = f"{which}needs {needed:.1f} GiB of {memory:g} on a device"
    changes = "; or ".join(fitting) or "no single change that was tried"
    return f"{needs}; smallest that fits: {changes}"
