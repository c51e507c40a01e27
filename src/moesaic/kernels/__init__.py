"""The arithmetic of a layer on one device: permutation, grouped products, activations, codecs."""
