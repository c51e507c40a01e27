"""Passes: each a published technique as a rewriting of a program; a function from programs to programs, one a file."""
