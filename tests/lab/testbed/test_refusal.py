"""What is said where a machine can make no bed, and that ordinary users can make one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_testbed import cluster as open_cluster
from moesaic_testbed import refusal
from moesaic_testbed.kernel import explain

ASK = "from moesaic_testbed import refusal; print(refusal())"
NOBODY = 65534


def test_none_where_beds_work(cluster_launcher):
    assert refusal() is None


def test_missing_tools(tmp_path, monkeypatch, cluster_launcher):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == "no emulated cluster on this machine: `ip` is missing: install iproute2"
    (tmp_path / "ip").symlink_to(shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin"))
    assert refusal() == (
        "no emulated cluster on this machine: `tc` is missing: install iproute2, on some "
        "systems iproute2-tc"
    )
    with pytest.raises(InputError, match="`tc` is missing"), open_cluster():
        pass


def test_a_kernel_without_htb(tmp_path, monkeypatch, cluster_launcher):
    for tool in ("ip", "cat"):
        (tmp_path / tool).symlink_to(shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin"))
    tc = tmp_path / "tc"
    tc.write_text(
        "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\necho 'more' >&2\nexit 1\n"
    )
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == (
        "no emulated cluster on this machine: `tc` said: Error: Specified qdisc kind is "
        "unknown.: the kernel needs htb: modprobe sch_htb"
    )


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refusal() == "no emulated cluster on this machine: it needs Linux, this is darwin"


def test_explanations_are_one_line():
    text = "no namespaces for this user ([Errno 1] Operation not permitted)\nmore"
    assert explain(text).endswith("or allow user namespaces (user.max_user_namespaces > 0)")
    assert "\n" not in explain(text)
    assert explain("strange") == "no emulated cluster on this machine: strange"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to give up its rights"
)
def test_root_without_capabilities():
    words = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", sys.executable, "-c", ASK]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "no emulated cluster on this machine: no namespaces for this user ("
    )
    assert done.stdout.count("\n") == 1


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become somebody else"
)
def test_an_ordinary_user(cluster_launcher, tmp_path):
    """Python may lie where only root can look: it is mounted anew, in a mount namespace of this
    test."""
    base = Path(sys.base_prefix)
    closed = next(
        (folder for folder in reversed(base.parents) if not folder.stat().st_mode & 1), None
    )
    aside = tmp_path / "python"
    aside.mkdir()
    reach = (
        f"mount --bind {base} {aside}; mount -t tmpfs -o mode=755 none {closed}; mkdir -p {base}; "
    )
    reach += f"mount --move {aside} {base}"
    become = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups"
    code = (
        "import os\nfrom moesaic_testbed import Bed, Launcher, refusal\nprint(os.geteuid(), "
        "refusal())\nwith Launcher(with_torch=False) as launcher, "
        "launcher.open(Bed(ranks_per_node=1, intra='1gbit')) as bed:\n    "
        "print(bed.command(['sh', '-c', 'test $(tc class show dev eth0 | wc -l) = 1']))"
    )
    script = (
        f"set -e; {reach if closed else ''}; cd /; exec {become} env HOME=/ {sys.executable} -c "
        '"$0"'
    )
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "user.max_user_namespaces" in done.stdout:
        pytest.skip(done.stdout)
    assert (done.stdout, done.stderr) == (f"{NOBODY} None\n[0, 0]\n", "")
