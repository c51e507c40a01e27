"""`moesaic bench device`: one layer on one device, compared with its matrix products alone and with other people's layers.

Forward and backward with the input's gradient, one process, methods in turn. LB: the experts' matrix products alone,
per expert torch.mm(out=), and an in-place pass each for the activation and its derivative; 'router's products' are
its three products alone. Claims over LB: the whole layer, with router, top-k and load-balance loss, over the experts'
products, the worse of GELU and SwiGLU; over_lb_with_router has the router's products below the line too. Zipf: logits
-0.7 ln i plus unit normal noise. layer_over: our layer's time over that peer's; a peer far from the fastest has fewer
repeats. growth_bytes: peak of tensors alive beyond those before the call, new gradients included. kept_memory says
whether the allocator was told to keep what is freed, for all methods alike. Peers have SwiGLU experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moesaic.errors import InputError
from moesaic.kernels.memory import keep_freed_memory
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, keeping, kept, notes_of, require_positive
from moesaic_lab.claims import Claim
from moesaic_lab.device import run
from moesaic_lab.device.cases import DeviceCase
from moesaic_lab.device.cases import cases as all_cases
from moesaic_lab.device.run import LAYER

TARGETS = {"balanced": 1.10, "zipf": 1.15}
PEER_TARGET = 0.9
CASE = ("shape", "dtype", "activation", "routing", "kept_memory")
"""Keys of a row that identify its case."""
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(KeptOptions):
    """Options of the benchmark."""

    threads: int = 2
    """Number of torch's threads."""
    repeats: int = 20
    """Timed rounds of all methods per case."""
    only: str | None = None
    """Measure only the cases whose name has all of these words, e.g. "e32 bfloat16 swiglu zipf"; separate alternatives by
    commas, e.g. "e8 gelu,e32"."""
    peers: bool = True
    """Also measure the layers of others that are installed (transformers, deepspeed)."""
    keep_freed_memory: bool = True
    """Let the allocator keep freed memory, as a training program may; applies to all methods."""


def cases(options: DeviceOptions) -> list[DeviceCase]:
    """Return the cases that the options choose.

    Raises:
        InputError: `repeats` or `threads` is below 1, or `only` matches no case.
    """
    require_positive({"repeats": options.repeats, "threads": options.threads}, "--")
    alternatives = [set(words.split()) for words in (options.only or "").split(",")]
    chosen = [case for case in all_cases() if any(words <= _words(case) for words in alternatives)]
    if not chosen:
        raise InputError(
            f"--only {options.only!r} leaves no case: give words such as e8, e32, e64, float32, gelu, zipf"
        )
    return chosen


def measure(options: DeviceOptions, cases: list[DeviceCase], told: Told) -> list[dict[str, Any]]:
    """Measure the cases one after another and return their rows. An interrupted run with a folder `keep` loses one case."""
    is_kept = options.keep_freed_memory and keep_freed_memory()
    setting = {"threads": options.threads, "kept_memory": is_kept}
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with keeping(options.keep) as folder:
        for number, case in enumerate(cases, 1):
            if case.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                told(f"{number} of {len(cases)}  {case.name}: left out, this CPU has no instructions for bfloat16")
                continue  # without them the products take 70 times as long, and hide the rest of a layer
            told(f"{number} of {len(cases)}  {case.name}")
            name = "-".join(map(str, (case.name.replace(" ", "-"), options.repeats, *setting.values())))

            def measure_case(case: DeviceCase = case) -> list[dict[str, Any]]:
                return [row | setting for row in run.measure(case, options.repeats, options.peers).rows()]

            rows += kept(folder / f"{name}.json", measure_case)
    return rows


def _words(case: DeviceCase) -> set[str]:
    """Return the words by which `only` can choose a case."""
    return {*case.shape.name.split("_"), case.shape.name, case.dtype, case.activation, case.routed}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of the measured shapes. Claims measured with the system's default allocator have it in their name."""
    all_claims: list[Claim] = []
    for shape, is_kept in dict.fromkeys((row["shape"], row["kept_memory"]) for row in rows):
        of_shape = [row for row in rows if (row["shape"], row["kept_memory"]) == (shape, is_kept)]
        head = f"cpu.{shape}" if is_kept else f"cpu.default_allocator.{shape}"
        ours = [row for row in of_shape if row["method"] == LAYER]
        for dtype in dict.fromkeys(row["dtype"] for row in ours):
            for routed, target in TARGETS.items():
                ratios = [row["over_lb"] for row in ours if (row["dtype"], row["routing"]) == (dtype, routed)]
                if ratios:
                    name = f"{head}.{dtype}.{routed}_over_lb"
                    all_claims.append(Claim(name=name, value=max(ratios), target=target))
        all_claims.append(_over_peers(head, of_shape))
        all_claims.append(_memory(head, of_shape))
    return all_claims


def _over_peers(head: str, rows: Sequence[Row]) -> Claim:
    """Return the claim on the time of our whole layer over that of the fastest peer, the worst of all cases with a peer."""
    name = f"{head}.over_best_peer"
    best = [min(peers, key=lambda row: float(row["median_seconds"])) for peers in _peers(rows)]
    value = max((float(row["layer_over"]) for row in best), default=None)
    reason = "" if best else _why_absent(rows)
    return Claim(name=name, value=value, target=PEER_TARGET, reason=reason)


def _memory(head: str, rows: Sequence[Row]) -> Claim:
    """Return the claim on our layer's memory growth over the smallest growth of a peer, the worst of all cases."""
    name = f"{head}.memory_over_best_peer"
    ours = {_case(row): row["growth_bytes"] for row in rows if row["method"] == LAYER}
    ratios = [ours[_case(peers[0])] / min(row["growth_bytes"] for row in peers) for peers in _peers(rows)]
    reason = "" if ratios else _why_absent(rows)
    return Claim(name=name, value=max(ratios, default=None), target=1.0, reason=reason)


def _peers(rows: Sequence[Row]) -> list[list[Row]]:
    """Return one list per case of the rows of the peers that ran."""
    ran = [row for row in rows if "layer_over" in row]
    return [[row for row in ran if _case(row) == case] for case in dict.fromkeys(map(_case, ran))]


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in CASE)


def _why_absent(rows: Sequence[Row]) -> str:
    reasons = dict.fromkeys(row["reason"] for row in rows if "reason" in row)
    return "; ".join(reasons) or "peers were not asked for"


COLUMNS = (*CASE[:4], "method", "median_seconds", "over_lb", "over_lb_with_router", "layer_over", "growth_bytes")

BENCHMARK = Benchmark(
    name="device", description="Measure one MoE layer against its matrix products alone and against other people's layers.",
    options=DeviceOptions, notes=notes_of(__doc__), cases=cases, measure=measure, claims=claims,
    columns=(Shown(title="One layer, forward + backward", columns=COLUMNS, group_by=CASE),),
    packages=("torch", "numpy", "transformers", "deepspeed"),
)  # fmt: skip
