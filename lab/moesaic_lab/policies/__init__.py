"""Replication policies of other systems, as baselines: pass one to `BalancedCalls`, or its table to
a simulation."""
