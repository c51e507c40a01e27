"""Commands that tests fork start like those of a person at a terminal, however pytest was
started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import forked

KINDS = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGCHLD")
ASKS = f"""
import signal
from pathlib import Path
ignored = [name for name in {KINDS} if signal.getsignal(signal.Signals[name]) is signal.SIG_IGN]
Path("said").write_text(f"{{ignored}} {{sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))}}")
"""


@pytest.mark.parametrize("ignored", [("SIGHUP",), KINDS], ids=["under nohup", "all ignored"])
def test_signals_have_their_usual_effect_whatever_pytest_inherited(
    tmp_path: Path, ignored: tuple[str, ...]
) -> None:
    asks, out, err = (tmp_path / name for name in ("asks.py", "out", "err"))
    asks.write_text(ASKS)
    process = os.fork()
    if process == 0:  # what the fork server does, in a process that inherited other settings
        for name in ignored:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
        forked._become([str(asks)], os.environ, str(out), str(err), (), str(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, err.read_text()
    assert (tmp_path / "said").read_text() == "[] []", "which are ignored, and which are blocked"
