"""`moesaic bench`: measured comparisons with tables, claims and JSON, some with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from moesaic.errors import InputError, suggestion
from moesaic_lab.benchmark import Benchmark

BENCHMARKS = {
    "auto": ("auto", "the plan that plan=auto chooses against fixed plans, on emulated clusters"),
    "balance": (
        "balance.benchmark",
        "techniques against skewed routing, on an emulated cluster and simulated on larger ones",
    ),
    "chaos": ("chaos.benchmark", "training runs under a schedule of faults"),
    "check": ("check", "moesaic check, with claims"),
    "codec_convergence": (
        "codec_convergence",
        "perplexity under each codec, against a dense model; BLEU on a GPU",
    ),
    "codec_error": ("codec_error", "error and bytes of each codec"),
    "collectives": (
        "collectives",
        "start-up and rate of every collective in a profile, on emulated clusters",
    ),
    "comm": (
        "comm.benchmark",
        "all-to-alls on an emulated cluster, against the limit of its links",
    ),
    "device": (
        "device.benchmark",
        (
            "one layer on a CPU or a GPU: its operations, products and memory, and other "
            "libraries' layers"
        ),
    ),
    "extending": ("extending", "the promises of docs/extending.md, checked on the code"),
    "front": ("front", "README from its first line on, in an empty environment"),
    "fuzz": ("fuzz.benchmark", "every reader and every command line on odd inputs"),
    "gates_loss": ("gates_loss", "losses and step times of the demo model under five gates"),
    "certificates": (
        "certificates",
        "expert parallelism of several libraries against dense experts",
    ),
    "headlines": ("headlines", "the main result of each of the five papers, on emulated clusters"),
    "hf": ("hf", "Moesaic inside transformers, against transformers' own loop over experts"),
    "house": (
        "house",
        "tokens, assignments, calls, functions, imports, the path from the layer to the transport",
    ),
    "layer": (
        "layer.benchmark",
        "schedules, adaptive r, pipelining, codecs and task orders on an emulated cluster",
    ),
    "ledger": ("ledger.page", "published measurements against the models of time and memory"),
    "local_copies": ("local_copies", "rows that plans move inside a device, per token"),
    "model": (
        "model.benchmark",
        "predicted against measured times of layers, on an emulated cluster",
    ),
    "tiny": ("tiny", "tiny models of every kind against their dense twins"),
    "moe_vs_dense": (
        "moe_vs_dense",
        "the demo against a dense model with as many operations per token",
    ),
    "netmoe": (
        "netmoe.benchmark",
        "samples that move to their experts, simulated and on emulated clusters",
    ),
    "operators": (
        "operators",
        "what a call of a layer costs the host and keeps, besides its experts' products",
    ),
    "pays": (
        "pays",
        (
            "where each technique of the five papers pays, simulated over tokens, links, width "
            "and skew"
        ),
    ),
    "placement_cases": ("placement_cases", "sample placement against a dense loop, in float64"),
    "placement_gaps": (
        "placement_gaps",
        "placements of samples and experts against the optimal ones",
    ),
    "relocate_train": (
        "relocate_train",
        "training steps under every technique against skewed routing",
    ),
    "schedules": ("schedules", "bytes of every schedule and all-to-all, against formulas"),
    "simulator": ("simulator", "run time of the simulator"),
    "small": ("small", "splits of a frozen model over small cards, on emulated clusters"),
    "soak": ("soak", "memory, file descriptors and threads of a long run that changes plans"),
    "step": ("step.benchmark", "the whole step by split of the ranks, on emulated clusters"),
    "train": (
        "train.benchmark",
        "training steps of the demo model on an emulated cluster, against other systems",
    ),
    "vision_sweeps": (
        "vision.sweeps",
        "balance loss, inference capacity and admission of a vision model",
    ),
}
"""By name: the module with the `BENCHMARK`, and a summary for --help."""
OTHERS = {
    "paper-train": (
        "paper_train.command:run",
        "training of the papers' encoders and encoder-decoders; see moesaic train",
    ),
    "paper-sample": (
        "paper_train.command:sample",
        "a translation by an encoder-decoder that paper-train trained",
    ),
    "trace": (
        "traces.command:run",
        "synthetic routing traces, and readers of LAER-MoE's and SmartMoE's recordings",
    ),
}
"""By name: the module and its function from arguments to an exit code, and a summary for --help."""


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        summaries = {name: summary for name, (_, summary) in (BENCHMARKS | OTHERS).items()}
        lines = [f"  {name:<18} {summary}" for name, summary in sorted(summaries.items())]
        usage = [
            "usage: moesaic bench WHAT ...",
            "",
            *lines,
            "",
            "moesaic bench WHAT --help lists its options.",
        ]
        print("\n".join(usage))
        return 0

    name = words[0]
    options = words[1:]
    if name in OTHERS:
        place, _ = OTHERS[name]
        module, _, function = place.partition(":")
        code: int = getattr(import_module(f"moesaic_lab.{module}"), function)(options)
        return code
    if name not in BENCHMARKS:
        raise InputError(f"unknown benchmark {name}{suggestion(name, [*BENCHMARKS, *OTHERS])}")
    return benchmark_named(name).run(options)


def benchmark_named(name: str) -> Benchmark[Any, Any, Any]:
    """Import a benchmark's module and return the benchmark."""
    benchmark: Benchmark[Any, Any, Any] = import_module(
        f"moesaic_lab.{BENCHMARKS[name][0]}"
    ).BENCHMARK
    return benchmark
