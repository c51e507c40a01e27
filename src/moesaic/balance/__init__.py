"""Balancing, the deciding half: where experts, their replicas and samples go. `runtime/balance` acts on it."""
