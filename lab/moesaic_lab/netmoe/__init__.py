"""Samples that move to their experts: NetMoE's experiments."""
