"""Swin Transformer V2 with MoE layers, and image data to train it on."""
