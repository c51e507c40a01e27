"""Bugs to plant in the library, and whether the conformance suite notices them."""
