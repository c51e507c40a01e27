"""Tests of `moesaic.cli`; a package, so that test files of one name in other folders do not
clash."""
