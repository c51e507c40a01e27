"""Samples that move between ranks (NetMoE), and their residuals with them."""
