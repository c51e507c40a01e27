"""The arithmetic of a layer on one device: permute, grouped matmul, activation. Each op has its slow oracle beside it."""
