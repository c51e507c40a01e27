"""Policies that replicate experts: which ranks compute copies of an expert that is not theirs, call by call."""

from __future__ import annotations

NO_REPLICATION = "none"
"""In place of the name of a policy that replicates experts."""
