"""One layer on one device, beside its matrix products alone and the layers of others."""
