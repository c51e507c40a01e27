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
from pathlib import Path
from typing import Any

from moesaic.cli.arguments import parse
from moesaic.cli.output import folded
from moesaic.cli.plan_search import JobOptions
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.finetune import (
    CODED,
    LOSS_TOKENS,
    WEIGHT_BYTES,
    FinetunePrediction,
    Method,
    predict_finetune,
)
from moesaic.planner.halves import without_chunks
from moesaic.planner.job import Job
from moesaic.planner.rank_memory import FRAGMENTED, GIB
from moesaic.program.plan import Plan, plan_in_words

MOST_TIMES = 16
"""Largest factor by which devices are multiplied, or sequences are shortened, to find what fits."""


@dataclass(frozen=True, kw_only=True)
class FinetuneChange:
    """The effect of one change, predicted again."""

    what: str
    """The change, in words."""
    speedup: float
    """Tokens per second after it over those before it, of the fastest split that fits."""
    bytes: float
    """Bytes of tensors on the fullest rank with expert parallelism after it."""
    fits: bool
    """Whether expert parallelism fits after it."""


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
            "command": _command(model, cluster, predicted, sizes),
            "changes": [asdict(change) for change in changes],
        }
        print(json.dumps(data, indent=2))
        return 0
    lines = _lines(model, cluster, predicted, changes, sizes)
    print(*map(folded, lines), sep="\n")
    return 0


def _lines(
    model: str,
    cluster: ClusterSpec,
    found: FinetunePrediction,
    changes: list[FinetuneChange],
    sizes: dict[str, Any],
) -> Iterator[str]:
    """Yield the lines of the answer: the memory, each split, the plan, the command and what would
    change most."""
    device = cluster.device.memory_gib
    yield (
        f"{model} on {cluster.name}: {sizes['method']}, adapters of rank {sizes['rank']}, "
        f"{sizes['tokens']:,} tokens in sequences of {sizes['length']:,} for each of "
        f"{sizes['ranks']} ranks, {sizes['accumulation']} micro-batches a step"
    )
    with_fragments = _reserved(found.bytes)
    yield (
        f"fullest rank, experts spread: {found.bytes / GIB:.1f} GiB, {with_fragments:.1f} with "
        f"fragments, of {device:g}"
    )
    yield "  " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.parts.items())

    yield "split over ranks                  tokens/s       GiB  limited by"
    for name, split in found.splits.items():
        mark = ""
        if name == found.fastest:
            mark = "; fastest"
        elif not split.fits:
            mark = "; does not fit"
        speed = f"{split.tokens_per_second:>12,.0f}{split.bytes / GIB:>10.1f}"
        yield f"  {name:<31} {speed}  {split.bottleneck}{mark}"

    if found.plan is not None and found.tokens_per_second is not None:
        low, high = found.interval or (0.0, 0.0)
        busiest_first = sorted(found.limits, key=lambda name: -found.limits[name])
        busy = ", ".join(f"{name} {found.limits[name]:.2f}" for name in busiest_first[:3])
        yield (
            f"experts spread: {low:,.0f} to {high:,.0f} tokens/s likely; seconds of a step: "
            f"{found.seconds:.2f}; busy: {busy}"
        )
        yield f"  plan: {plan_in_words(found.plan)}"

    where = "run"
    if cluster.nodes > 1:
        where += f" on each of {cluster.nodes} machines, HOST being the first one's name"
    yield f"{where}:"
    yield f"    {_command(model, cluster, found, sizes)}"
    yield "what would change most, each predicted again:"
    for change in changes[:6]:
        needs = f"{change.bytes / GIB:.1f} GiB with experts spread"
        if not change.fits:
            needs += ", does not fit"
        yield f"  {change.what}: {change.speedup:.2f} times the tokens/s; {needs}"


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

    flags = {}
    if cluster.nodes == 1:
        flags["ranks"] = sizes["ranks"]
    plan = found.plan or Plan()  # of experts that are spread over all ranks
    if best.in_flight != 1:
        flags["micro-batches-in-flight"] = best.in_flight
        plan = without_chunks(plan)
    if best.stages != 1:
        flags["pp"] = best.stages
    elif plan != Plan():
        flags["plan"] = "auto"  # the speed is of a plan that the default is not
    flags["method"] = sizes["method"]
    flags["rank"] = sizes["rank"]
    flags["length"] = sizes["length"]
    flags["micro-batch"] = sizes["tokens"] // sizes["length"]
    step_tokens = sizes["ranks"] * sizes["accumulation"] * sizes["tokens"]
    flags["batch"] = step_tokens // sizes["length"]
    words = [f"--{name} {value}" for name, value in flags.items()]
    return " ".join([f"{starts} finetune {shlex.quote(str(folder))} DATA", *words])


def _reserved(num_bytes: float) -> float:
    """Return the GiB that tensors take with the allocator's fragments."""
    return num_bytes * FRAGMENTED / GIB


def _changes(
    job: Job, cluster: ClusterSpec, found: FinetunePrediction, sizes: dict[str, Any]
) -> Iterator[FinetuneChange]:
    """Yield single changes of a fine-tune, each predicted again."""

    def change(
        what: str, other: ClusterSpec = cluster, *, of_experts: bool = False, **changed: Any
    ) -> FinetuneChange:
        """Return how a change speeds up the split with experts spread (`of_experts`), or the
        fastest one; `other` is the changed cluster, and `changed` are changed sizes. `splits` are
        by name: "experts" is that of experts spread over the ranks."""
        after = predict_finetune(job.model, cluster=other, **{**sizes, **changed})
        split_before = found.splits["experts" if of_experts else found.fastest]
        split_after = after.splits["experts" if of_experts else after.fastest]
        speedup = split_after.tokens_per_second / split_before.tokens_per_second
        return FinetuneChange(what=what, speedup=speedup, bytes=after.bytes, fits=bool(after.fits))

    tokens = sizes["tokens"]
    length = sizes["length"]
    if cluster.nodes > 1:
        yield change(
            "a second NIC per machine, experts spread",
            cluster.with_links("outside", 2.0),
            of_experts=True,
        )
    if cluster.devices_per_node > 1:
        yield change(
            "links inside machines twice as fast, experts spread",
            cluster.with_links("inside", 2.0),
            of_experts=True,
        )
    if cluster.world > 1:
        yield change("rows in fp8 on the wire, experts spread", of_experts=True, codecs=CODED)
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
    needs = f"needs {_reserved(found.bytes) + 1:.1f} GiB of {memory:g} on a device"
    changes = "; or ".join(fitting) or "no single change that was tried"
    return f"{needs}; smallest that fits: {changes}"
