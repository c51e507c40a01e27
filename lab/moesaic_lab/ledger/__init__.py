"""The ledger of errors: published measurements compared with the models of time and memory, and the
fits to some of them."""
