"""Experts that move between ranks, with their gradients and what the optimizer keeps of them."""
