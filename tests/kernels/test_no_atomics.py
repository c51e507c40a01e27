"""No kernel uses atomics, so sums of rows and gradients are bitwise equal in every run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moesaic.kernels

KERNELS = Path(moesaic.kernels.__file__).parent
ATOMICS = ("atomic_", "inline_asm")
"""Prefixes of the names in `triton.language` with which a kernel could add atomically."""


def calls(source: str) -> Iterator[str]:
    """Yield the attributes and the imported names that a source uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


@pytest.mark.parametrize(
    "path", sorted((KERNELS / "triton").rglob("*.py")), ids=lambda path: path.name
)
def test_no_triton_kernel_uses_atomics(path):
    assert [
        name for name in calls(path.read_text(encoding="utf-8")) if name.startswith(ATOMICS)
    ] == []


def test_the_search_finds_one():
    source = "from triton.language import atomic_cas\ndef kernel(x):\n    tl.atomic_add(x, 1.0)\n"
    assert {name for name in calls(source) if name.startswith(ATOMICS)} == {
        "atomic_cas",
        "atomic_add",
    }
