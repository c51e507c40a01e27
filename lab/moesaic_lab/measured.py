"""Says where results were measured, in words for pages: the date and the processor, whose maker may
decide a figure.

A result names one machine, and its rows may name others, if they were measured at other times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NUMBERS = ("no", "one", "two", "three", "four")


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return where results were measured, e.g. "2026-11-22 on two cores of an AMD EPYC (`train`)".

    Args:
        results: the content of each file of results, by name.
    """
    names_by_place: dict[str, list[str]] = {}
    for name, result in results.items():
        for place in places(result):
            names_by_place.setdefault(place, []).append(f"`{name}`")
    return "; ".join(
        f"{place} ({', '.join(names)})" for place, names in sorted(names_by_place.items())
    )


def places(result: Mapping[str, Any]) -> list[str]:
    """Return date and machine of a result: of each of its rows that names them, or of the file."""
    machine = result["machine"]
    rows = result.get("rows", ())
    found = []
    for row in rows:
        if "cpu" in row:
            date = row.get("date", result["date"])
            found.append(f"{date} on {machine_in_words({**machine, 'cpu': row['cpu']})}")
    if len(found) < len(rows) or not rows:  # some rows are of the file's own machine
        found.append(f"{result['date']} on {machine_in_words(machine)}")
    return sorted(set(found))


def machine_in_words(machine: Mapping[str, Any]) -> str:
    """Return a machine in words: its GPU, or its cores and their processor."""
    if machine.get("gpu"):
        return f"one {machine['gpu']}"
    cores = machine["cores"]
    number = NUMBERS[cores] if cores < len(NUMBERS) else str(cores)
    name = processor_in_words(machine["cpu"])
    article = "an" if name[0] in "AEIO" else "a"
    return f"{number} core{'s' * (cores != 1)} of {article} {name}"


def processor_in_words(cpu: str) -> str:
    """Return the name of a processor without its trade marks and the word Processor."""
    return " ".join(re.sub(r"\((?:R|TM|tm)\)|\bProcessor\b|\bCPU\b", " ", cpu).split())


def maker(machine: Mapping[str, Any]) -> str:
    """Return the first word of the name of the GPU or the processor, e.g. NVIDIA, AMD or Intel."""
    return processor_in_words(machine.get("gpu") or machine["cpu"]).split()[0]
