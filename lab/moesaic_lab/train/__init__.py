"""The demo model end to end on an emulated cluster, beside the layers of others."""
