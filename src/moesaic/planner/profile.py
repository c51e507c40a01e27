"""`ClusterProfile`: measurements of a machine by `moesaic profile`: links, host, products, copies. Needs no torch.

A `ClusterSpec` describes a cluster by data sheets; a profile holds the costs that programs really pay. It says what a
task costs the host, what a message costs besides its bytes, and how fast experts multiply by their rows while all ranks
do. A file names the machine and the versions with which it was measured, and is refused on others unless the caller
allows it.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from moesaic.codecs import codec_spec
from moesaic.configfile import differing_fields, override, read_table
from moesaic.errors import InputError
from moesaic.files import write
from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops, check_above_zero, check_not_negative
from moesaic.planner.fit import Fit

FORMAT = 1
"""Format number of the file. It changes when the meaning of a field changes."""
SHARED_FROM = 1.5
"""Senders of a node share one link if together they reach less than this multiple of the rate of a single sender."""


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """The machine on which a profile was measured."""

    processor: str = ""
    """Name of the processor."""
    cores: int = 0
    """Cores that the ranks of a node may use."""
    system: str = ""
    """Operating system and release."""

    @classmethod
    def here(cls) -> MachineInfo:
        """Return this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(processor=_processor(), cores=cores, system=f"{platform.system()} {platform.release()}")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions of the measured software, since other versions may have other host costs."""

    moesaic: str = ""
    torch: str = ""
    python: str = ""

    @classmethod
    def here(cls) -> Versions:
        """Return the installed versions; "" for a package that is not installed."""
        return cls(moesaic=_version("moesaic"), torch=_version("torch"), python=platform.python_version())


@dataclass(frozen=True, kw_only=True)
class LinkCosts:
    """Costs of movements on the links inside nodes, or between them, with the library's own transport."""

    latency_seconds: float = 0.0
    """Seconds that a movement takes beyond its bytes and the host's part."""
    credit_seconds: float = 0.0
    """Seconds that a long movement over idle links takes less than its bytes at the rate below, since a shaped link
    passes the first kilobytes at once."""
    one_sender: float = 0.0
    """Bytes per second from one rank to one other; 0 if there are no such links."""
    all_senders: float = 0.0
    """Bytes per second that each rank sends while all ranks send to all others over these links; 0 if there are no such
    links."""

    def __post_init__(self) -> None:
        for cost in fields(self):
            check_not_negative(f"profile link {cost.name}", getattr(self, cost.name))


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Processor time of one rank in seconds, summed over its threads."""

    layer: float = 0.0
    """Per layer, forward and backward, outside its programs: routing, the exchange of counts, autograd."""
    task: float = 0.0
    """Per task of a program, including tasks that do nothing."""
    wait: float = 0.0
    """Per movement that must end before the next movement of a dependency chain can start: going to sleep and waking up."""
    message: float = 0.0
    """Per message sent or received."""
    transfer: float = 0.0
    """Per movement in which a rank sends or receives anything, in its own message or in another movement's."""
    byte: float = 0.0
    """Per byte of rows read or written by tasks that permute or add rows."""
    weight_byte: float = 0.0
    """Per byte of expert gradients written or added."""
    transport_byte: float = 0.0
    """Per byte sent or received: the rank's thread, the transport's thread and the kernel."""
    copy: float = 0.0
    """Besides `task`, per task that packs, unpacks, takes or joins rows."""
    combine: float = 0.0
    """Besides `task`, per task that adds rows to their tokens."""
    gradient: float = 0.0
    """Besides `task`, per backward pass of experts, in addition to its products and bytes."""
    sharing: float = 1.0
    """Factor by which a rank's processor time stretches while all ranks of its machine compute, at least 1: usually
    ranks over cores."""

    def __post_init__(self) -> None:
        for cost in fields(self):
            check_not_negative(f"profile.host.{cost.name}", getattr(self, cost.name))
        check_above_zero("profile.host.sharing", self.sharing)


@dataclass(frozen=True, kw_only=True)
class Products:
    """Rates of expert products by rows per expert, measured on all ranks at once."""

    rows: tuple[float, ...] = ()
    """Rows per expert, ascending."""
    fp32: tuple[float, ...] = ()
    """Operations per second of processor time at these rows, forward and backward together; () if not measured."""
    bf16: tuple[float, ...] = ()
    """As `fp32`."""

    def __post_init__(self) -> None:
        for name in ("fp32", "bf16"):
            rates = getattr(self, name)
            if rates and len(rates) != len(self.rows):
                raise InputError(f"profile.products.{name} has {len(rates)} rates for {len(self.rows)} numbers of rows")
            for rate in rates:
                check_above_zero(f"profile.products.{name}", rate)
        for rows in self.rows:
            check_above_zero("profile.products.rows", rows)
        if any(first >= second for first, second in pairwise(self.rows)):
            raise InputError(f"profile.products.rows={list(self.rows)}: write them ascending")


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of the fits on held-out measurements, as a share of the measured value."""

    host_median: float = 0.0
    """Median error of the processor time of whole layers under held-out plans."""
    host_worst: float = 0.0
    """Largest such error."""
    links_worst: float = 0.0
    """Largest error of the time of movements of held-out sizes."""
    spread: float = 0.0
    """Interquartile range of a layer's repeats over their median, median over the layers."""
    layers_median: float = 0.0
    """Median error of the wall-clock time of whole layers under held-out plans."""

    def __post_init__(self) -> None:
        for error in fields(self):
            check_not_negative(f"profile.errors.{error.name}", getattr(self, error.name))


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Measurements of a cluster."""

    format: int = FORMAT
    date: str = ""
    """Date of the measurement, YYYY-MM-DD."""
    machine: MachineInfo = field(default_factory=MachineInfo)
    versions: Versions = field(default_factory=Versions)
    nodes: int = 1
    ranks_per_node: int = 1
    inside: LinkCosts = field(default_factory=LinkCosts)
    """Links between ranks of one node."""
    outside: LinkCosts = field(default_factory=LinkCosts)
    """Links between nodes."""
    host: HostCosts = field(default_factory=HostCosts)
    products: Products = field(default_factory=Products)
    codecs: dict[str, float] = field(default_factory=dict)
    """Bytes of rows that a rank encodes and decodes per second of processor time, by codec; missing or 0 if not
    measured."""
    collectives: dict[str, Fit] = field(default_factory=dict)
    """Fitted lines over bytes, counted as nccl-tests does. The key names the collective and its span, such as
    "all_gather inside"; see `moesaic.measure.links`. Empty if not measured."""
    copy_bytes_per_second: float = 5e9
    """Bytes read plus bytes written per second of processor time when rows are permuted."""
    memory_gib: float = 1.0
    """Memory of one rank in GiB."""
    errors: Errors = field(default_factory=Errors)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InputError(f"format={self.format}: this version reads format {FORMAT}: run moesaic profile again")
        for codec, rate in self.codecs.items():
            codec_spec(codec)
            check_not_negative(f"profile.codecs.{codec}", rate)
        for name in ("nodes", "ranks_per_node", "copy_bytes_per_second", "memory_gib"):
            check_above_zero(f"profile.{name}", getattr(self, name))
        if self.ranks_per_node > 1 and not self.inside.all_senders:
            raise InputError("profile.inside.all_senders is 0 with several ranks on a node: run moesaic profile again")
        if self.nodes > 1 and not self.outside.all_senders:
            raise InputError("profile.outside.all_senders is 0 with several nodes: run moesaic profile again")

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    def to_cluster(self, nodes: int | None = None) -> ClusterSpec:
        """Return the cluster's description for the simulator and the planner.

        Its host has only the costs that every task has. The further costs of copies, sums and gradients are counted by
        `profiled_simulator`.

        Args:
            nodes: number of nodes of this kind; None for the measured number.

        Raises:
            InputError: if `nodes` is above 1 and only one node was measured.
        """
        nodes = nodes or self.nodes
        if nodes > 1 and not self.outside.all_senders:
            raise InputError(f"nodes={nodes}: the profile was measured on one node: run moesaic profile on two or more")
        rows, share, tflops = self._curve()
        host = self.host
        device = Device(
            tflops=tflops, memory_gib=self.memory_gib, gemm_rows=rows, gemm_share=share,
            memory_gigabytes_per_second=self.copy_bytes_per_second / 1e9 / host.sharing,
        )  # fmt: skip
        return ClusterSpec(
            name="profile",
            description=f"{self.machine.processor}, {self.machine.cores} cores, {self.nodes} x {self.ranks_per_node} ranks",
            source=f"moesaic profile, {self.date}",
            nodes=nodes,
            devices_per_node=self.ranks_per_node,
            device=device,
            links=self._links(),
            host=Host(
                runs_compute=True, task_us=1e6 * host.sharing * host.task, message_us=1e6 * host.sharing * host.message
            ),
        )

    def _links(self) -> tuple[Link, ...]:
        links = []
        for name, costs, num_senders, shared in (
            ("inside", self.inside, self.ranks_per_node, True), ("outside", self.outside, self.ranks_per_node, False),
        ):  # fmt: skip
            if not costs.all_senders:
                continue
            combined_rate = costs.all_senders * num_senders
            is_shared = combined_rate < SHARED_FROM * costs.one_sender or num_senders == 1
            links.append(
                Link(
                    name=name,
                    devices=num_senders if is_shared else 1,
                    gbps=((combined_rate if is_shared else costs.all_senders) * 8e-9,),
                    latency_us=1e6 * costs.latency_seconds,
                    carries="inside" if name == "inside" else "outside",
                    shared=shared and is_shared and num_senders > 1,
                )
            )
        return tuple(links)

    def _curve(self) -> tuple[tuple[float, ...], tuple[float, ...], Tflops]:
        """Return rows, shares and rates of products while all ranks multiply."""
        measured = {name: getattr(self.products, name) for name in ("fp32", "bf16") if getattr(self.products, name)}
        if not measured:
            return (1.0,), (1.0,), Tflops(fp32=1.0)
        best_rates = {name: max(rates) for name, rates in measured.items()}
        shares = next(iter(measured.values()))
        best_rate = max(shares)
        tflops = {name: rate / self.host.sharing / 1e12 for name, rate in best_rates.items()}
        return self.products.rows, tuple(rate / best_rate for rate in shares), Tflops(**tflops)

    def write(self, path: Path) -> None:
        """Write the profile to a file, replacing an existing file atomically."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            write(path, text, typed=True)
        except OSError as error:
            raise InputError(f"profile {path}: cannot be written ({error.strerror or error})") from error


def read_profile(path: Path, *, any_machine: bool = False) -> ClusterProfile:
    """Read a profile.

    Args:
        path: a JSON file written by `moesaic profile`.
        any_machine: also accept a profile of another machine or of other versions.

    Raises:
        InputError: if the file is not a profile, or is of another machine or version.
    """
    table = read_table(path)
    if "format" not in table or "host" not in table:
        raise InputError(f"profile {path}: is not a profile: write one with moesaic profile --out {path.name}")
    try:
        profile = override(ClusterProfile(), table, source=f"profile {path}")
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"profile {path}: {error}") from error
    if not any_machine:
        for how, recorded, current in (
            ("on another machine", profile.machine, MachineInfo.here()),
            ("with another version", profile.versions, Versions.here()),
        ):
            differences = differing_fields(recorded, current)
            if differences:
                raise InputError(
                    f"profile {path} was measured {how} ({differences[0]}): "
                    "measure again with moesaic profile, or read it with any_machine=True"
                )
    return profile


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
