"""What `moesaic bench device` claims, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moesaic.bench.device import EXPERTS, LAYER, LB, LB_ROUTER, Cell
from moesaic.bench.device_cases import DTYPES
from moesaic.bench.tables import Column, byte_size, milliseconds, share, table
from moesaic.report.claims import Claim

NOTES = (
    "Forward and backward with the input's gradient, one process, methods in turn. LB: the experts' matrix products alone, "
    "per expert torch.mm(out=), and an in-place pass each for the activation and its derivative; 'LB with router' adds the "
    "router's three products. Claims over LB: the whole layer, with router, top-k and load-balance loss, over LB with "
    "router, the worse of GELU and SwiGLU; rows have the layer over LB too, and the experts with the routing given. "
    "Zipf: logits -0.7 ln i plus unit normal noise. kept_memory says whether the allocator was told to keep what is freed "
    "(keep_freed_memory), for all methods alike. Peers have SwiGLU experts."
)
TARGETS = {"balanced": 1.10, "zipf": 1.15}
PEER_TARGET = 0.9


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """Return the claims of the shapes that were measured."""
    found: list[Claim] = []
    for shape in dict.fromkeys(cell.case.shape.name for cell in cells):
        of_shape = [cell for cell in cells if cell.case.shape.name == shape]
        for dtype in DTYPES:
            for routed, target in TARGETS.items():
                chosen = [c for c in of_shape if (c.case.dtype, c.case.routed) == (dtype, routed)]
                if chosen:
                    value = max(cell.ratio(LAYER, LB_ROUTER).median for cell in chosen)
                    name = f"cpu.{shape}.{dtype}.{routed}_over_lb"
                    found.append(Claim(name=name, value=value, unit="1", target=target, op="<="))
        found.append(_over_peers(shape, of_shape))
        found.append(_memory(shape, of_shape))
    return found


def _over_peers(shape: str, cells: Sequence[Cell]) -> Claim:
    """Our whole layer over the fastest peer, the worst of all cases in which one ran."""
    name = f"cpu.{shape}.over_best_peer"
    ratios = [cell.ratio(LAYER, cell.best_peer).median for cell in cells if cell.best_peer is not None]
    reason = "" if ratios else _why_absent(cells)
    value = max(ratios) if ratios else None
    return Claim(name=name, value=value, unit="1", target=PEER_TARGET, op="<=", reason=reason)


def _memory(shape: str, cells: Sequence[Cell]) -> Claim:
    """Our layer's peak growth over the smallest of a peer's, the worst of all cases."""
    name = f"cpu.{shape}.memory_over_best_peer"
    ratios = [
        cell.growth_bytes[LAYER] / min(cell.growth_bytes[peer] for peer in cell.peers) for cell in cells if cell.peers
    ]
    reason = "" if ratios else _why_absent(cells)
    return Claim(name=name, value=max(ratios) if ratios else None, unit="1", target=1.0, op="<=", reason=reason)


def _why_absent(cells: Sequence[Cell]) -> str:
    reasons = dict.fromkeys(reason for cell in cells for reason in cell.absent.values())
    return "; ".join(reasons) or "peers were not asked for"


def device_table(cells: Sequence[Cell]) -> Table:
    """Return a line per method and case."""
    columns = (
        Column(key="shape", title="shape", is_text=True),
        Column(key="dtype", title="dtype", is_text=True),
        Column(key="activation", title="experts", is_text=True),
        Column(key="routing", title="routing", is_text=True),
        Column(key="method", title="method", is_text=True),
        Column(key="median_seconds", title="ms", show=milliseconds),
        Column(key="over_lb", title="over LB", show=share),
        Column(key="over_lb_with_router", title="over LB with router", show=share),
        Column(key="growth_bytes", title="growth", show=byte_size),
    )
    rows = [row for cell in cells for row in cell.rows() if "reason" not in row]
    return table("One layer, forward + backward", rows, columns, group_by=("shape", "dtype", "activation", "routing"))


def summary(cell: Cell) -> str:
    """Return a case in one line, for progress."""
    case = cell.case
    parts = [f"{name} {cell.ratio(name, LB).median:.3f} LB" for name in (LAYER, EXPERTS)]
    if cell.best_peer is not None:
        parts.append(f"best peer {cell.best_peer} {cell.ratio(cell.best_peer, LB).median:.2f} LB")
    return f"{case.shape.name} {case.dtype} {case.activation} {case.routed}: " + ", ".join(parts)
