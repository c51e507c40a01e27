"""A pytest plugin that prints each failure as it happens: a run that is killed at its deadline
prints no summary."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failed test's name and traceback."""
    if report.failed:
        print(f"\n==== {report.nodeid}\n{report.longreprtext}", flush=True)
