"""Replication policies: for each call, which ranks help to compute the copies of other ranks' experts."""

from __future__ import annotations

NO_REPLICATION = "none"
"""The name that stands for no replication policy."""
