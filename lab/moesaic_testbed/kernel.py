"""Linux system calls that Python 3.10 does not wrap: namespaces, mounts, and the death of a process
with its parent.

This module also has the advice that is shown when the kernel or a tool refuses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_PROCESSES = 0x20000000
NEW_NET = 0x40000000
"""Kinds of namespaces (CLONE_NEW*)."""
_PRIVATE_RECURSIVE = (1 << 18) | (1 << 14)
_NO_SUID_DEV_EXEC = 2 | 4 | 8
_BIND = 1 << 12
_DIE_WITH_PARENT = 1
_ADOPT_ORPHANS = 36
_NET_ADMIN = 12
_SYS_ADMIN = 21

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
"""Pairs of a part of an error message and what helps; the first pair whose part occurs is used."""


def unshare(kinds: int) -> None:
    """Put this process into new namespaces, but only its next child into a new process namespace,
    as number 1.

    Raises:
        OSError: if the kernel refuses.
    """
    _call("unshare", ctypes.c_int(kinds))


def enter_net(namespace: int) -> None:
    """Put this thread into the network namespace of a file descriptor.

    Raises:
        OSError: if the kernel refuses.
    """
    _call("setns", ctypes.c_int(namespace), ctypes.c_int(NEW_NET))


@contextmanager
def inside_net(namespace: int) -> Iterator[None]:
    """Put this thread into a network namespace inside the block."""
    before = this_net()
    enter_net(namespace)
    try:
        yield
    finally:
        enter_net(before)
        os.close(before)


def this_net() -> int:
    """Return a file descriptor of this thread's network namespace, which exists at least until the
    descriptor is closed."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_net() -> int:
    """Create a network namespace without entering it, and return its file descriptor."""
    before = this_net()
    unshare(NEW_NET)
    created = this_net()
    enter_net(before)
    os.close(before)
    return created


def own_mounts() -> bool:
    """Make the mounts of this mount namespace private, and mount a `/proc` that shows this process
    namespace.

    Returns:
        whether that worked. Some containers forbid it; `/proc` then keeps showing the process
        numbers of outside.
    """
    try:
        _call("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE_RECURSIVE), None)
        _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_NO_SUID_DEV_EXEC), None)
    except OSError:
        return False
    return True


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of all orphans among its descendants."""
    _call("prctl", ctypes.c_int(_ADOPT_ORPHANS), ctypes.c_ulong(1))


def name_hosts(names: Mapping[str, str]) -> None:
    """Add host names, by address, to the `/etc/hosts` of this mount namespace; needs `own_mounts`
    first.

    Without names torch warns at every connection. Its sockets see IPv4 addresses as mapped IPv6
    ones, so both are listed.
    """
    hosts = Path("/etc/hosts")
    if not hosts.exists():
        return
    with tempfile.NamedTemporaryFile("w", prefix="moesaic-hosts-") as ours:
        lines = [f"{address} {name}\n::ffff:{address} {name}\n" for address, name in names.items()]
        ours.write(hosts.read_text() + "\n" + "".join(lines))
        ours.flush()
        os.chmod(ours.name, 0o644)
        _call("mount", ours.name.encode(), os.fsencode(hosts), None, ctypes.c_ulong(_BIND), None)


def become_root_of_new_user_namespace() -> None:
    """Enter a user namespace in which this process is root and may configure networks.

    Raises:
        OSError: if such namespaces are forbidden.
    """
    user = os.geteuid()
    group = os.getegid()
    unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def may_configure_networks() -> bool:
    """Return whether this process may create namespaces and links without a user namespace of its
    own."""
    wanted = 1 << _NET_ADMIN | 1 << _SYS_ADMIN
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)  # a bit for each capability
            return capabilities & wanted == wanted
    return False


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _call("prctl", ctypes.c_int(_DIE_WITH_PARENT), ctypes.c_ulong(signal.SIGKILL))


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library, and raise its error."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def explain(text: str) -> str:
    """Return one line that says that clusters cannot be emulated, why, and what would help.

    Args:
        text: the error message, of which only the first line is shown.
    """
    first = text.strip().splitlines()[0]
    message = f"no emulated cluster on this machine: {first}"
    for part, advice in ADVICE:
        if part in text:
            return f"{message}: {advice}"
    return message
