"""NetMoE's figures beside ours: Table 5's volumes before and after placing samples, Table 4's times."""

from __future__ import annotations

import statistics

from moesaic_lab.reproduce.netmoe import (
    MODELS,
    PER_NODE,
    EndToEnd,
    NetMoECluster,
    PlacedSamples,
    before_mib,
    end_to_end,
    placed,
)
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction

SWEEP = ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8))
"""Nodes, and devices of each, of the sweep of N and J."""
ASSUMPTIONS = (
    "rows are float32; a volume is that of one all-to-all, all ranks together",
    "experts are evenly loaded in sum; each sample likes some of them, independently in consecutive layers; one "
    "concentration over all experts together, for 32 and 64 experts alike",
    "a placement is chosen by the gather of a layer and the scatter of the next, and its volumes are the means of the two",
    "a node's port carries what Table 4's scatter needs, 18 GB/s, not the printed 100 GB/s",
    "whole steps: GPT-2's depths, an MoE layer in every block, float32, four samples per device, attention and the output at "
    "the rate of products, gradients of what is no expert exchanged beside other work; FasterMoE has groups of four devices, "
    "and experts are evenly loaded, so that shadowing and SmartMoE's placement of experts have nothing to gain",
)
UNEXPLAINED = (
    "whole steps: a saving of 39 % between nodes bounds their speed-up by 1.64, were there nothing but all-to-alls; 1.67 over "
    "FastMoE is above that, so that its layer must lose time that is neither bytes nor products (waits for the host between "
    "counts and messages), which the paper does not tell and nothing here models",
    "volumes inside nodes after: ours fall further. If consecutive layers routed a sample alike, weaker preferences would save "
    "as much between nodes and less inside; here the layers are drawn apart",
    "rows of different width have different savings in the paper, where this model gives one figure per number of nodes: how a "
    "model routes would have to depend on its width, as trained routers do",
)


def reproduce(book: Book) -> Reproduction:
    """Count and place, and set the volumes beside the paper's figures."""
    found: dict[str, float] = {}
    after = {devices: placed(devices, book.constant("netmoe.concentration")) for devices in (16, 32)}
    for devices, mean in after.items():
        for model, dim in MODELS.items():
            intra, inter = before_mib(devices, dim)
            found[f"netmoe.before.intra.{devices}.{model}"] = intra
            found[f"netmoe.before.inter.{devices}.{model}"] = inter
            found[f"netmoe.after.intra.{devices}.{model}"] = intra * mean.intra
            found[f"netmoe.change.{devices}.{model}"] = 100 * (mean.inter - 1)
        for model in ("S", "M", "L") if devices == 16 else ("S",):
            found[f"netmoe.moved.nodes.{devices}.{model}"] = 100 * mean.moved_nodes
            found[f"netmoe.moved.devices.{devices}.{model}"] = 100 * mean.moved_devices
    bed = NetMoECluster(book)
    for samples in (2, 4, 8, 16, 24):
        found[f"netmoe.scatter.{samples}"], found[f"netmoe.compute.{samples}"] = bed.table4_ms(samples)
    steps = {model: end_to_end(book, model, 4, PER_NODE) for model in MODELS}
    for system in ("fastmoe", "fastermoe", "smartmoe"):
        found[f"netmoe.speedup.{system}"] = max(_over(each, system) for each in steps.values())
    for nodes, per_node in SWEEP:
        found[f"netmoe.sweep.n{nodes}.j{nodes * per_node}"] = _over(end_to_end(book, "S", nodes, per_node), "fastmoe")
    return Reproduction(
        paper="netmoe",
        title="NetMoE: volumes before and after placing samples, and times",
        rows=book.rows(found),
        constants=book.of("netmoe"),
        findings=_findings(book, after),
        assumptions=ASSUMPTIONS,
        unexplained=UNEXPLAINED,
        charts=_charts(book, after),
    )


def _over(step: EndToEnd, system: str) -> float:
    """Return how much faster a step is than under another system."""
    return (step.fastermoe if system == "fastermoe" else step.fastmoe) / step.netmoe


def before_error(made: Reproduction) -> float:
    """Return the median error of the volumes before, over rows that count as validation."""
    return statistics.median(made.errors(prefix="netmoe.before."))


def after_points(made: Reproduction) -> float:
    """Return the median error of the changes between nodes, in points, over rows that count as validation."""
    return statistics.median(made.errors(unit="points", prefix="netmoe.change."))


def _findings(book: Book, after: dict[int, PlacedSamples]) -> tuple[PaperFinding, ...]:
    concentration = book.constant("netmoe.concentration")
    return (
        PaperFinding(
            statement="one concentration explains the savings on 2 and on 4 nodes",
            ours=f"{concentration:.3g} over all experts: {100 * (after[16].inter - 1):.1f} % on 2 nodes, "
            f"{100 * (after[32].inter - 1):.1f} % on 4",
            holds=abs(after[16].inter - after[32].inter) < 0.05,
        ),
        PaperFinding(
            statement="volumes inside nodes fall on 2 nodes and rise on 4",
            ours=f"{100 * (after[16].intra - 1):+.1f} % and {100 * (after[32].intra - 1):+.1f} %",
            holds=after[16].intra < 1 < after[32].intra,
        ),
    )


def _charts(book: Book, after: dict[int, PlacedSamples]) -> tuple[Chart, ...]:
    cases = [(devices, model) for devices in (16, 32) for model in MODELS]
    labels = tuple(f"{devices}\n{model}" for devices, model in cases)
    paper = [(float(n), book.cells[f"netmoe.change.{d}.{m}"].value) for n, (d, m) in enumerate(cases)]
    known = [(x, -y) for x, y in paper if y is not None]
    ours = tuple(100 * (1 - after[devices].inter) for devices, _ in cases)
    concentrations = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    curves = tuple(
        (
            f"{devices} devices",
            concentrations,
            tuple(100 * (1 - placed(devices, c, draws=4).inter) for c in concentrations),
        )
        for devices in (16, 32)
    )
    return (
        Chart(
            title="saved between nodes", x_title="devices and model", y_title="%", categories=labels,
            series=(
                ("paper", tuple(x for x, _ in known), tuple(y for _, y in known)),
                ("simulated", tuple(float(n) for n in range(len(cases))), ours),
            ),
        ),
        Chart(
            title="saved between nodes, by how alike samples are", x_title="concentration", y_title="%", log_x=True,
            series=curves,
        ),
    )  # fmt: skip
