"""Tests of `moesaic.train`. This is a package so that test files of the same name in other folders
do not clash."""
