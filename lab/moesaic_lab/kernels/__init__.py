"""The benchmark of a layer's operations, compared with plain PyTorch code and with the roofline."""
