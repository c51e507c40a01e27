"""`moesaic bench`: measured comparisons with tables, claims and JSON, some with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic_lab.benchmark import Benchmark

BENCHMARKS = {
    "auto": ("auto", "what plan=auto ends on, beside fixed plans, on an emulated cluster"),
    "balance": ("balance.benchmark", "answers to skewed routing on an emulated cluster, and simulated on larger ones"),
    "chaos": ("chaos.benchmark", "runs under a schedule of faults"),
    "check": ("check", "moesaic check, with claims"),
    "codec_convergence": ("codec_convergence", "BLEU and perplexity under each codec, beside a dense model"),
    "codec_error": ("codec_error", "error and bytes of each codec"),
    "collectives": (
        "collectives",
        "start-up and rate of every collective, as a profile has them, on emulated clusters",
    ),
    "comm": ("comm.benchmark", "all-to-alls on an emulated cluster, beside the limit of its links"),
    "convert": ("convert", "checkpoints between formats: bytes that differ, and memory"),
    "device": ("device.benchmark", "one layer on one device, beside its matrix products and other people's layers"),
    "extending": ("extending", "what docs/extending.md promises, held against the code"),
    "fuzz": ("fuzz.benchmark", "every reader and every command line on odd inputs"),
    "gates_loss": ("gates_loss", "losses and step times of the demo model under five gates"),
    "certificates": ("certificates", "everybody's expert parallelism beside dense experts"),
    "headlines": ("headlines", "the headline of each of the five papers, on emulated clusters"),
    "hf": ("hf", "Moesaic inside transformers, beside its own loop over experts"),
    "house": ("house", "lines, files, the path from the layer to the transport, import cycles"),
    "kernels": ("kernels.benchmark", "each operation of a layer beside the plain way and beside the roofline"),
    "layer": ("layer.benchmark", "schedules, adaptive r, pipelining, codecs, orders on an emulated cluster"),
    "ledger": ("ledger.page", "what others measured beside what the models of time and memory say"),
    "layer_memory": ("kernels.memory", "memory of one layer, beside the formula and Tutel's"),
    "model": ("model.benchmark", "predicted times of layers beside measured ones, on an emulated cluster"),
    "tiny": ("tiny", "the tiny models of every kind beside their dense twins"),
    "moe_vs_dense": ("moe_vs_dense", "the demo beside a dense model of as many operations per token"),
    "netmoe": ("netmoe.benchmark", "samples that move to their experts, simulated and on emulated clusters"),
    "placement_cases": ("placement_cases", "samples that change home beside a dense loop, in float64"),
    "placement_gaps": ("placement_gaps", "placements of samples and experts beside the best ones"),
    "plan_table": ("plan_table_replay", "the plan table that was told wrong loads, on recorded routing"),
    "relocate_train": ("relocate_train", "training steps under every answer to skewed routing"),
    "same_curves": ("same_curves", "the same training on every mesh and plan"),
    "schedules": ("schedules", "bytes of every schedule and all-to-all, beside formulas"),
    "simulator": ("simulator", "how long the simulator takes"),
    "soak": ("soak", "memory, descriptors and threads of a long run whose plans change"),
    "stages": ("stages", "training in pipeline stages, beside one process"),
    "train": ("train.benchmark", "the demo model end to end on an emulated cluster, beside others"),
    "vision_sweeps": ("vision.sweeps", "balance loss, inference capacity and admission of a vision model"),
}
"""By name: the module with the `BENCHMARK`, and a summary for --help."""
GPU = "every figure of one GPU in nine minutes, one process a step; --dry without a GPU"


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()} | {"gpu": GPU}
        lines = [f"  {name:<18} {summary}" for name, summary in sorted(summaries.items())]
        usage = ["usage: moesaic bench WHAT ...", "", *lines, "", "moesaic bench WHAT --help tells what it takes."]
        print("\n".join(usage))
        return 0
    if words[0] == "gpu":  # this command needs only torch
        from moesaic_lab.gpu.command import main

        return main(words[1:])
    if words[0] not in BENCHMARKS:
        raise InputError(f"unknown benchmark {words[0]}{suggestion(words[0], list(BENCHMARKS))}")
    return benchmark_named(words[0]).run(words[1:])


def benchmark_named(name: str) -> Benchmark[Any, Any, Any]:
    """Import a benchmark's module and return the benchmark."""
    found: Benchmark[Any, Any, Any] = import_module(f"moesaic_lab.{BENCHMARKS[name][0]}").BENCHMARK
    return found
