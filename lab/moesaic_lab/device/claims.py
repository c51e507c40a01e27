"""What `moesaic bench device` claims, from its rows, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from moesaic_lab.claims import Claim
from moesaic_lab.device.run import LAYER, LB, DeviceCell
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table

NOTES = (
    "Forward and backward with the input's gradient, one process, methods in turn. LB: the experts' matrix products alone, "
    "per expert torch.mm(out=), and an in-place pass each for the activation and its derivative; 'router's products' are its "
    "three products alone. Claims over LB: the whole layer, with router, top-k and load-balance loss, over the experts' "
    "products, the worse of GELU and SwiGLU; over_lb_with_router has the router's products below the line too. "
    "Zipf: logits -0.7 ln i plus unit normal noise. layer_over: our layer's time over that peer's; a peer far from the fastest "
    "has fewer repeats. growth_bytes: peak of tensors alive beyond those before the call, new gradients included. kept_memory "
    "says whether the allocator was told to keep what is freed, for all methods alike. Peers have SwiGLU experts."
)
TARGETS = {"balanced": 1.10, "zipf": 1.15}
PEER_TARGET = 0.9
CASE = ("shape", "dtype", "activation", "routing", "kept_memory")
"""Keys of a row that say which case it is of."""
Row = Mapping[str, Any]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of the shapes that were measured; those with the system's own allocator say so."""
    found: list[Claim] = []
    for shape, kept in dict.fromkeys((row["shape"], row["kept_memory"]) for row in rows):
        of_shape = [row for row in rows if (row["shape"], row["kept_memory"]) == (shape, kept)]
        head = f"cpu.{shape}" if kept else f"cpu.default_allocator.{shape}"
        ours = [row for row in of_shape if row["method"] == LAYER]
        for dtype in dict.fromkeys(row["dtype"] for row in ours):
            for routed, target in TARGETS.items():
                ratios = [row["over_lb"] for row in ours if (row["dtype"], row["routing"]) == (dtype, routed)]
                if ratios:
                    name = f"{head}.{dtype}.{routed}_over_lb"
                    found.append(Claim(name=name, value=max(ratios), unit="1", target=target, op="<="))
        found.append(_over_peers(head, of_shape))
        found.append(_memory(head, of_shape))
    return found


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new rows and those old ones whose case has no new row, in the order of the old ones."""
    cases = {_case(row) for row in new}
    return [*(row for row in old if _case(row) not in cases), *new]


def _over_peers(head: str, rows: Sequence[Row]) -> Claim:
    """Our whole layer over the fastest peer, the worst of all cases in which one ran."""
    name = f"{head}.over_best_peer"
    best = [min(peers, key=lambda row: float(row["median_seconds"])) for peers in _peers(rows)]
    value = max((float(row["layer_over"]) for row in best), default=None)
    reason = "" if best else _why_absent(rows)
    return Claim(name=name, value=value, unit="1", target=PEER_TARGET, op="<=", reason=reason)


def _memory(head: str, rows: Sequence[Row]) -> Claim:
    """Our layer's peak growth over the smallest of a peer's, the worst of all cases."""
    name = f"{head}.memory_over_best_peer"
    ours = {_case(row): row["growth_bytes"] for row in rows if row["method"] == LAYER}
    ratios = [ours[_case(peers[0])] / min(row["growth_bytes"] for row in peers) for peers in _peers(rows)]
    reason = "" if ratios else _why_absent(rows)
    return Claim(name=name, value=max(ratios, default=None), unit="1", target=1.0, op="<=", reason=reason)


def _peers(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of peers that ran, by case."""
    ran = [row for row in rows if "layer_over" in row]
    return [[row for row in ran if _case(row) == case] for case in dict.fromkeys(map(_case, ran))]


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in CASE)


def _why_absent(rows: Sequence[Row]) -> str:
    reasons = dict.fromkeys(row["reason"] for row in rows if "reason" in row)
    return "; ".join(reasons) or "peers were not asked for"


def device_table(rows: Sequence[Row]) -> Table:
    """Return a line per method and case."""
    columns = (
        Column(key="shape", title="shape", is_text=True),
        Column(key="dtype", title="dtype", is_text=True),
        Column(key="activation", title="experts", is_text=True),
        Column(key="routing", title="routing", is_text=True),
        Column(key="method", title="method", is_text=True),
        Column(key="median_seconds", title="ms", show=milliseconds),
        Column(key="over_lb", title="over LB", show=share),
        Column(key="over_lb_with_router", title="with router", show=share),
        Column(key="layer_over", title="ours over it", show=share),
        Column(key="growth_bytes", title="growth", show=byte_size),
    )
    return table("One layer, forward + backward", [row for row in rows if "reason" not in row], columns, group_by=CASE)


def summary(cell: DeviceCell) -> str:
    """Return a case in one line, for progress."""
    parts = [f"{cell.ratio(LAYER, LB).median:.3f} LB"]
    if cell.best_peer is not None:
        parts.append(f"best peer {cell.best_peer} {cell.ratio(cell.best_peer, LB).median:.2f} LB")
    return f"{cell.case.name}: " + ", ".join(parts)
