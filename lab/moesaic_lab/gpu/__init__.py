"""The benchmark of one layer on one GPU, compared with other implementations."""
