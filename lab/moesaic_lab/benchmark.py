"""The frame of every benchmark: its options, cases, measured results, tables, claims and picture.

`moesaic bench NAME` first checks the options, the picture's file name and the machine. A refusal is
one line. Then it measures, prints tables and claims, and writes the JSON and the picture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.configfile import override, read_table
from moesaic.errors import InputError, suggestion
from moesaic.files import require_writable
from moesaic_lab.claims import RESULTS, Claim, Measurement, write_whole
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.measured import machine_in_words
from moesaic_lab.pictures import Panel, check_picture, write_picture
from moesaic_lab.tables import Columns, Marks, claims_table, print_whole, table, write_page
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Launcher

Told = Callable[[str], object]
"""Called with a description of the case that is about to be measured, to show progress."""
WATCH_SECONDS = 0.5
"""Time between two looks at the files that other processes write."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Options of every benchmark."""

    json: str | None = None
    """Write the results to this file as JSON; "-" for standard output."""


@dataclass(frozen=True, kw_only=True)
class DrawnOptions(BenchmarkOptions):
    """Options of a benchmark that can draw a picture."""

    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""


@dataclass(frozen=True, kw_only=True)
class KeptOptions(BenchmarkOptions):
    """Options of a long benchmark that can resume from the parts it has finished."""

    keep: str | None = None
    """Store the result of each part in this folder, and skip parts that already have a result
    there."""


@dataclass(frozen=True, kw_only=True)
class PagedOptions(BenchmarkOptions):
    """Options of a benchmark that writes a page of the documentation."""

    page: str | None = None
    """Also write the results into this page."""


@dataclass(frozen=True, kw_only=True)
class EmulatedOptions(DrawnOptions, KeptOptions):
    """Options of benchmarks on emulated clusters."""

    config: str | None = None
    """Read beds, sizes and methods from this TOML file; by default from the one in the
    repository."""
    only: str | None = None
    """Run only these parts, separated by commas; an unknown name lists all parts."""
    repeats: int | None = None
    """How often each method is timed, in every part; claims about ratios near 1 need at least 30
    repeats."""


O = TypeVar("O", bound=BenchmarkOptions)  # noqa: E741
C = TypeVar("C")
F = TypeVar("F")
T = TypeVar("T")
N = TypeVar("N")
J = TypeVar("J")


class CanNarrow(Protocol):
    """A configuration that can be reduced to some of its parts."""

    def narrowed(self: N, *, only: tuple[str, ...] = ..., repeats: int | None = ...) -> N:
        """Return the configuration of the parts in `only` (all if empty), with another number of
        repeats if given."""
        ...


Narrowed = TypeVar("Narrowed", bound=CanNarrow)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Describes a table that the terminal shows of a benchmark's rows."""

    title: str
    columns: Columns = ()
    """Columns from left to right; () shows all keys of the first row."""
    where: Mapping[str, Sequence[Any]] | None = None
    """By key, the values that a row may have to be shown; None shows all rows."""
    group_by: tuple[str, ...] = ()
    """Keys; a line separates two rows that differ in one of them."""

    def of(self, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
        """Return the table of these rows in a list, which is empty if no row is shown."""
        where = self.where or {}
        chosen = [
            row for row in rows if all(row.get(key) in values for key, values in where.items())
        ]
        return [table(self.title, chosen, self.columns, group_by=self.group_by)] if chosen else []


def _once(options: object) -> Any:
    """Return no cases: most benchmarks need only their options."""
    return None


def _same(results: Any) -> Any:
    """Return the results unchanged, for a benchmark that measures rows."""
    return results


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[O, C, F]):
    """A benchmark: what it measures and how it shows the results. `F` is the type of the
    results."""

    name: str
    """Name in `moesaic bench NAME`, and of the file with its results."""
    description: str
    """Shown by --help."""
    options: type[O]
    notes: str | Callable[[F], str]
    """What a reader must know to judge the figures, or a function that makes it from the
    results."""
    cases: Callable[[O], C] = _once
    """Makes cases, or a configuration of them, from the options; returns None if `measure` needs
    only the options. It refuses invalid options, and options that this machine cannot run."""
    measure: Callable[[O, C, Told], F]
    """Measures the cases and returns the results."""
    rows: Callable[[F], list[dict[str, Any]]] = _same
    """Converts the results to rows of plain data; by default the results are such rows."""
    claims: Callable[[F], list[Claim]]
    """Returns all claims of the benchmark, those included that this run did not measure."""
    columns: Sequence[Shown] | Callable[[F], Sequence[Table]]
    """Tables for the terminal: descriptions of them, or a function that makes them from the
    results."""
    title: str = ""
    """Title of the picture."""
    panels: Callable[[F], Sequence[Panel]] | None = None
    """Makes the panels of the picture; needs options of type `DrawnOptions`."""
    panels_in_a_row: int = 2
    page: Callable[[F], str] | None = None
    """Makes the text of the documentation page; needs options of type `PagedOptions`."""
    page_marks: Marks | None = None
    """The two lines of the page between which the text goes; None if the text is the whole page."""
    packages: tuple[str, ...] = ("torch", "numpy")
    """Packages whose versions the results record."""
    is_command: bool = False
    """Whether the command is `moesaic NAME` instead of `moesaic bench NAME`."""
    is_proof: bool = False
    """Whether the exit code is 1 if a claim does not hold, since that means a bug and not a slow
    machine."""

    def run(self, arguments: Sequence[str]) -> int:
        """Measure, print the tables, write the files that the options name, and return the exit
        code."""
        prog = f"moesaic {self.name}" if self.is_command else f"moesaic bench {self.name}"
        description = f"{self.description}{self._took_last()}"
        options = parse(self.options, arguments, prog=prog, description=description)

        # Refuse what cannot be written or run before anything is measured.
        picture = None
        if isinstance(options, DrawnOptions) and options.picture:
            picture = Path(options.picture)
            check_picture(picture)
        if options.json != "-":
            require_writable(options.json, "--json")
        cases = self.cases(options)

        keep = getattr(options, "keep", None)
        is_resumed = keep is not None and any(Path(keep).glob("[!.]*.json"))
        started = time.monotonic()
        with _progress() as told:
            results = self.measure(options, cases, told)
        seconds = None if is_resumed else time.monotonic() - started

        self.show(results, options, seconds)
        if picture is not None and self.panels is not None:
            write_picture(
                picture,
                self.title,
                self.panels(results),
                self.notes_on(results),
                columns=self.panels_in_a_row,
            )
        if isinstance(options, PagedOptions) and options.page and self.page is not None:
            write_page(Path(options.page), self.page(results), self.page_marks)
        if not self.is_proof:
            return 0
        # `holds` is None, neither true nor false, for a claim without a value or a target.
        return 1 if any(claim.holds is False for claim in self.claims(results)) else 0

    def _took_last(self) -> str:
        """Return a sentence that says how long the run of the committed results took; "" if they do
        not."""
        path = RESULTS / f"{self.name}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if "seconds" not in result:
            return ""
        minutes = max(1, round(result["seconds"] / 60))
        return (
            f" The last committed run took {minutes} min on {machine_in_words(result['machine'])}."
        )

    def show(self, results: F, options: BenchmarkOptions, seconds: float | None) -> None:
        """Print the tables and the claims, and write the JSON.

        Args:
            seconds: as in `Measurement`.
        """
        rows = self.rows(results)
        tables: list[Table] = []
        if callable(self.columns):
            tables += self.columns(results)
        else:
            for shown in self.columns:
                tables += shown.of(rows)
        tables.append(claims_table(self.claims(results)))
        for each in tables:
            print_whole(each, stderr=options.json == "-")
        if options.json:
            measured = Measurement(
                rows=rows,
                claims=self.claims(results),
                notes=self.notes_on(results),
                packages=self.packages,
                seconds=seconds,
            )
            measured.write(options.json)

    def notes_on(self, results: F) -> str:
        """Return what a reader must know to judge these results."""
        return self.notes(results) if callable(self.notes) else self.notes


def summary_of(documentation: str | None) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    return " ".join((documentation or "").split("\n\n")[0].split())


def notes_of(documentation: str | None) -> str:
    """Return the second paragraph of a module's docstring as one line: the notes of most
    benchmarks."""
    return " ".join((documentation or "").split("\n\n")[1].split())


def words_of(only: str | None) -> tuple[str, ...]:
    """Return the words that commas separate in an option's value; () if the option is not set."""
    return tuple(only.split(",")) if only else ()


def require_positive(values: Mapping[str, object], head: str = "") -> None:
    """Raise InputError for the first number that is not above 0. The message has its name, after
    the prefix `head`."""
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
        whole: the configuration with its defaults, a dataclass; the file may set its int, float and
            str fields.
        lists: by the name of a list of tables in the file, the field that it fills and the defaults
            that each of its tables overrides. Lists that fill the same field are concatenated.
        tables: by the name of a table in the file, which is also the name of the field, the
            defaults that it overrides.

    Raises:
        InputError: for an unknown field or a value of the wrong type; names the file and the field.
    """
    table = read_table(path)
    source = f"config {path}"
    changes = dict[str, Any]()
    lists = lists or {}
    tables = tables or {}

    # Lists and tables leave `table`, so that only the plain fields remain for the end.
    for name, (field, default) in lists.items():
        value = table.pop(name, None)
        if value is None:
            continue
        read = _read_list(name, value, default, source)
        changes[field] = (*changes.get(field, ()), *read)
        names = [each.name for each in changes[field] if hasattr(each, "name")]
        if len(set(names)) < len(names):
            raise InputError(f"{source}: two {name} have one name: give each its own")

    for name, default in tables.items():
        value = table.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise InputError(f"{source}: {name} must be a table: write [{name}] above its fields")
        changes[name] = override(default, value, source=source, prefix=f"{name}.")

    parts = {*(field for field, _ in lists.values()), *tables}
    plain = [
        name
        for name, value in vars(whole).items()
        if name not in parts and isinstance(value, int | float | str)
    ]
    unknown = [name for name in table if name not in plain]
    if unknown:
        known = [*lists, *tables, *plain]
        raise InputError(f"{source}: unknown field {unknown[0]}{suggestion(unknown[0], known)}")
    return replace(override(whole, table, source=source), **changes)  # type: ignore[type-var]


def _read_list(name: str, value: object, default: object, source: str) -> list[object]:
    """Return `default` with the values of each table of a list in a file.

    Args:
        name: the list's name.
        value: what the file has under this name.
        source: the file, for messages.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InputError(f"{source}: {name} must be a list of tables: write [[{name}]] above each")
    return [
        override(default, each, source=source, prefix=f"{name}[{number}].")
        for number, each in enumerate(value)
    ]


def emulated(
    *,
    read_config: Callable[..., Narrowed],
    run: Callable[[Narrowed, Told, str | None], F],
    needs_cluster: Callable[[Narrowed], bool] = lambda config: True,
    **fields: Any,
) -> Benchmark[EmulatedOptions, Narrowed, F]:
    """Return a benchmark on emulated clusters.

    Args:
        read_config: reads a configuration from a file, by default from the one in the repository.
        run: measures the narrowed configuration on clusters that it starts one after another,
            reports its progress, and keeps what is measured in a folder, if one is given.
        needs_cluster: whether a narrowed configuration needs a cluster at all.
        fields: the remaining fields of `Benchmark`.
    """

    def cases(options: EmulatedOptions) -> Narrowed:
        config = read_config(Path(options.config)) if options.config else read_config()
        config = config.narrowed(only=words_of(options.only), repeats=options.repeats)
        if needs_cluster(config):
            require_cluster()
        return config

    return Benchmark(
        options=EmulatedOptions,
        cases=cases,
        measure=lambda options, config, told: run(config, told, options.keep),
        **fields,
    )


def require_cluster() -> None:
    """Check that this machine can emulate clusters whose ranks run Python functions.

    Raises:
        ModuleNotFoundError: if torch is not installed.
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
    measure: Callable[[KeptRanks, J], F],
    told: Told,
    keep: str | Path | None = None,
) -> list[F]:
    """Measure jobs on emulated clusters, one after another. Consecutive jobs of the same bed share
    one cluster, which starts unless all that they measure is kept.

    Args:
        jobs: the jobs; a generator may make each one lazily.
        bed_of: returns the bed of a job.
        about: describes a job in words.
        measure: measures a job on a running cluster.
        told: called before each job with the number of finished jobs and the job's description.
        keep: folder that keeps what the ranks measured, job by job.

    Returns:
        the results of `measure`, in the order of the jobs.
    """
    results: list[F] = []
    with Launcher() as launcher:
        for bed, of_bed in groupby(jobs, key=bed_of):
            with closing(KeptRanks(launcher, bed, Path(keep) if keep else None)) as ranks:
                for job in of_bed:
                    ranks.label = about(job)
                    told(f"{len(results)} done; {ranks.label}")
                    results.append(measure(ranks, job))
    return results


@contextmanager
def keeping(folder: str | Path | None) -> Iterator[Path]:
    """Yield the folder in which results are stored, created if missing; for None a temporary one,
    removed at the end."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with TemporaryDirectory() as temporary:
        yield Path(temporary)


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file. If the file is missing, write the result of `make` to it
    first, atomically."""
    if not path.exists():
        write_whole(path, json.dumps(make()))
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def told_of_files(folder: Path, told: Told) -> Iterator[None]:
    """Report each JSON file that other processes write into the folder inside the block, by its
    name."""
    ended = Event()
    seen = set(folder.glob("[!.]*.json"))

    def watch() -> None:
        is_over = False
        # Looks once more after the end, for files that the last processes wrote.
        while not is_over:
            is_over = ended.wait(WATCH_SECONDS)
            new = set(folder.glob("[!.]*.json")) - seen
            seen.update(new)
            for path in sorted(new):
                told(f"{path.stem} is measured")

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def each_kept(
    keep: str | Path | None, runs: Mapping[str, Callable[[], Any]], told: Told
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result of each run: the result stored in the folder, or else a new
    one, which is stored."""
    with keeping(keep) as folder:
        for name, run in runs.items():
            told(name)
            yield name, kept(folder / f"{name}.json", run)


@contextmanager
def _progress() -> Iterator[Told]:
    """Show on standard error what is being measured and, at the end, how long everything took. A
    terminal shows one line that changes; a file gets a line for each case."""
    console = Console(stderr=True)
    start = time.monotonic()

    def line(what: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {what}", highlight=False, soft_wrap=True)

    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda what: bar.update(task, description=what)
    else:
        yield line
    console.print(f"measured in {time.monotonic() - start:.0f} s")
