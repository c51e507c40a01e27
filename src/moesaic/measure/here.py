"""What a measurement was made on: the machine, and the versions of the software."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, str | int]:
    """Return the processor, the number of cores that this process may use, and the operating
    system."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return {
        "processor": _processor(),
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the installed versions; "" for a package that is not installed."""
    return {
        "moesaic": _version("moesaic"),
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
