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

from torch.distributed import ProcessGroupGloo

plain = ProcessGroupGloo.__init__


@functools.cache
def device_of(process: int) -> Any:
    """Return the device of this process, which has this number; a fork gets another."""
    return ProcessGroupGloo.create_default_device()


def share(group: ProcessGroupGloo, *arguments: Any, **named: Any) -> None:
    """Make a group as torch does, but on the shared device. Called in another way than torch 2.13
    calls it, it leaves the group its own device."""
    *of_group, timeout = (*arguments, *named.values())
    if len(of_group) != 3 or not isinstance(timeout, timedelta):
        plain(group, *arguments, **named)
        return
    options = ProcessGroupGloo._Options()
    options._devices = [device_of(os.getpid())]
    options._timeout = timeout
    plain(group, *of_group, options)


ProcessGroupGloo.__init__ = share  # type: ignore[method-assign]
