"""Link rates as people write them: 200mbit, 25gbit. The words are those of `tc`."""

from __future__ import annotations

import re

from moesaic.errors import InputError

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_rate(text: str, where: str) -> float:
    """Return a rate in gigabits per second.

    Args:
        text: a number and bit, kbit, mbit or gbit.
        where: names the field in the refusal.

    Raises:
        InputError: if it is not a rate above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", str(text).lower())
    if not found or found.group(2) not in _UNITS or float(found.group(1)) <= 0:
        raise InputError(f"{where}={text!r} is no rate: write a number above 0 and bit, kbit, mbit or gbit: 200mbit")
    return float(found.group(1)) * _UNITS[found.group(2)] / 1e9
