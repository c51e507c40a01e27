"""Fit every constant to its cells: functions that reproduce the committed values.

A fit reads no cells except those that its constants name. A cell is a published figure; a constant
is a number that no paper prints and that is chosen so that simulated figures equal published ones.
Several fits search over the logarithms of constants, which are above 0 and differ in magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, least_squares, minimize_scalar

from moesaic_lab.reproduce import fastermoe, netmoe, schemoe, tutel
from moesaic_lab.reproduce.parm import Testbed, mean_speedup, shares
from moesaic_lab.reproduce.records import Book

LAUNCH_US = 8.0
"""Microseconds that the issuing thread spends per task, where nothing more is known."""


Fitted = float | tuple[float, ...]
"""Value or values of the constants that are fitted together."""


class Named:
    """Access to the published figures of those cells that the constants being fitted name, and to
    no others.

    Args:
        book: all cells and constants.
        constants: names of the constants that are fitted together.
    """

    def __init__(self, book: Book, *constants: str) -> None:
        self.book = book
        self.constants = constants
        self._cells = {cell for name in constants for cell in book.constants[name].cells}

    def __getitem__(self, name: str) -> float:
        """Return a published figure."""
        assert name in self._cells, f"{name} is not among the cells of the constants"
        return self.book.value(name)


def refit(book: Book, names: tuple[str, ...] | None = None) -> Book:
    """Return the book with its constants fitted again, in the order of `FITS`; each fit uses the
    results of those before it.

    Args:
        book: the cells, and the values of constants that are not fitted.
        names: names of the constants to fit; None for all.
    """
    for together, fit in FITS.items():
        if names is None or set(together) & set(names):
            fitted = fit(book, Named(book, *together))
            values = fitted if isinstance(fitted, tuple) else (fitted,)
            book = book.with_values(dict(zip(together, values)))
    return book


def _parm_tflops(book: Book, cells: Named) -> float:
    """Fit the rate of a GPU, in TFLOP/s, to the smallest and largest share of communication."""

    def error(rate: float) -> float:
        bed = Testbed(book.with_values({"parm.b.tflops": rate}), "b")
        cell_shares = [shares(bed.cell(32, 2, s, ("baseline",))) for s in (2, 4)]
        least = min(smallest for smallest, _ in cell_shares)
        most = max(largest for _, largest in cell_shares)
        return _squared(least, cells["parm.share.least"]) + _squared(most, cells["parm.share.most"])

    fit = minimize_scalar(error, bounds=(5.0, 20.0), method="bounded", options={"xatol": 1e-3})
    return float(fit.x)


def _parm_top_k(book: Book, cells: Named) -> float:
    """Choose the experts per token that fit the speed-ups best."""

    def error(top_k: int) -> float:
        tried = book.with_values({"parm.top_k": float(top_k)})
        tflops = _parm_tflops(tried, Named(tried, "parm.b.tflops"))
        tried = tried.with_values({"parm.b.tflops": tflops})
        errors = []
        for name in ("a", "b"):
            bed = Testbed(tried, name)
            for size in (2, 4):  # m and s, which are equal in these cells
                speedup = mean_speedup(bed.cell(8, size, size, ("baseline", "s1")), "s1")
                errors.append(_squared(speedup, cells[f"parm.s1.{name}8.m{size}s{size}"]))
        return sum(errors)

    return float(min((1, 2), key=error))


def _schemoe_nic(book: Book, cells: Named) -> float:
    """Fit the rate of a node's link, in Gbit/s, to an all-to-all: 12 layers with four each."""
    # the rows of a node's four GPUs, without those for its own 4 of 32 GPUs
    leaving_bytes = 4 * _row_bytes() * (32 - 4) / 32
    return leaving_bytes * 8 / (cells["schemoe.a2a.12"] * 1e-3 / (4 * 12)) / 1e9


def _schemoe_turn(book: Book, cells: Named) -> float:
    """Fit the rate of messages in turn, in Gbit/s, to an all-to-all.

    A GPU sends 31 messages one after another: 3 inside its node and 28 to other nodes.
    """
    message_bytes = _row_bytes() / 32
    inside_rate = book.constant("parm.b.link") * 1e9 / 8  # bytes per second
    one_exchange = cells["schemoe.a2a.12"] * 1e-3 / (4 * 12)
    seconds = one_exchange - 3 * message_bytes / inside_rate - 109e-6  # 109 us: a NIC's latency
    return 28 * message_bytes / seconds * 8 / 1e9


def _row_bytes() -> float:
    """Return the bytes of a GPU's rows."""
    return schemoe.CT_MOE.tokens * schemoe.CT_MOE.dim * 4


def _ablation(plan: str) -> Callable[[Book], float]:
    """Return a function that computes the milliseconds of the ablation's layer under a plan."""
    return lambda book: 1e3 * schemoe.ScheMoECluster(book).seconds(plan, schemoe.ABLATION)


def _schemoe_rest(book: Book, cells: Named) -> tuple[float, float]:
    """Fit the milliseconds beside the MoE layer, per layer and per step, to steps of 12 and of 16
    layers."""
    moe = 1e3 * schemoe.ScheMoECluster(book).seconds("naive", schemoe.CT_MOE)
    shallow = cells["schemoe.step.tutel.12"]
    deep = cells["schemoe.step.tutel.16"]
    rest_per_layer = (deep - shallow) / 4 - moe
    rest_per_step = shallow - 12 * (moe + rest_per_layer)
    return rest_per_layer, rest_per_step


def _tutel_network(book: Book, cells: Named) -> tuple[float, ...]:
    """Fit four constants to four figures at once.

    The constants are the NIC's rate, its fall with the number of nodes, the start-up per message,
    and the efficiency of products that experts do message by message. The issuing thread's time and
    the rate of one connection are fitted later. Here, the issuing thread takes `LAUNCH_US` per
    task.
    """
    book = book.with_values({"tutel.issue": LAUNCH_US})
    names = ("tutel.nic", "tutel.fabric", "tutel.message", "tutel.batched")

    def errors(logs: np.ndarray) -> list[float]:
        bed = _tutel_bed(book, names, logs)
        parts = tutel.breakdown(bed, 2048)
        _, moving_16 = bed.parts_ms(tutel.big(16))
        _, moving_256 = bed.parts_ms(tutel.big(256))
        ours = {
            "tutel.a2a.16": moving_16,
            "tutel.a2a.256": moving_256,
            "tutel.hier2d.2048": parts.kernels / parts.hier2d,
            "tutel.flexible.2048": parts.hier2d / parts.flexible,
        }
        return [math.log(value / cells[name]) for name, value in ours.items()]

    start = np.log([90.0, 0.1, 30.0, 0.2])
    return tuple(np.exp(least_squares(errors, start, diff_step=1e-4, xtol=1e-8).x).tolist())


def _tutel_pipelining(book: Book, cells: Named) -> tuple[float, ...]:
    """Fit the rate of one connection and the issuing thread's time to two means over the layers on
    16 GPUs at once."""
    names = ("tutel.connection", "tutel.issue")

    def errors(logs: np.ndarray) -> list[float]:
        bed = _tutel_bed(book, names, logs)
        ours = tutel.gains([bed.by_plan(layer) for layer in tutel.sweep(16)])
        # gains in per cent as ratios of speeds
        return [
            math.log((100 + ours[name]) / (100 + cells[f"tutel.pipelining.{name}.16"]))
            for name in ("hier2d1", "worst")
        ]

    fit = least_squares(errors, np.log([50.0, 200.0]), diff_step=1e-3, xtol=1e-5, ftol=1e-7)
    return tuple(np.exp(fit.x).tolist())


def _tutel_bed(book: Book, names: tuple[str, ...], logs: np.ndarray) -> tutel.TutelCluster:
    """Return the cluster with other values of some constants, given by their logarithms."""
    values = np.exp(logs).tolist()
    constants = dict(zip(names, values))
    return tutel.TutelCluster(book.with_values(constants))


def _tutel_swin(name: str) -> Callable[[Book, Named], float]:
    """Return a function that fits the rate of the dense layers, in TFLOP/s, to the images per
    second of training or inference."""

    def rate(book: Book, cells: Named) -> float:
        flops = tutel.swin_dense_flops(name)
        _, moe_seconds = tutel.swin_seconds(tutel.TutelCluster(book), 8, name)
        batch_seconds = tutel.SWIN_BATCH / cells[f"tutel.swin.{name}.tutel.8"]
        return flops / (batch_seconds - moe_seconds) / 1e12

    return rate


def _netmoe_computing(book: Book, cells: Named) -> tuple[float, float]:
    """Fit the rate of computation, in TFLOP/s, and the milliseconds of launches, which do not
    depend on the number of samples."""
    few = cells["netmoe.compute.2"]
    many = cells["netmoe.compute.16"]

    def growth(tried: Book) -> float:
        bed = netmoe.NetMoECluster(tried)
        _, many_ms = bed.table4_ms(16)
        _, few_ms = bed.table4_ms(2)
        return many_ms - few_ms

    rate = _solve(book, "netmoe.tflops", (10.0, 312.0), growth, many - few)
    bed = netmoe.NetMoECluster(book.with_values({"netmoe.tflops": rate, "netmoe.launch": 0.0}))
    _, few_ms = bed.table4_ms(2)
    return rate, few - few_ms


def _netmoe_concentration(book: Book, cells: Named) -> float:
    """Fit the concentration of samples to the bytes saved."""

    def error(log: float) -> float:
        change = 100 * (netmoe.placed(16, math.exp(log)).inter - 1)
        return change - cells["netmoe.change.16.S"]

    return math.exp(float(brentq(error, math.log(0.2), math.log(200.0), xtol=1e-4)))


def _solve(
    book: Book,
    name: str,
    bounds: tuple[float, float],
    simulate: Callable[[Book], float],
    target: float,
) -> float:
    """Return the value of a constant at which a simulated figure equals `target`, or the nearest
    bound if there is none."""

    def error(value: float) -> float:
        return simulate(book.with_values({name: value})) - target

    low, high = bounds
    error_at_low = error(low)
    error_at_high = error(high)
    if error_at_low * error_at_high > 0:  # no value between them solves it
        return low if abs(error_at_low) < abs(error_at_high) else high
    return float(brentq(error, low, high, rtol=1e-4))


def _solved(
    cell: str, bounds: tuple[float, float], simulate: Callable[[Book], float]
) -> Callable[[Book, Named], Fitted]:
    """Return a function that fits one constant to one figure."""

    def fit(book: Book, cells: Named) -> float:
        (name,) = cells.constants
        return _solve(book, name, bounds, simulate, cells[cell])

    return fit


def _kernels_gain(book: Book) -> float:
    """Return the gain of Tutel's kernels over Fairseq's."""
    parts = tutel.breakdown(tutel.TutelCluster(book), 16)
    return parts.fairseq / parts.kernels


def _shadow_gain(book: Book) -> float:
    """Return the gain of shadowing."""
    return fastermoe.shadow_gain(fastermoe.FasterMoEBed(fastermoe.GPT), fastermoe.skew_of(book))


def _squared(ours: float, theirs: float) -> float:
    """Return the squared logarithm of a ratio."""
    return math.log(ours / theirs) ** 2


FITS: dict[tuple[str, ...], Callable[[Book, Named], Fitted]] = {
    ("schemoe.nic",): _schemoe_nic,
    # Half of the output of an all-gather over two ranks crosses a link: 0.5 * 4 bytes over the time
    # per element.
    ("parm.a.link",): lambda book, cells: 0.5 * 4 * 8 / cells["parm.all_gather.element.a"],
    ("parm.a.message",): lambda book, cells: cells["parm.all_gather.startup.a"],
    ("parm.b.link",): lambda book, cells: 0.5 * 4 * 8 / cells["parm.all_gather.element.b"],
    ("parm.b.message",): lambda book, cells: cells["parm.all_gather.startup.b"],
    ("parm.top_k",): _parm_top_k,
    ("parm.b.tflops",): _parm_tflops,
    ("schemoe.turn",): _schemoe_turn,
    ("tutel.tflops",): _solved(
        "tutel.compute.16",
        (10.0, 312.0),
        lambda book: tutel.TutelCluster(book).parts_ms(tutel.big(16))[0],
    ),
    ("tutel.nic", "tutel.fabric", "tutel.message", "tutel.batched"): _tutel_network,
    ("tutel.connection", "tutel.issue"): _tutel_pipelining,
    ("schemoe.tflops",): _solved("schemoe.ablation.naive", (2.0, 200.0), _ablation("naive")),
    ("schemoe.codec",): _solved("schemoe.ablation.zfp", (1.0, 10_000.0), _ablation("zfp")),
    ("schemoe.rest.layer", "schemoe.rest.fixed"): _schemoe_rest,
    ("tutel.einsum",): _solved("tutel.kernels.16", (10.0, 312.0), _kernels_gain),
    ("tutel.swin.train",): _tutel_swin("train"),
    ("tutel.swin.infer",): _tutel_swin("infer"),
    ("netmoe.nic",): _solved(
        "netmoe.scatter.16",
        (10.0, 1000.0),
        lambda book: netmoe.NetMoECluster(book).table4_ms(16)[0],
    ),
    ("netmoe.tflops", "netmoe.launch"): _netmoe_computing,
    ("netmoe.concentration",): _netmoe_concentration,
    ("fastermoe.skew",): _solved("fastermoe.shadow.johnny", (0.3, 2.0), _shadow_gain),
}
"""Fit functions by the names of the constants that they fit together, in the order in which they
run."""
