"""The benchmark of all-to-alls on an emulated cluster, compared with the limit of its links."""
