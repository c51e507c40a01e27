"""All-to-alls on an emulated cluster, beside the limit of its links."""
