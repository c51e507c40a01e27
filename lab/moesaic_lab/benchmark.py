"""The frame of every benchmark: cases from options, what was found in them, columns for people, claims, a picture.

`moesaic bench NAME` checks the options and the picture's name first, says what a machine misses in one line, measures, prints
tables and claims, and writes JSON and picture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.configfile import override, read_table, suggestion
from moesaic.errors import InputError
from moesaic_lab.claims import Claim, Measurement, write_whole
from moesaic_lab.pictures import Panel, check_picture, write_picture
from moesaic_lab.tables import Column, Marks, claims_table, table, write_page
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Cluster, Launcher

Told = Callable[[str], object]
"""Hears what is measured now."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What every benchmark can be asked for."""

    json: str | None = None
    """Write the results there; "-" for standard output."""


@dataclass(frozen=True, kw_only=True)
class DrawnOptions(BenchmarkOptions):
    """The same, of a benchmark that has a picture."""

    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""


@dataclass(frozen=True, kw_only=True)
class KeptOptions(BenchmarkOptions):
    """The same, of a benchmark that takes long and can go on from what it has found."""

    keep: str | None = None
    """Keep what is found in this folder, part by part, and go on from what is there."""


@dataclass(frozen=True, kw_only=True)
class PagedOptions(BenchmarkOptions):
    """The same, of a benchmark that a page of the documentation is written by."""

    page: str | None = None
    """Also write the results into this page."""


@dataclass(frozen=True, kw_only=True)
class EmulatedOptions(DrawnOptions):
    """What benchmarks on emulated clusters can be asked for."""

    config: str | None = None
    """Beds, sizes and methods from this TOML file; the committed one if not given."""
    only: str | None = None
    """Only these parts, separated by commas; a wrong one lists them."""
    repeats: int | None = None
    """How often each method is timed, everywhere; ratios near 1 are claimed from 30 on only."""


O = TypeVar("O", bound=BenchmarkOptions)  # noqa: E741
C = TypeVar("C")
F = TypeVar("F")
T = TypeVar("T")
N = TypeVar("N")
J = TypeVar("J")


class CanNarrow(Protocol):
    """A configuration of which a part can be asked for."""

    def narrowed(self: N, *, only: tuple[str, ...] = ..., repeats: int | None = ...) -> N:
        """Return the part that was asked for."""
        ...


Narrowed = TypeVar("Narrowed", bound=CanNarrow)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A table for people."""

    title: str
    columns: Sequence[Column] = ()
    """In order; () for all keys of the first row."""
    where: Mapping[str, Sequence[Any]] | None = None
    """Only rows that have one of these values at each of these keys; None for all rows."""
    group_by: tuple[str, ...] = ()
    """Keys; a rule is drawn wherever the value of one changes."""

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
        """Return the table; none where no row belongs to it."""
        where = self.where or {}
        chosen = [row for row in rows if all(row.get(key) in values for key, values in where.items())]
        if not chosen:
            return []
        columns = self.columns or [Column(key=key, title=key.replace("_", " "), show=_plain) for key in chosen[0]]
        return [table(self.title, chosen, columns, group_by=self.group_by)]


def _once(options: object) -> Any:
    """No cases: the options of most benchmarks say all."""
    return None


def _same(found: Any) -> Any:
    """The rows themselves, of a benchmark that finds rows."""
    return found


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[O, C, F]):
    """A measured comparison."""

    name: str
    """As in `moesaic bench NAME`, and of its file among the results."""
    description: str
    """Shown by --help."""
    options: type[O]
    notes: str
    """What a reader must know to judge the figures."""
    cases: Callable[[O], C] = _once
    """What the options ask for: a list of cases, or a configuration of them; None where the options say all. It refuses
    options that make no sense, and machines that cannot run them."""
    measure: Callable[[O, C, Told], F]
    """What was found in the cases."""
    rows: Callable[[F], list[dict[str, Any]]] = _same
    """What was found, as plain data; as it is if not given."""
    claims: Callable[[F], list[Claim]]
    """Of what was found; also those that this run did not measure."""
    columns: Sequence[Shown] | Callable[[F], Sequence[Table]]
    """Tables for people: of the rows, or made of what was found."""
    title: str = ""
    """Of the picture."""
    panels: Callable[[F], Sequence[Panel]] | None = None
    """Of the picture; its options are `DrawnOptions` then."""
    panels_in_a_row: int = 2
    page: Callable[[F], str] | None = None
    """Text of the page; its options are `PagedOptions` then."""
    page_marks: Marks | None = None
    """Between which the text goes; None where it is the whole page."""
    packages: tuple[str, ...] = ("torch", "numpy")
    """Whose versions matter."""
    is_command: bool = False
    """Whether it is a command of its own, `moesaic NAME`."""
    is_proof: bool = False
    """The exit code is 1 where a claim does not hold: what is claimed is true or a bug."""

    def run(self, arguments: Sequence[str]) -> int:
        """Measure, print, write, draw; returns the exit code."""
        prog = f"moesaic {self.name}" if self.is_command else f"moesaic bench {self.name}"
        options = parse(self.options, arguments, prog=prog, description=self.description)
        picture = Path(options.picture) if isinstance(options, DrawnOptions) and options.picture else None
        if picture is not None:
            check_picture(picture)
        cases = self.cases(options)
        with _progress() as told:
            found = self.measure(options, cases, told)
        self.show(found, options)
        if picture is not None and self.panels is not None:
            write_picture(picture, self.title, self.panels(found), self.notes, columns=self.panels_in_a_row)
        if isinstance(options, PagedOptions) and options.page and self.page is not None:
            write_page(Path(options.page), self.page(found), self.page_marks)
        return 1 if self.is_proof and any(claim.holds is False for claim in self.claims(found)) else 0

    def show(self, found: F, options: BenchmarkOptions) -> None:
        """Print the tables and the claims, and write the JSON."""
        shown = Console(stderr=options.json == "-")
        rows = self.rows(found)
        tables = self.columns(found) if callable(self.columns) else [t for each in self.columns for t in each.of(rows)]
        for each in (*tables, claims_table(self.claims(found))):
            shown.print(each)
        if options.json:
            self.measurement(found).write(options.json)

    def measurement(self, found: F) -> Measurement:
        """Return everything as plain data."""
        return Measurement(rows=self.rows(found), claims=self.claims(found), notes=self.notes, packages=self.packages)


def notes_of(documentation: str | None) -> str:
    """Return the second paragraph of a module's docstring as one line: the notes of most benchmarks."""
    return " ".join((documentation or "").split("\n\n")[1].split())


def words_of(only: str | None) -> tuple[str, ...]:
    """Return what stands between the commas of an option."""
    return tuple(only.split(",")) if only else ()


def require_positive(values: Mapping[str, object], head: str = "") -> None:
    """Raise InputError for a number that is not above 0, by its name; `head` says of which part it is."""
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise InputError(f"{head}{name}={value}: must be above 0")


def read_parts(
    path: Path,
    whole: T,
    *,
    lists: Mapping[str, tuple[str, object]] | None = None,
    tables: Mapping[str, object] | None = None,
) -> T:
    """Read the configuration of a benchmark from a TOML or JSON file.

    Args:
        path: of the file.
        whole: the configuration with its defaults, a dataclass; the file may set its fields of plain values.
        lists: name of a list of tables in the file, to the field that it becomes and what each table overrides. Lists of one
            field follow each other.
        tables: name of a table in the file, which is the field's too, to what it overrides.

    Raises:
        InputError: naming the file and the field.
    """
    table, source, made = read_table(path), f"config {path}", dict[str, Any]()
    lists, tables = lists or {}, tables or {}
    for name, (field, default) in lists.items():
        value = table.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise InputError(f"{source}: {name} must be a list of tables: write [[{name}]] above each")
        read = (override(default, each, source=source, prefix=f"{name}[{n}].") for n, each in enumerate(value))
        made[field] = (*made.get(field, ()), *read)
        names = [each.name for each in made[field] if hasattr(each, "name")]
        if len(set(names)) < len(names):
            raise InputError(f"{source}: two {name} have one name: give each its own")
    for name, default in tables.items():
        value = table.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise InputError(f"{source}: {name} must be a table: write [{name}] above its fields")
        made[name] = override(default, value, source=source, prefix=f"{name}.")
    parts = {*(field for field, _ in lists.values()), *tables}
    plain = [name for name, value in vars(whole).items() if name not in parts and isinstance(value, int | float | str)]
    unknown = [name for name in table if name not in plain]
    if unknown:
        known = [*lists, *tables, *plain]
        raise InputError(f"{source}: unknown field {unknown[0]}{suggestion(unknown[0], known)}")
    return replace(override(whole, table, source=source), **made)  # type: ignore[type-var]


def emulated(
    *,
    read_config: Callable[..., Narrowed],
    run: Callable[[Narrowed, Told], F],
    needs_cluster: Callable[[Narrowed], bool] = lambda config: True,
    **fields: Any,
) -> Benchmark[EmulatedOptions, Narrowed, F]:
    """Return a benchmark on emulated clusters.

    Args:
        read_config: reads a configuration, the committed one if it is given no file.
        run: measures what is left of it; it starts clusters, one after another, and is told what is measured.
        needs_cluster: whether that takes a cluster at all.
        fields: the others of `Benchmark`.
    """

    def cases(options: EmulatedOptions) -> Narrowed:
        config = read_config(Path(options.config)) if options.config else read_config()
        config = config.narrowed(only=words_of(options.only), repeats=options.repeats)
        if needs_cluster(config):
            require_cluster()
        return config

    return Benchmark(
        options=EmulatedOptions, cases=cases, measure=lambda options, config, told: run(config, told), **fields
    )


def require_cluster() -> None:
    """Make sure that beds can run functions here.

    Raises:
        ModuleNotFoundError: without torch.
        InputError: if this machine cannot emulate clusters; one line says why and what would help.
    """
    from moesaic_testbed import refusal

    import_module("torch")
    missing = refusal()
    if missing:
        raise InputError(missing)


def on_beds(
    jobs: Iterable[J],
    bed_of: Callable[[J], Bed],
    about: Callable[[J], str],
    measure: Callable[[Cluster, J], F],
    told: Told,
) -> list[F]:
    """Measure jobs on emulated clusters, one after another; jobs of one bed that follow each other share its cluster.

    Args:
        jobs: what to measure, each made when its turn has come.
        bed_of: the bed of a job.
        about: a job in words.
        measure: measures a job on a cluster that runs.
        told: hears how many are done, and which one is measured now.
    """
    found: list[F] = []
    with Launcher() as launcher:
        for bed, of_bed in groupby(jobs, key=bed_of):
            with launcher.open(bed) as ranks:
                for job in of_bed:
                    told(f"{len(found)} done; {about(job)}")
                    found.append(measure(ranks, job))
    return found


@contextmanager
def keeping(folder: str | Path | None) -> Iterator[Path]:
    """Give the folder in which what was found is kept, to go on from it; one that is removed in the end for None."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with TemporaryDirectory() as made:
        yield Path(made)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return what a JSON file holds; where there is none it is made first, whole or not at all."""
    if not path.exists():
        write_whole(path, json.dumps(make()))
    return json.loads(path.read_text(encoding="utf-8"))


def each_kept(keep: str | Path | None, runs: Mapping[str, Callable[[], Any]], told: Told) -> Iterator[tuple[str, Any]]:
    """Yield what each run finds, by its name: what the folder has, or what is found now and kept there."""
    with keeping(keep) as folder:
        for name, run in runs.items():
            told(name)
            yield name, kept(folder / f"{name}.json", run)


@contextmanager
def _progress() -> Iterator[Told]:
    """Show what is measured now on the standard error, and in the end how long it took."""
    console, start = Console(stderr=True), time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what: bar.update(task, description=what)
    console.print(f"measured in {time.monotonic() - start:.0f} s")


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
