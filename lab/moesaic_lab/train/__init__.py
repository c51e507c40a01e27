"""The benchmark of whole training steps of the demo model on an emulated cluster, compared with the
layers of others."""
