"""One layer on one GPU, beside other implementations."""
