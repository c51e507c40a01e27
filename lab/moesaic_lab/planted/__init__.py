"""Bugs that are planted in the library to check that the conformance cases notice them."""
