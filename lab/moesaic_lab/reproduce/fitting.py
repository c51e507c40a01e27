"""How every constant follows from its cells: functions that find the committed values again.

Nothing here reads a cell that the constant does not name.
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
"""Microseconds of the issuing thread per task where nothing else is known of it."""


class Named:
    """A book in which only the cells of one constant can be read, and those that other constants were already made of.

    Args:
        book: of all.
        constants: that are being fitted, together.
    """

    def __init__(self, book: Book, *constants: str) -> None:
        self.book = book
        self._cells = {cell for name in constants for cell in book.constants[name].cells}

    def __getitem__(self, name: str) -> float:
        """Return a figure of the paper."""
        assert name in self._cells, f"{name} is not among the cells of the constants"
        return self.book.value(name)


def refit(book: Book, names: tuple[str, ...] | None = None) -> Book:
    """Return the book with its constants found anew, in order, each by those before it.

    Args:
        book: whose cells, and whose values for constants that are left out.
        names: which constants; None for all.
    """
    for together, fit in FITS.items():
        if names is None or set(together) & set(names):
            found = fit(book, Named(book, *together))
            values = found if isinstance(found, tuple) else (found,)
            book = book.with_values(dict(zip(together, values)))
    return book


def _parm_link(testbed: str) -> Callable[[Book, Named], float]:
    return lambda book, cells: 0.5 * 4 * 8 / cells[f"parm.all_gather.element.{testbed}"]


def _parm_message(testbed: str) -> Callable[[Book, Named], float]:
    return lambda book, cells: cells[f"parm.all_gather.startup.{testbed}"]


def _parm_tflops(book: Book, cells: Named) -> float:
    def error(rate: float) -> float:
        bed = Testbed(book.with_values({"parm.b.tflops": rate}), "b")
        found = [shares(bed.cell(32, 2, s, ("baseline",))) for s in (2, 4)]
        least, most = min(each[0] for each in found), max(each[1] for each in found)
        return _squared(least, cells["parm.share.least"]) + _squared(most, cells["parm.share.most"])

    return float(minimize_scalar(error, bounds=(5.0, 20.0), method="bounded", options={"xatol": 1e-3}).x)


def _parm_top_k(book: Book, cells: Named) -> float:
    def error(top_k: int) -> float:
        tried = book.with_values({"parm.top_k": float(top_k)})
        tried = tried.with_values({"parm.b.tflops": _parm_tflops(tried, Named(tried, "parm.b.tflops"))})
        beds = {name: Testbed(tried, name) for name in ("a", "b")}
        return sum(
            _squared(
                mean_speedup(beds[name].cell(8, m, m, ("baseline", "s1")), "s1"), cells[f"parm.s1.{name}8.m{m}s{m}"]
            )
            for name in ("a", "b")
            for m in (2, 4)
        )

    return float(min((1, 2), key=error))


def _schemoe_nic(book: Book, cells: Named) -> float:
    leaves = 4 * _row_bytes() * (32 - 4) / 32
    return leaves * 8 / (cells["schemoe.a2a.12"] * 1e-3 / (4 * 12)) / 1e9


def _schemoe_turn(book: Book, cells: Named) -> float:
    message, inside = _row_bytes() / 32, book.constant("parm.b.link") * 1e9 / 8
    left = cells["schemoe.a2a.12"] * 1e-3 / (4 * 12) - 3 * message / inside - 109e-6
    return 28 * message / left * 8 / 1e9


def _row_bytes() -> float:
    return schemoe.CT_MOE.tokens * schemoe.CT_MOE.dim * 4


def _schemoe_tflops(book: Book, cells: Named) -> float:
    return _solve(book, "schemoe.tflops", (2.0, 200.0), _ablation("naive"), cells["schemoe.ablation.naive"])


def _schemoe_codec(book: Book, cells: Named) -> float:
    return _solve(book, "schemoe.codec", (1.0, 10_000.0), _ablation("zfp"), cells["schemoe.ablation.zfp"])


def _ablation(plan: str) -> Callable[[Book], float]:
    return lambda book: 1e3 * schemoe.ScheMoECluster(book).seconds(plan, schemoe.ABLATION)


def _schemoe_rest(book: Book, cells: Named) -> tuple[float, float]:
    layer = 1e3 * schemoe.ScheMoECluster(book).seconds("naive", schemoe.CT_MOE)
    shallow, deep = cells["schemoe.step.tutel.12"], cells["schemoe.step.tutel.16"]
    each = (deep - shallow) / 4 - layer
    return each, shallow - 12 * (layer + each)


def _schemoe_issue(book: Book, cells: Named) -> float:
    def step(tried: Book) -> float:
        return schemoe.ScheMoECluster(tried).step_ms("schedule", 12)

    return _solve(book, "schemoe.issue", (1.0, 2000.0), step, cells["schemoe.step.schemoe.12"])


def _tutel_tflops(book: Book, cells: Named) -> float:
    def computing(tried: Book) -> float:
        return tutel.TutelCluster(tried).parts_ms(tutel.big(16))[0]

    return _solve(book, "tutel.tflops", (10.0, 312.0), computing, cells["tutel.compute.16"])


def _tutel_network(book: Book, cells: Named) -> tuple[float, ...]:
    """Rate, its fall, start-up per message and the experts' products message by message, from four figures at once.

    What the issuing thread takes and the rate of one connection are found after these; here it takes what a launch does.
    """
    book = book.with_values({"tutel.issue": LAUNCH_US})
    names = ("tutel.nic", "tutel.fabric", "tutel.message", "tutel.batched")

    def errors(logs: np.ndarray) -> list[float]:
        bed = tutel.TutelCluster(book.with_values(dict(zip(names, np.exp(logs).tolist()))))
        parts = tutel.breakdown(bed, 2048)
        ours = {
            "tutel.a2a.16": bed.parts_ms(tutel.big(16))[1],
            "tutel.a2a.256": bed.parts_ms(tutel.big(256))[1],
            "tutel.hier2d.2048": parts.kernels / parts.hier2d,
            "tutel.flexible.2048": parts.hier2d / parts.flexible,
        }
        return [math.log(value / cells[name]) for name, value in ours.items()]

    start = np.log([90.0, 0.1, 30.0, 0.2])
    return tuple(np.exp(least_squares(errors, start, diff_step=1e-4, xtol=1e-8).x).tolist())


def _tutel_einsum(book: Book, cells: Named) -> float:
    parts = tutel.breakdown(tutel.TutelCluster(book.with_values({"tutel.einsum": 1.0})), 16)
    return (parts.fairseq - parts.kernels) / (parts.kernels * (cells["tutel.kernels.16"] - 1))


def _tutel_pipelining(book: Book, cells: Named) -> tuple[float, ...]:
    """Rate of one connection and the issuing thread's time, from two means over the layers on 16 GPUs at once."""
    names = ("tutel.connection", "tutel.issue")

    def errors(logs: np.ndarray) -> list[float]:
        ours = tutel.gains(tutel.TutelCluster(book.with_values(dict(zip(names, np.exp(logs).tolist())))), 16)
        return [
            math.log((100 + ours[name]) / (100 + cells[f"tutel.pipelining.{name}.16"])) for name in ("hier2d1", "worst")
        ]

    found = least_squares(errors, np.log([50.0, 200.0]), diff_step=1e-3, xtol=1e-5, ftol=1e-7)
    return tuple(np.exp(found.x).tolist())


def _tutel_swin(name: str) -> Callable[[Book, Named], float]:
    def rate(book: Book, cells: Named) -> float:
        dense = tutel.SWIN_BATCH * 2 * tutel.SWIN_DENSE * (3 if tutel.SWIN_TRAINS[name] else 1)
        _, moe = tutel.swin_seconds(tutel.TutelCluster(book), 8, name)
        return dense / (tutel.SWIN_BATCH / cells[f"tutel.swin.{name}.tutel.8"] - moe) / 1e12

    return rate


def _netmoe_nic(book: Book, cells: Named) -> float:
    def scatter(tried: Book) -> float:
        return netmoe.NetMoECluster(tried).table4_ms(16)[0]

    return _solve(book, "netmoe.nic", (10.0, 1000.0), scatter, cells["netmoe.scatter.16"])


def _netmoe_computing(book: Book, cells: Named) -> tuple[float, float]:
    few, many = cells["netmoe.compute.2"], cells["netmoe.compute.16"]

    def slope(tried: Book) -> float:
        bed = netmoe.NetMoECluster(tried)
        return bed.table4_ms(16)[1] - bed.table4_ms(2)[1]

    rate = _solve(book, "netmoe.tflops", (10.0, 312.0), slope, many - few)
    bed = netmoe.NetMoECluster(book.with_values({"netmoe.tflops": rate, "netmoe.launch": 0.0}))
    return rate, few - bed.table4_ms(2)[1]


def _netmoe_concentration(book: Book, cells: Named) -> float:
    def change(log: float) -> float:
        return 100 * (netmoe.placed(16, math.exp(log)).inter - 1) - cells["netmoe.change.16.S"]

    return math.exp(float(brentq(change, math.log(0.2), math.log(200.0), xtol=1e-4)))


def _fastermoe_skew(book: Book, cells: Named) -> float:
    bed = fastermoe.FasterMoEBed(fastermoe.GPT)

    def gain(tried: Book) -> float:
        return fastermoe.shadow_gain(bed, fastermoe.skew_of(tried))

    return _solve(book, "fastermoe.skew", (0.3, 2.0), gain, cells["fastermoe.shadow.johnny"])


def _solve(book: Book, name: str, bounds: tuple[float, float], found: Callable[[Book], float], wanted: float) -> float:
    """Return the value of a constant at which a figure comes out; the nearest bound where none does."""
    low, high = (found(book.with_values({name: value})) - wanted for value in bounds)
    if low * high > 0:
        return bounds[0] if abs(low) < abs(high) else bounds[1]

    def error(value: float) -> float:
        return found(book.with_values({name: value})) - wanted

    return float(brentq(error, *bounds, rtol=1e-4))


def _squared(ours: float, theirs: float) -> float:
    return math.log(ours / theirs) ** 2


Found = float | tuple[float, ...]
FITS: dict[tuple[str, ...], Callable[[Book, Named], Found]] = {
    ("schemoe.nic",): _schemoe_nic,
    ("parm.a.link",): _parm_link("a"),
    ("parm.a.message",): _parm_message("a"),
    ("parm.b.link",): _parm_link("b"),
    ("parm.b.message",): _parm_message("b"),
    ("parm.top_k",): _parm_top_k,
    ("parm.b.tflops",): _parm_tflops,
    ("schemoe.turn",): _schemoe_turn,
    ("schemoe.tflops",): _schemoe_tflops,
    ("schemoe.codec",): _schemoe_codec,
    ("schemoe.rest.layer", "schemoe.rest.fixed"): _schemoe_rest,
    ("schemoe.issue",): _schemoe_issue,
    ("tutel.tflops",): _tutel_tflops,
    ("tutel.nic", "tutel.fabric", "tutel.message", "tutel.batched"): _tutel_network,
    ("tutel.connection", "tutel.issue"): _tutel_pipelining,
    ("tutel.einsum",): _tutel_einsum,
    ("tutel.swin.train",): _tutel_swin("train"),
    ("tutel.swin.infer",): _tutel_swin("infer"),
    ("netmoe.nic",): _netmoe_nic,
    ("netmoe.tflops", "netmoe.launch"): _netmoe_computing,
    ("netmoe.concentration",): _netmoe_concentration,
    ("fastermoe.skew",): _fastermoe_skew,
}
"""By the constants that are found together, in the order in which they are found."""
