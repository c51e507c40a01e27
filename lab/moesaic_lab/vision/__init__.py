"""Swin Transformer V2 with MoE layers, and images to train it on."""
