"""The folder of a fine-tuning run: what is in it, whose run it is, which checkpoint the run goes on
from, who writes there.

    finetune.json  adapter_config.json  adapter_model.safetensors  tokenizer.json ...  merged/
    checkpoint-100/  adapter_model.safetensors  trainer_state.json  states-0-of-1.safetensors
        finetune.json  complete.json ...

A folder may come from somebody else. PEFT and transformers save into new folders of ours; files get
their places one by one, and checkpoints as a whole. A link, or anything else where a file is to be,
is named before the run begins.

A checkpoint is *sealed* by complete.json, which has the checksums of its other files.
`require_place` refuses what is in a place that something else is to have. `typed` says that a user
typed the path of the folder, which may then be a link.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerState

from moesaic.errors import InputError
from moesaic.files import (
    WRITING,
    entries,
    kind_of,
    leftovers,
    put,
    read_text,
    require_place,
    require_writable,
    system_error,
    write,
)
from moesaic.finetune.options import MERGED, RUN, FinetuneOptions
from moesaic.finetune.states import PATTERN, saved_ranks, states_name
from moesaic.resuming import COMPLETE, Checkpoints, DamagedError, checksum, flush, seal, sealed_sums
from moesaic.train.ranks import Ranks
from moesaic.train.run_folder import LOCK, RunFolder, unwritable
from moesaic.weights.tensor_files import CLAIM

ADAPTERS = "adapter_model.safetensors"
TRAINER_STATE = "trainer_state.json"
"""The adapters, as PEFT names them, and transformers' description of the training so far."""
OF_PEFT = (ADAPTERS, "adapter_config.json", "README.md")
"""All files that PEFT saves."""
CHECKPOINTS = Checkpoints(
    name=re.compile(
        r"checkpoint-([1-9][0-9]{0,11})|\.replaced-checkpoint-([1-9][0-9]{0,11})-[0-9]+"
    ),
    final="checkpoint-",
    replaced=".replaced-checkpoint-{step}-{number}",
    files=(*OF_PEFT, TRAINER_STATE, RUN, COMPLETE, PATTERN),
    texts=("adapter_config.json", "README.md", TRAINER_STATE, RUN, COMPLETE),
    sealed=True,
)
"""What the checkpoints of a fine-tuning run are called, and what they hold."""
OF_TOKENIZERS = (
    "*token*.json",
    "*.model",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "special_tokens_map.json",
)
OF_MODELS = ("model*.safetensors", "*.index.json", "config.json", "generation_config.json")
OF_OTHERS = (".tmp??????", CLAIM)
"""The names under which safetensors writes a file before that gets its own, and the mark of a
folder that a merged model is written into."""
_UNFINISHED = Checkpoints(
    name=re.compile(rf"{re.escape(WRITING)}[0-9a-f]{{8}}-()(?:results|checkpoint|merged)"),
    final=WRITING,
    replaced="",
    files=(*CHECKPOINTS.files, *OF_TOKENIZERS, *OF_MODELS, f"{WRITING}*", *OF_OTHERS),
    texts=CHECKPOINTS.texts,
)
"""Folders into which a killed process was writing."""
KEEP = 2
"""Checkpoints that are kept."""


def require_folder(options: FinetuneOptions, world: int) -> None:
    """Check the folder of a run.

    Raises:
        InputError: it is in use, holds links, or no run of these options to resume.
    """
    folder = Path(options.out)
    require_writable(folder, "--out", makes_parents=True)
    if options.merge and os.path.lexists(folder / MERGED):
        raise InputError(f"{folder / MERGED}: exists: delete it, or choose another --out")
    if not options.resume:
        if os.path.lexists(folder) and (not folder.is_dir() or _others(folder)):
            raise InputError(
                f"--out {folder}: is in use: choose another folder, or --resume the run in it"
            )
        return
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name in (*OF_PEFT, RUN):
                is_folder = False
            elif CHECKPOINTS.name.fullmatch(path.name) or path.name == MERGED:
                is_folder = True
            else:
                is_folder = path.is_dir()  # of others: only links are refused
            require_place(path, "a folder" if is_folder else "a file")
    read_run(options, world)


def saved_steps(out: str) -> list[tuple[str, int]]:
    """Return names of the complete checkpoints of a run, with the times at which they were
    completed, in nanoseconds: they differ from earlier ones if a run has saved meanwhile."""
    saved = []
    for checkpoint in CHECKPOINTS.listed(Path(out), typed=True):
        mark = checkpoint / COMPLETE
        if kind_of(mark) == "a file":
            saved.append((checkpoint.name, mark.lstat().st_mtime_ns))
    return saved


def _others(folder: Path) -> list[Path]:
    """Return what a folder holds besides what a killed start leaves."""
    return [
        path
        for path in folder.iterdir()
        if path.name != LOCK and not path.name.startswith(f"{WRITING}")
    ]


def read_run(options: FinetuneOptions, world: int) -> dict[str, Any]:
    """Return what the folder of a run says of it, and compare that with the options.

    Raises:
        InputError: there is no such run, or it has other options.
    """
    folder = Path(options.out)
    kept = options.kept(world)
    # Each checkpoint has a copy of the description, should the folder's be lost.
    checkpoints = reversed(CHECKPOINTS.listed(folder, typed=True))
    described: dict[str, Any] | None = None
    for place in (folder, *checkpoints):
        table = _table(place / RUN)
        if table.keys() >= {*kept, "contents"} and isinstance(table["contents"], dict):
            described = table
            break
    if described is None:
        raise InputError(
            f"--resume: {folder / RUN} is missing or damaged: start anew without --resume"
        )
    for name, value in kept.items():
        if name != "ranks" and described[name] != value:  # any number of ranks goes on
            flag = f"--{name.replace('_', '-')} {described[name]}"
            raise InputError(
                f"--resume: the run in {folder} has {flag}: give the same, or start in "
                "another --out"
            )
    return described


def _table(path: Path) -> dict[str, Any]:
    """Return a table of JSON; empty if the file is missing, damaged or none."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _require_types(state: TrainerState) -> None:
    """Raise DamagedError if an entry of a trainer's state is of another type than Trainer goes on
    with."""
    numbers = ("epoch", "train_batch_size", "num_input_tokens_seen", "total_flos")
    wrong = [name for name in numbers if not isinstance(getattr(state, name), int | float)]
    if not isinstance(state.log_history, list):
        wrong.append("log_history")
    if not isinstance(state.best_model_checkpoint, str | None):
        wrong.append("best_model_checkpoint")
    if wrong:
        raise DamagedError(f"{TRAINER_STATE} has {wrong[0]}={getattr(state, wrong[0])!r:.60}")


class FinetuneFolder:
    """The folder of a run, which all its ranks use together and the first one writes.

    Args:
        options: name the folder.
        ranks: the ranks of the run.
        contents: hashes of the data and of the model, by "data" and "model"; the first rank's
            count.
    """

    def __init__(self, options: FinetuneOptions, ranks: Ranks, contents: Mapping[str, str]) -> None:
        self.path = Path(options.out)
        self._options = options
        self._ranks = ranks
        self._contents = dict(contents)
        self._claim = RunFolder(self.path)  # with the lock that keeps other processes out

    def claim(self, say: Callable[[str], None]) -> Path | None:
        """Take the folder for this run alone, and return the checkpoint to go on from; None to
        begin.

        Args:
            say: called with one line for each damaged checkpoint that is skipped.

        Raises:
            InputError: on all ranks: another process has the folder, the run has other data or
                another model, or all of its checkpoints are damaged.
        """
        start: Path | None = None
        with self._together():
            if self._ranks.is_first and self._options.resume:
                self._claim.claim()
                self._require_contents()
                self._remove_unfinished()
                start = self._newest(say)
        found = self._ranks.from_first(None if start is None else start.name)
        return None if found is None else self.path / found

    def begin(self) -> None:
        """Make the folder of a new run, and describe the run in it; of a resumed one, write a lost
        description anew."""
        with self._together():
            if not self._ranks.is_first:
                return
            if not self._options.resume:
                self.path.mkdir(parents=True, exist_ok=True)
                self._claim.claim()
                require_folder(self._options, self._ranks.world)
                self._remove_unfinished()
            if _table(self.path / RUN) != self._description:
                write(self.path / RUN, json.dumps(self._description, indent=1) + "\n")

    def release(self) -> None:
        """Let other processes have the folder."""
        self._claim.release()

    def save(
        self, step: int, write_into: Callable[[Path], None], write_own: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint; all ranks call it together.

        Args:
            step: the steps that were taken.
            write_into: writes the adapters and the trainer's state into a new folder; all ranks
                call it together.
            write_own: writes a file of this rank's states.

        Raises:
            InputError: on all ranks: it cannot be written. Earlier checkpoints are kept.
        """
        target = self.path / f"checkpoint-{step}"
        what = f"checkpoint {target} could not be written"
        rest = "earlier checkpoints are intact"
        # Between two blocks all ranks wait for each other.
        with self._together(what, rest):
            unfinished = self._new_folder("checkpoint")
        with self._together(what, rest):
            own = unfinished / states_name(self._ranks.rank, self._ranks.world)
            write_into(unfinished)
            write_own(own)
            own_sum = {own.name: checksum(own)}
        sums_of_ranks = self._ranks.gathered(own_sum)
        with self._together(what, rest):
            if self._ranks.is_first:
                write(unfinished / RUN, json.dumps(self._description, indent=1) + "\n")
                sums: dict[str, Any] = {}
                for of_rank in sums_of_ranks:
                    sums |= of_rank
                for path in CHECKPOINTS.own_files(unfinished):
                    flush(path)
                    # of files of states, the ranks that wrote them have computed it
                    sums.setdefault(path.name, checksum(path))
                seal(unfinished, sums)
                flush(unfinished)
                require_place(target, "a folder")
                CHECKPOINTS.put(unfinished, target, KEEP, typed=True)

    def place(
        self, kind: str, write_into: Callable[[Path], None], *, within: str | None = None
    ) -> None:
        """Let others save into a new folder, then give what they saved its place; all ranks call it
        together.

        Args:
            kind: "results" or "merged".
            write_into: saves into the folder; all ranks call it together.
            within: the name that the folder gets as a whole; None puts its files into the folder of
                the run one by one.

        Raises:
            InputError: on all ranks: it cannot be written.
        """
        target = self.path / within if within else self.path
        what = f"{target}: the {kind} could not be written"
        with self._together(what):
            unfinished = self._new_folder(kind)
        with self._together(what):
            write_into(unfinished)
        with self._together(what):
            if self._ranks.is_first and within is not None:  # as a whole
                for path in sorted(unfinished.iterdir()):
                    flush(path)
                flush(unfinished)
                require_place(target, "nothing")
                os.replace(unfinished, target)
            elif self._ranks.is_first:  # file by file
                files = sorted(unfinished.iterdir())
                for path in files:  # all of them before the first one is put
                    require_place(target / path.name)
                for path in files:
                    put(path, target / path.name)
                unfinished.rmdir()

    def require_places(self, names: list[str]) -> None:
        """Check that files of the results can get their places.

        Raises:
            InputError: on all ranks: there is something else than a file.
        """
        with self._together():
            if self._ranks.is_first:
                for name in names:
                    require_place(self.path / name)

    @property
    def _description(self) -> dict[str, Any]:
        """What the folder says of its run."""
        return {
            "model": self._options.model,
            "data": self._options.data,
            **self._options.kept(self._ranks.world),
            "contents": self._contents,
        }

    def _require_contents(self) -> None:
        """Raise InputError if the run has other data or another model, under whatever names."""
        of_run = read_run(self._options, self._ranks.world)["contents"]
        for name, what in (("data", "other tokens"), ("model", "another model")):
            if of_run.get(name) != self._contents[name]:
                raise InputError(
                    f"--resume: {getattr(self._options, name)} holds {what} than that of the run "
                    f"in {self.path}: give the same, or start in another --out"
                )

    def _newest(self, say: Callable[[str], None]) -> Path | None:
        """Return the newest undamaged checkpoint; None if there is none at all."""
        if not CHECKPOINTS.listed(self.path, typed=True):
            return None
        remedy = "put an undamaged one back, or start in another --out"
        return CHECKPOINTS.newest(self.path, self._checked, say, remedy, typed=True)

    def _checked(self, path: Path) -> Path:
        """Return a checkpoint if all its files match their checksums; DamagedError if not."""
        # the names of its files tell how many ranks wrote it: states of all of them are needed
        num_ranks = saved_ranks(sealed_sums(path))
        states = [states_name(rank, num_ranks) for rank in range(num_ranks)]
        sums = sealed_sums(path, needed=[ADAPTERS, TRAINER_STATE, RUN, *states])
        for name in sums:
            if not CHECKPOINTS.is_own(name):
                raise DamagedError(f"{COMPLETE} lists {name!r:.100}, which no checkpoint has")
        try:
            CHECKPOINTS.require_sums(path, sums, COMPLETE)
            state = TrainerState.load_from_json(str(path / TRAINER_STATE))
            _require_types(state)
        except FileNotFoundError as error:
            raise DamagedError(f"{Path(str(error.filename)).name} is missing") from error
        except DamagedError:
            raise
        except Exception as error:  # of a file that is none, or of a state of other types
            raise DamagedError(
                f"{TRAINER_STATE} or another file cannot be read ({error})"
            ) from error
        if state.global_step != CHECKPOINTS.step_of(path):
            raise DamagedError(
                f"{TRAINER_STATE} is of step {state.global_step}: rename the folder as it was"
            )
        described = _table(path / RUN)
        for name, value in self._description.items():
            if name not in ("model", "data", "ranks") and described.get(name) != value:
                raise DamagedError(f"it is of another run: {RUN} has {name}={described.get(name)}")
        return path

    def _new_folder(self, kind: str) -> Path:
        """Return a new folder below that of the run, of one name on all ranks; the first one makes
        it."""
        name = self._ranks.from_first(f"{WRITING}{secrets.token_hex(4)}-{kind}")
        if self._ranks.is_first:
            (self.path / name).mkdir()
        return self.path / name

    def _remove_unfinished(self) -> None:
        """Delete what was being written when this process failed, or when another was killed."""
        for path in entries(self.path, f"{WRITING}*", typed=True):
            if _UNFINISHED.name.fullmatch(path.name):
                _UNFINISHED.delete(path)
        for path in leftovers(self.path / RUN):
            if kind_of(path) == "a file":
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def _together(self, what: str = "", rest: str = "") -> Iterator[None]:
        """Raise what any rank raises on all ranks; what cannot be written becomes an InputError of
        one line.

        Args:
            what: says what could not be written. If it is given, whatever is raised, unfinished
                files are deleted first. "" names the folder, and deletes nothing.
            rest: says what there is nevertheless.
        """
        with self._ranks.together():
            try:
                yield
            except BaseException as error:
                if what:
                    self._remove_unfinished()
                of_system = system_error(error)
                if of_system is None:
                    raise
                if not what:
                    raise unwritable(self.path, of_system) from error
                reason = f"{of_system.strerror or of_system}: check the folder"
                if of_system.errno in (errno.ENOSPC, errno.EDQUOT):
                    reason = "the disk is full: free space"
                if rest:
                    reason += f"; {rest}"
                raise InputError(f"{what}, {reason}") from error
