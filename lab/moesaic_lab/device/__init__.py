"""The benchmark of one layer on one device, compared with its matrix products alone and with the
layers of others."""
