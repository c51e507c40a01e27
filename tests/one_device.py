"""Lets all Gloo groups of a process share one device, as the ranks of tests do.

Gloo gives each group a device of its own, whose thread wakes a hundred times a second. A rank that
trains several runs has over a hundred groups, which took a quarter of its processor time.
Importing this module is enough: ranks import it with `worlds`, before they make groups.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

plain = ProcessGroupGloo.__init__


@functools.cache
def device_of(process: int) -> Any:
    """Return the device of this process, which has this number; a fork gets another."""
    return ProcessGroupGloo.create_default_device()


def share(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Make a group as torch does, but on the shared device."""
    options = ProcessGroupGloo._Options()
    options._devices = [device_of(os.getpid())]
    options._timeout = timeout
    plain(group, store, rank, size, options)


ProcessGroupGloo.__init__ = share  # type: ignore[method-assign]
