"""The fixture as users of the library get it: in a project of their own, skipping where there are
no beds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

TESTS = """
    import os

    def name(word):
        return word, os.environ["RANK"], os.readlink("/proc/self/ns/pid")

    def test_first(cluster):
        one, two = cluster(2, 1, intra="1gbit"), cluster(1, 1)
        assert [found[:2] for found in one.run(name, "a")] == [("a", "0"), ("a", "1")]
        assert len(two.run(name, "b")) == 1
        open("first", "w").write(one.run(name, "")[0][2])
        test_first.bed = one

    def test_second(cluster):
        bed = cluster()
        assert bed.bed.world == 4
        try:
            test_first.bed.run(name, "a")
        except RuntimeError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a bed outlived its test")
"""


def run_pytest(folder, **environment):
    (folder / "test_mine.py").write_text(textwrap.dedent(TESTS))
    options = [
        "-q",
        "-rs",
        "-p",
        "moesaic_testbed.plugin",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    words = [sys.executable, "-m", "pytest", *options, "test_mine.py"]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_the_fixture_gives_beds_that_end_with_the_test(cluster_launcher, tmp_path):
    assert "2 passed" in run_pytest(tmp_path)
    assert (tmp_path / "first").read_text().startswith("pid:[")


def test_the_fixture_skips_with_the_reason(cluster_launcher, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ip").symlink_to(shutil.which("ip") or "")
    out = run_pytest(tmp_path, PATH=str(tools))
    assert "2 skipped" in out
    assert "no emulated cluster on this machine: `tc` is missing: install iproute2" in out
