"""Where the commands of a place run: in which folder, with which variables, as which user and below
which root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REACH = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
"""Variables that say how the network is reached, and never what is taken from it: the only ones
that are kept."""
WINDOWS = (
    "SYSTEMROOT",
    "SYSTEMDRIVE",
    "COMSPEC",
    "PATHEXT",
    "TEMP",
    "TMP",
    "USERPROFILE",
    "APPDATA",
    "LOCALAPPDATA",
)
"""Variables without which programs do not start on Windows."""
SOMEBODY = "somebody"
"""The user of a bare Debian."""
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
BELOW = """
set -e
root=$1 user=$2
shift 2
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
exec chroot --userspec="$user" "$root" "$@"
"""
"""Runs a command below another root. Its mounts are those of `unshare --mount`, so they end with
it."""


def kept(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of this process that a place may have: how to reach the network, what
    Windows needs."""
    names = REACH + (WINDOWS if os.name == "nt" else ())
    return {name: environment[name] for name in names if name in environment}


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where commands run.

    Args:
        folder: an empty folder, as the commands see it.
        variables: all variables that they have.
        environment: the virtual environment, relative to `folder`.
        prefix: words in front of every command, which change the user or the root.
        root: where `/` of the commands is on this machine; None for `/` itself.
        owner: number of the user who runs them; None for the one who runs this script.
    """

    folder: str
    variables: Mapping[str, str]
    environment: str = "env"
    prefix: tuple[str, ...] = ()
    root: Path | None = None
    owner: int | None = None

    def here(self, name: str = "") -> Path:
        """Return the path on this machine of a file in the folder."""
        inside = Path(self.folder, name)
        return inside if self.root is None else self.root / inside.relative_to("/")

    def inside(self, name: str) -> str:
        """Return the path of a file in the folder, as the commands see it."""
        return os.path.join(self.folder, *name.split("/"))

    @property
    def programs(self) -> str:
        """The folder of the environment's programs, as the commands see it."""
        return self.inside(f"{self.environment}/{'Scripts' if os.name == 'nt' else 'bin'}")

    def whole_environment(self) -> dict[str, str]:
        """Return all variables of a command, the search path included, which begins with the
        virtual environment."""
        system = os.environ.get("PATH", "") if os.name == "nt" else SYSTEM_PATH
        return {
            "PATH": os.pathsep.join([self.programs, system]),
            "PIP_CONFIG_FILE": os.devnull,
            **self.variables,
        }

    def words(self, command: Sequence[str], folder: str) -> list[str]:
        """Return the words that start a command from here, in a folder below this one."""
        if self.root is not None:
            return [*self.prefix, "env", f"--chdir={self.inside(folder)}", *command]
        first, *others = command
        found = shutil.which(first, path=self.whole_environment()["PATH"]) or first
        return [*self.prefix, found, *others]

    def give(self) -> None:
        """Give the folder and all in it to the user who runs the commands."""
        if self.owner is None:
            return
        for folder, folders, files in os.walk(self.here()):
            for name in (".", *folders, *files):
                os.chown(os.path.join(folder, name), self.owner, self.owner, follow_symlinks=False)


def plain(folder: Path) -> Ground:
    """Return a folder of this machine with a home of its own, so that no setting of the user's
    counts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    return Ground(folder=str(folder), variables={"HOME": str(folder / "home"), **kept()})


def without_rights(folder: Path) -> Ground:
    """Return a folder for a user who is not root and has no home, in the plainest language of a
    system."""
    import pwd

    folder.mkdir(parents=True, exist_ok=True)
    variables = {"LANG": "C", **kept()}
    if os.geteuid() != 0:
        return Ground(folder=str(folder), variables=variables)
    user = pwd.getpwnam("nobody").pw_uid
    return Ground(
        folder=str(folder),
        variables=variables,
        prefix=("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"),
        owner=user,
    )


def debian(root: Path, release: str) -> Ground:
    """Make a bare Debian below a folder and return the home of a user there. Needs root and
    debootstrap."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    packages = "--include=python3,python3-venv,make,git,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", packages, release, str(root)],
        stdin=subprocess.DEVNULL,
        stdout=(root.parent / "debootstrap.txt").open("w"),
        stderr=subprocess.STDOUT,
        timeout=1200,
        check=True,
    )
    variables = kept()
    certificates = [
        Path(variables[name])
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        if name in variables
    ]
    for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"), *certificates):
        copy = root / path.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        shutil.copyfile(path, copy)
    home = f"/home/{SOMEBODY}"
    subprocess.run(
        ["chroot", str(root), "useradd", "--create-home", "--uid=1000", SOMEBODY], check=True
    )
    return Ground(
        folder=home,
        variables={"HOME": home, **variables},
        environment="moesaic/.venv",
        prefix=("unshare", "--mount", "--", "sh", "-c", BELOW, "sh", str(root), "1000:1000"),
        root=root,
        owner=1000,
    )
