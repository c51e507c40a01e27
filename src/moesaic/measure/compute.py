"""Measures expert products by rows, copies and codecs in processor time while all ranks compute,
and a rank's memory.

Every function that takes a `barrier` is called by all ranks together, and the barrier releases them
at one moment. `repeats` is the number of timed repeats.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from moesaic.codecs import CODECS, is_coded
from moesaic.experts import EXPERTS
from moesaic.experts.experts import ExpertCall
from moesaic.kernels.codecs import AbstractCodec, codec_named, missing_codecs
from moesaic.measure.together import gathered
from moesaic.planner.cluster import CodecRate, Device, Tflops

ROWS = (1, 4, 16, 64, 256, 1024)
"""Rows per expert that are timed."""
DIM = 256
HIDDEN = 512
EXPERTS_HELD = 2
"""Sizes of the timed SwiGLU experts."""
COPIED_ROWS = 2048
"""Rows of width `DIM` that are permuted, for the rate of copies; a quarter of them is encoded."""
SPIN_SECONDS = 0.02
"""Seconds of processor time per repeat when the sharing of cores is measured: several time slices
of a scheduler."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def device(
    dtypes: tuple[str, ...], ranks_per_node: int, repeats: int, barrier: Callable[[], object]
) -> Device:
    """Measure a rank's products of experts, copies and codecs, while all ranks compute, and its
    share of the memory."""
    rates = {
        name: [_rate(rows, _DTYPES[name], repeats, barrier) for rows in ROWS] for name in dtypes
    }
    copied = copy_bytes_per_second(repeats, barrier)
    coded = codecs(repeats, barrier)
    # Rates per second of processor time, in units of 10^9, become rates per second of the clock.
    to_giga = 1e-9 / sharing(repeats, barrier)
    giga_per_tera = 1e3
    tflops = {name: max(by_rows) * to_giga / giga_per_tera for name, by_rows in rates.items()}
    by_rows_of_first = rates[dtypes[0]]  # by number of rows, in the first dtype
    codec_rates = [
        # what is encoded is decoded too: twice the rate of both together
        CodecRate(name=name, gigabytes_per_second=2 * rate * to_giga)
        for name, rate in coded.items()
    ]
    return Device(
        tflops=Tflops(**tflops),
        memory_gib=round(memory_gib(ranks_per_node), 2),
        memory_gigabytes_per_second=copied * to_giga,
        gemm_rows=tuple(map(float, ROWS)),
        gemm_share=tuple(rate / max(by_rows_of_first) for rate in by_rows_of_first),
        codecs=tuple(codec_rates),
    )


def sharing(repeats: int, barrier: Callable[[], object]) -> float:
    """Return wall-clock over processor time of a rank while all ranks compute: the mean over ranks,
    of the repeats the median, at least 1."""
    ratios = []
    for _ in range(repeats):
        barrier()
        start = time.monotonic()
        before = time.thread_time()
        while time.thread_time() - before < SPIN_SECONDS:
            sum(range(1000))  # any computation
        ratios.append((time.monotonic() - start) / (time.thread_time() - before))
    by_repeat = zip(*gathered(ratios))  # of each repeat, the ratios of all ranks
    means = [statistics.fmean(ratios_of_ranks) for ratios_of_ranks in by_repeat]
    return max(1.0, statistics.median(means))


def copy_bytes_per_second(repeats: int, barrier: Callable[[], object]) -> float:
    """Return the rate of permuting rows: bytes read plus bytes written per second of processor
    time."""
    rows = torch.ones(COPIED_ROWS, DIM)
    order = torch.randperm(COPIED_ROWS, generator=torch.Generator().manual_seed(0))
    return 2 * rows.nbytes / median_seconds(lambda: rows.index_select(0, order), repeats, barrier)


def codecs(repeats: int, barrier: Callable[[], object]) -> dict[str, float]:
    """Return, by codec that is installed, the bytes of rows that are encoded and decoded per second
    of processor time."""
    rows = torch.randn(COPIED_ROWS // 4, DIM, generator=torch.Generator().manual_seed(0))
    rates = {}
    missing = missing_codecs()
    for name in CODECS:
        if is_coded(name) and name not in missing:
            run = partial(_code, codec_named(name), rows)
            rates[name] = rows.nbytes / median_seconds(run, repeats, barrier)
    return rates


def _code(codec: AbstractCodec, rows: torch.Tensor) -> None:
    """Encode and decode rows."""
    codec.decode(codec.encode(rows), len(rows), rows.shape[1], rows.dtype)


def memory_gib(ranks_per_node: int) -> float:
    """Return a rank's share of this machine's memory, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / ranks_per_node


def median_seconds(
    function: Callable[[], object], repeats: int, barrier: Callable[[], object]
) -> float:
    """Return the median processor time of a function, mean over ranks. Short functions run several
    times per repeat."""
    function()  # the first call is slower
    start = time.thread_time()
    function()
    seconds = max(time.thread_time() - start, 1e-6)  # the clock may not have ticked
    num_calls = max(1, min(50, int(2e-3 / seconds)))  # about 2 ms per repeat, at most 50
    barrier()
    own_times = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(num_calls):
            function()
        own_times.append((time.thread_time() - start) / num_calls)
    return statistics.fmean(statistics.median(rank_times) for rank_times in gathered(own_times))


def _rate(rows: int, dtype: torch.dtype, repeats: int, barrier: Callable[[], object]) -> float:
    """Return the operations per second of an expert's step on a number of rows."""
    step, operations = expert_step(rows, dtype, (DIM, HIDDEN, EXPERTS_HELD))
    return operations / median_seconds(step, repeats, barrier)


def expert_step(
    rows: int, dtype: torch.dtype, sizes: tuple[int, int, int], device: str = "cpu"
) -> tuple[Callable[[], None], int]:
    """Return a function that runs SwiGLU experts forward and backward, and the operations of its
    products.

    Args:
        rows: rows of each expert.
        dtype: of rows and weights.
        sizes: width of a row, hidden width, number of experts.
    """
    dim, _, num_experts = sizes
    experts = EXPERTS["swiglu"](*sizes)
    sharded_names, _ = experts.names
    sharded = tuple(getattr(experts, name).detach().to(device, dtype) for name in sharded_names)
    # random, since products of constants slow a GPU's clock less
    tokens = torch.randn(rows * num_experts, dim, device=device).to(dtype)
    gates = torch.ones(rows * num_experts, device=device)
    ends = torch.arange(1, num_experts + 1, dtype=torch.int32, device=device) * rows
    call = ExpertCall(sharded, common=(), rows=tokens, gates=gates, ends=ends)

    def step() -> None:
        out, kept = experts.run(call)
        experts.gradients(call, kept, out)

    # A multiplication and an addition per row and weight, forward and twice backward. Each expert's
    # weights meet its own rows.
    num_weights = sum(weight.numel() for weight in sharded)
    return step, 3 * 2 * rows * num_weights
