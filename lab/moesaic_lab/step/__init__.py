"""`moesaic bench step`: the whole step under every split of the ranks, on emulated clusters."""
