"""What would help where a machine refuses to emulate a cluster. Words for the texts of kernel and tools."""

from __future__ import annotations

ADVICE = (
    (
        "no namespaces for this user",
        "run as root with CAP_SYS_ADMIN, or allow user namespaces (user.max_user_namespaces > 0)",
    ),
    ("`ip` is missing", "install iproute2"),
    ("`tc` is missing", "install iproute2, on some systems iproute2-tc"),
    ("qdisc kind is unknown", "the kernel needs htb: modprobe sch_htb"),
    ("Unknown device type", "the kernel needs veth: modprobe veth"),
    ("gso_max_size", "iproute2 5.19 or newer is needed"),
    ("gro_max_size", "iproute2 5.19 or newer is needed"),
    ("Read-only file system", "/proc/sys must be writable: a container needs --privileged"),
    (
        "Operation not permitted",
        "run as root with CAP_NET_ADMIN, or allow user namespaces to configure networks (on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0)",
    ),
)
"""Part of a text, and what helps; the first that fits is taken."""


def explain(text: str) -> str:
    """Return one line: that there is no bed, why, and what would help.

    Args:
        text: what the kernel or a tool said.
    """
    first = text.strip().splitlines()[0]
    help_ = next((help_ for part, help_ in ADVICE if part in text), None)
    return f"no emulated cluster on this machine: {first}" + (f": {help_}" if help_ else "")
