"""Building the parts of a run from its configuration, resuming them from a checkpoint, and loading
a trained model.

The first rank alone reads and writes the run folder and decides what all ranks do; `from_first`
passes its decisions on. A block under `ranks.together()` raises on every rank if it raises on one.
A run with adapters trains small matrices over the frozen model of another run, its base.
"""

from __future__ import annotations

import math
import random
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.configfile import as_json, differing_fields, override, read_table
from moesaic.errors import InputError, in_one_line
from moesaic.files import kind_of, read_bytes, read_text, require_writable
from moesaic.initial_values import SeededDraw, draw_nothing
from moesaic.models.gpt import GPT, reset_weights
from moesaic.parallel import Held
from moesaic.train.adapters import freeze, read_frozen
from moesaic.train.balance import hold_to_budget, make_calls, place_samples
from moesaic.train.checkpoint import (
    CONFIG,
    TOKENIZER,
    Checkpoint,
    identity,
    list_checkpoints,
    load_checkpoint,
    load_into,
)
from moesaic.train.config import TrainConfig
from moesaic.train.data import Batches, Corpus, even_windows, fingerprint
from moesaic.train.holding import choose_holding
from moesaic.train.machine import pick_device, pick_precision
from moesaic.train.numbers import require_same_weights
from moesaic.train.optimizer import make_optimizer
from moesaic.train.parallel import parallelize
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.ranks import Ranks
from moesaic.train.run_folder import (
    CHECKPOINTS,
    HANG,
    RunFolder,
    is_marked,
    read_config,
    unwritable,
)
from moesaic.train.shared_folder import require_shared
from moesaic.train.task import DECODER, TrainingTask
from moesaic.train.tokenizer import AbstractTokenizer, HubTokenizer, make_tokenizer


@dataclass
class RunState:
    """All parts of a run, and the step that it has reached."""

    config: TrainConfig
    """The resolved configuration: `precision` is no longer "auto"."""
    task: TrainingTask
    folder: Path
    corpus: Corpus
    batches: Batches
    """Batches of the training data."""
    eval_windows: list[int]
    """Windows of the validation data."""
    device: torch.device
    dtype: torch.dtype
    """Autocast dtype of the forward pass; float32 turns autocast off. With float64, the parameters
    have this dtype too."""
    model: GPT | PipelinedGPT
    optimizer: torch.optim.Optimizer
    step: int
    """Optimizer steps so far, including skipped ones."""
    skipped: int
    """Steps skipped because their numbers were not finite."""
    left_out: int
    """Samples that rollbacks from spikes passed over, in steps."""
    fingerprint: str
    """Fingerprint of the training tokens."""
    seconds: float
    """Seconds that earlier processes spent in training steps."""
    ranks: Ranks
    """The ranks that share the model."""
    hold: Held
    """What each rank holds whole between the micro-batches of a step."""
    claim: RunFolder
    """The run folder, claimed by the first rank."""
    files: dict[str, str]
    """Texts of the run folder's own files by name, on the first rank. Each checkpoint gets copies
    of them."""
    saved: Checkpoint | None
    """Description of the checkpoint that the run resumed from, if any."""
    base: Checkpoint | None
    """Description of the checkpoint that the run adapts, if it trains adapters."""

    def checkpoints(self) -> list[Path]:
        """Return the run's checkpoints, oldest first."""
        return list_checkpoints(self.folder / CHECKPOINTS)

    def newest_checkpoint(self) -> str:
        """Return in words which checkpoint is intact."""
        saved = self.checkpoints()
        return f"the checkpoint {saved[-1]} is intact" if saved else "no checkpoint was written yet"

    def resume_command(self) -> str:
        """Return the command that resumes the run."""
        command = self.task.command
        if self.ranks.mesh is not None:
            command = f"torchrun --nproc-per-node {self.ranks.world} -m {command}"
        return f"{command} --config {shlex.quote(str(self.folder / CONFIG))} --existing resume"

    def as_extra(self, seconds: float) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors and sizes; `seconds` are those of training
        so far."""
        return {
            "rng": rng_state(self.device),
            "precision": self.config.precision,
            "seconds": seconds,
            "train_tokens": self.fingerprint,
            "skipped": self.skipped,
            "left_out": self.left_out,
            "has_text": self.corpus.tokenizer is not None,
            "base": None if self.base is None else identity(self.base),
        }

    def advice(self) -> str:
        """Return which checkpoint is intact, and how to continue."""
        action = f"go on with {self.resume_command()}" if self.checkpoints() else "start it again"
        return f"{self.newest_checkpoint()}: {action}"


def open_run(
    config: TrainConfig,
    say: Callable[[str], None],
    announce: Callable[[str], None] = lambda _: None,
    task: TrainingTask = DECODER,
) -> RunState:
    """Build a run, or resume it if `config.existing` is "resume".

    Files in an existing folder stay untouched until configuration, data and checkpoint have been
    validated on every rank.

    Args:
        say: receives a line about each thing that is not as expected.
        announce: receives a line before each part that may take long.
        task: what the run trains.

    Raises:
        InputError: for a folder that already holds a run, bad data, or a mesh that does not fit;
            when resuming, also for another architecture, precision or training data. If one rank
            refuses, all do.
    """
    claim = RunFolder(Path(config.out))
    try:
        return _open(config, task, claim, say, announce)
    except BaseException:
        claim.release()
        raise


def _open(
    config: TrainConfig,
    task: TrainingTask,
    claim: RunFolder,
    say: Callable[[str], None],
    announce: Callable[[str], None],
) -> RunState:
    """Read data and checkpoint, and build model and optimizer; all ranks call this together."""
    start = _find_start(config, claim, say, announce)
    config = start.config
    ranks = start.ranks
    saved = start.saved
    earlier = saved or start.base  # the checkpoint whose tokenizer is taken
    data = _read_data(config, task, earlier.folder / TOKENIZER if earlier else None, ranks)
    model, hold = _make_model(start, task, data.corpus.vocab_size, announce)

    with ranks.together():
        optimizer = make_optimizer(model, config.optimizer, start.device)
        if saved is not None:
            _go_on_from(saved, config, model, optimizer, data)
            if ranks.is_first:
                _warn_of_changes(config, saved, claim.path, say)

    files: dict[str, str] = {}
    with ranks.together():
        if ranks.is_first:
            files = _write_folder(claim, config, data.corpus.tokenizer, saved, say)
    extra: Mapping[str, Any] = saved.extra if saved else {}
    return RunState(
        config,
        task,
        folder=claim.path,
        corpus=data.corpus,
        batches=data.batches,
        eval_windows=data.eval_windows,
        fingerprint=data.fingerprint,
        device=start.device,
        dtype=start.dtype,
        model=model,
        optimizer=optimizer,
        step=saved.step if saved else 0,
        skipped=extra.get("skipped", 0),
        left_out=extra.get("left_out", 0),
        seconds=extra.get("seconds", 0.0),
        ranks=ranks,
        hold=hold,
        claim=claim,
        files=files,
        saved=saved,
        base=start.base,
    )


@dataclass(frozen=True)
class _Start:
    """What a run starts from, the same on all ranks."""

    config: TrainConfig
    """With a precision that is no longer "auto"."""
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    """Autocast dtype of the forward pass."""
    saved: Checkpoint | None
    """The checkpoint to resume from, if any."""
    base: Checkpoint | None
    """The checkpoint of the frozen model, for a run with adapters."""


def _find_start(
    config: TrainConfig,
    claim: RunFolder,
    say: Callable[[str], None],
    announce: Callable[[str], None],
) -> _Start:
    """Join the ranks, and find the checkpoints that a run needs; all ranks call this together."""
    torch.set_num_threads(config.threads or torch.get_num_threads())
    device = pick_device(config.device)
    ranks = Ranks.of(config, "cuda" if device.type == "cuda" else "cpu")

    resume_point = _find_resume_point(config, device, ranks, claim, say, announce)
    saved, dtype = ranks.from_first(resume_point)
    require_shared(claim.path, ranks)
    config = override(config, {"precision": str(dtype).removeprefix("torch.")}, source="precision")

    announce(f"{claim.path.name}: reading the data")
    base = None
    with ranks.together():
        if ranks.is_first:
            base = _find_base(config, saved, say)
    base = ranks.from_first(base)
    if base is not None:
        _require_same_base(base, ranks)
    return _Start(config, ranks, device=device, dtype=dtype, saved=saved, base=base)


def _require_same_base(base: Checkpoint, ranks: Ranks) -> None:
    """Raise InputError on all ranks if they see different checkpoints under the path of a base."""
    own = ""
    with suppress(OSError):  # a rank that sees none differs from the first one
        own = identity(base)
    ranks.require_same(
        f"the checkpoint {base.folder}", own, "give every rank the same run in adapters.base"
    )


def _make_model(
    start: _Start, task: TrainingTask, vocab_size: int, announce: Callable[[str], None]
) -> tuple[GPT | PipelinedGPT, Held]:
    """Return this rank's part of the model, and what ranks hold of it between micro-batches. Its
    weights are drawn unless a checkpoint will be read; those of a base are read."""
    config = start.config
    ranks = start.ranks
    is_new = start.saved is None
    with ranks.together():
        model, hold = _build(config, task.make_model, vocab_size, start.device, start.dtype, ranks)
        if is_new:
            millions = model.num_parameters() / 1e6
            folder = Path(config.out).name
            announce(f"{folder}: drawing {millions:,.2f} M parameters on {start.device}")
        _materialise(model, config, start.device, draw=is_new)
        if start.base is not None:
            read_frozen(start.base, model, config.model, vocab_size)
    if is_new:  # processors may round drawn weights differently
        require_same_weights(model, ranks, step=0, advice="start the run again", align=True)
    return model, hold


def _go_on_from(
    saved: Checkpoint,
    config: TrainConfig,
    model: GPT | PipelinedGPT,
    optimizer: torch.optim.Optimizer,
    data: _Data,
) -> None:
    """Read this rank's part of a checkpoint of this run: weights, optimizer states and the states
    of the random generators. Refuse other training data than the checkpoint's."""
    load_into(saved, model, optimizer, config.model, data.corpus.vocab_size)
    _require_same_data(data.fingerprint, saved)
    restore_rng(saved, next(model.parameters()).device)


@dataclass(frozen=True)
class _Data:
    """The data of a run."""

    corpus: Corpus
    batches: Batches
    eval_windows: list[int]
    fingerprint: str


def _read_data(
    config: TrainConfig, task: TrainingTask, tokenizer: Path | None, ranks: Ranks
) -> _Data:
    """Read the data of a run, and check that all ranks have the same.

    Args:
        tokenizer: the tokenizer of the checkpoint from which the run goes on, if it does.
    """
    with ranks.together():
        corpus = task.load_corpus(config, tokenizer)
        data = _Data(
            corpus,
            batches=Batches(
                corpus.train,
                config.model.seq_len,
                config.batch_size,
                config.seed,
                part=(ranks.dp_index, ranks.dp),
                objective=corpus.objective,
            ),
            eval_windows=even_windows(corpus.val, config.model.seq_len, config.evaluate.sequences),
            fingerprint=fingerprint(corpus.train),
        )
    ranks.require_same(
        "the training data", data.fingerprint, "give every rank the same files in data.path"
    )
    ranks.require_same(
        "the validation data",
        fingerprint(data.corpus.val),
        "give every rank the same files in data.path and data.val",
    )
    return data


def _find_resume_point(
    config: TrainConfig,
    device: torch.device,
    ranks: Ranks,
    claim: RunFolder,
    say: Callable[[str], None],
    announce: Callable[[str], None],
) -> tuple[Checkpoint | None, torch.dtype] | None:
    """Return the checkpoint to resume from, if any, and the forward pass's dtype. Only the first
    rank decides; others return None."""
    with ranks.together():
        if ranks.is_first:
            saved = _claim_folder(config, claim, say, announce)
            precision = saved.extra["precision"] if saved else config.precision
            return saved, pick_precision(precision, device, config.matmul_shape)
    return None


def _claim_folder(
    config: TrainConfig,
    claim: RunFolder,
    say: Callable[[str], None],
    announce: Callable[[str], None],
) -> Checkpoint | None:
    """Check that the run may write its folder, lock it if it holds a run already, and return the
    checkpoint to resume from, if any."""
    folder = claim.path
    is_resuming = config.existing == "resume"
    holds_run = claim.is_a_run(resuming=is_resuming)
    if holds_run and config.existing == "refuse":
        raise InputError(
            f"{folder} holds a run already: pass --existing resume, --existing "
            "replace, or another --out"
        )
    if holds_run:
        claim.claim()
    else:
        require_writable(folder, "--out", makes_parents=True)
    if not is_resuming:
        return None
    if not holds_run or not list_checkpoints(folder / CHECKPOINTS):
        say(f"no intact checkpoint in {folder}: starts at step 0")
        return None
    announce(f"{folder.name}: reading the newest checkpoint")
    saved = load_checkpoint(folder / CHECKPOINTS, say)
    _require_resumable(saved)
    _require_same_precision(config, saved)
    return saved


def _build(
    config: TrainConfig,
    make_model: Callable[[TrainConfig, int], GPT],
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
) -> tuple[GPT | PipelinedGPT, Held]:
    """Return this rank's part of the model, on the meta device, and what ranks hold of it between
    micro-batches.

    Args:
        make_model: makes the full model from the configuration and the vocabulary's size.
        dtype: autocast dtype of the forward pass; with float64, the parameters get it too.
        ranks: their mesh is replaced by one with the sharding that is chosen.
    """
    seed_everything(config.seed)
    with torch.device("meta"):
        model: GPT | PipelinedGPT = make_model(config, vocab_size)
        if config.adapters.base:
            freeze(model, config.adapters, None if ranks.mesh is None else ranks.mesh.grid)
    if dtype == torch.float64:
        model.double()

    if ranks.mesh is None:
        if config.balance.moves_samples:
            raise InputError(
                f"balance.samples={config.balance.samples}: one process has nowhere to move "
                "samples: start several ranks with torchrun, or leave it none"
            )
        hold_to_budget(model, config.layer_plan, device)
        return model, "nothing"  # nothing is sharded in one process

    holding = choose_holding(config, model, ranks)
    hold = holding.hold
    mesh = replace(ranks.mesh, shard=holding.shard)
    ranks.mesh = mesh
    # Make the mesh's process groups now, on all ranks, whatever layers their stages have: torch
    # names a group by the number of groups.
    _ = mesh.dense, mesh.sparse

    if ranks.stages is not None:
        assert isinstance(model, GPT)
        model = PipelinedGPT(model, config, ranks.stages, ranks.dp, dtype, device, hold=hold)
    parallelize(
        model,
        mesh,
        config.layer_plan,
        sequence_parallel=config.mesh.sequence_parallel,
        calls=make_calls(config, mesh.grid),
        dtype=dtype if dtype == torch.bfloat16 else None,
        replica_dtype=torch.bfloat16 if config.mesh.replica_precision == "bfloat16" else None,
    )
    if isinstance(model, GPT):
        place_samples(model, mesh, config)
    return model, hold


def _materialise(
    model: GPT | PipelinedGPT, config: TrainConfig, device: torch.device, *, draw: bool
) -> None:
    """Allocate this rank's part of a model. Draw it from the seed, so that no value depends on the
    mesh, unless the weights will be read from a file."""
    parts = model.parts if isinstance(model, PipelinedGPT) else [model]
    try:
        for part in parts:
            part.to_empty(device=device)
        # only now, since `to_empty` may replace the parameters, which the source knows by identity
        source = SeededDraw(config.seed, model) if draw else draw_nothing
        reset_weights(model, config.model.num_layers, source)
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_known and "allocate memory" not in str(error):  # what torch says on a CPU
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"the model does not fit the memory of {device} ({reason:.200}): make model.dim, "
            "model.moe.hidden, model.moe.num_experts or model.num_layers smaller"
        ) from error


def _find_base(
    config: TrainConfig, saved: Checkpoint | None, say: Callable[[str], None]
) -> Checkpoint | None:
    """Return the checkpoint of the frozen model that the run's adapters change; None without
    adapters.

    Args:
        saved: the checkpoint that the run resumes from, if any; its adapters must be over the same
            frozen model.
    """
    if not config.adapters.base:
        if saved is not None and saved.extra.get("base"):
            raise InputError(
                f"adapters.base is empty, but {saved.folder} holds adapters over another run: "
                "name that run, or choose another out"
            )
        return None
    path = Path(config.adapters.base)
    out = Path(config.out).resolve()
    if out in (path.resolve(), *path.resolve().parents):
        raise InputError(
            f"adapters.base={path}: lies in out={config.out}, which this run writes: choose "
            "another out"
        )
    base = load_checkpoint(path / CHECKPOINTS, say)
    if saved is not None and saved.extra.get("base") != identity(base):
        raise InputError(
            f"adapters.base={path}: step {base.step} there is not the model over which the "
            f"adapters in {saved.folder} were trained: put that run back as it was, or name where "
            "it lies"
        )
    return base


@dataclass(frozen=True)
class Trained:
    """A model that a run trained."""

    folder: Path
    """The run folder."""
    config: TrainConfig
    """The run's configuration."""
    model: GPT
    """The model, in evaluation mode."""
    text: AbstractTokenizer | None
    """The tokenizer; None if the run read `.bin` tokens and no tokenizer was named."""

    @property
    def tokenizer(self) -> AbstractTokenizer:
        """The tokenizer, which must be known.

        Raises:
            InputError: if the run's data were `.bin` tokens, which have no text.
        """
        if self.text is None:
            raise InputError(
                f"{self.folder}: the run was trained on .bin tokens, whose text is not known"
            )
        return self.text


def load_trained(folder: Path, device: str = "auto", task: TrainingTask = DECODER) -> Trained:
    """Load the model that a run trained.

    Args:
        folder: the run folder.
        device: the model's device: auto, cpu or cuda.
        task: what the run trained.

    Raises:
        InputError: if there is no run, or it has no checkpoint.
    """

    def say(line: str) -> None:
        print(in_one_line(line), file=sys.stderr)

    try:
        table = read_config(folder / CONFIG, say)
    except InputError as error:
        raise InputError(f"{error}: name the folder that moesaic train wrote") from error
    config = override(TrainConfig(), table, source=str(folder / CONFIG))
    saved = load_checkpoint(folder / CHECKPOINTS, say)
    tokenizer = (
        make_tokenizer(config.data, saved.folder / TOKENIZER) if saved.extra["has_text"] else None
    )
    with torch.device("meta"):
        model = task.make_model(config, saved.vocab_size)
        if config.adapters.base:
            freeze(model, config.adapters, grid=None)
    model.to_empty(device=pick_device(device)).eval()
    # draws no weights; sets what checkpoints lack, such as the frequencies of rotary positions
    model.reset_parameters(draw_nothing)
    base = _find_base(replace(config, out=str(folder)), saved, say)
    if base is not None:
        read_frozen(base, model, config.model, saved.vocab_size)
    load_into(saved, model, optimizer=None, config=config.model, vocab_size=saved.vocab_size)
    return Trained(folder, config, model, text=tokenizer)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, str]:
    """Return the states of torch's generators as hexadecimal text. The data order needs no state;
    it is a function of the step."""
    states = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if device.type == "cuda":
        states["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return states


def restore_rng(checkpoint: Checkpoint, device: torch.device) -> None:
    """Restore the generator states that `rng_state` returned; a GPU's are passed over by a run that
    goes on without one."""
    for kind, text in checkpoint.extra["rng"].items():
        state = _generator_state(text)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)


def _require_resumable(saved: Checkpoint) -> None:
    """Raise InputError if a checkpoint's description lacks fields that a run needs to resume."""
    extra = saved.extra
    try:
        checks = [
            extra["precision"] in ("float32", "bfloat16", "float64"),
            0 <= extra["seconds"] < math.inf,
            type(extra["skipped"]) is int and extra["skipped"] >= 0,
            type(extra["left_out"]) is int and extra["left_out"] >= 0,
            isinstance(extra["train_tokens"], str),
            type(extra["has_text"]) is bool,
        ]
        torch.Generator().set_state(_generator_state(extra["rng"]["cpu"]))
        is_sound = all(checks)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        is_sound = False
    if not is_sound:
        raise InputError(
            f"{saved.folder}: its state.json does not hold what a run left there (precision, "
            "seconds, rng): delete this checkpoint to go on from the one before"
        )


def _generator_state(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _require_same_precision(config: TrainConfig, saved: Checkpoint) -> None:
    """Refuse another precision than that of the checkpoint."""
    before = saved.extra["precision"]
    if config.precision not in ("auto", before):
        raise InputError(
            f"precision={config.precision}: the run is in {before}: pass --precision {before} "
            "or auto, or another --out"
        )


def _require_same_data(fingerprint_now: str, saved: Checkpoint) -> None:
    """Refuse other training tokens than those of the checkpoint."""
    if saved.extra["train_tokens"] != fingerprint_now:
        raise InputError(
            f"the training tokens are not those of the checkpoint of step {saved.step}: the "
            "files, data.path or another field of data changed: restore them, or choose another "
            "--out"
        )


def _warn_of_changes(
    config: TrainConfig, saved: Checkpoint, folder: Path, say: Callable[[str], None]
) -> None:
    """Print one line with the settings that decide the course of training and differ from the
    checkpoint's."""
    path = saved.folder / CONFIG
    if not is_marked(folder / CONFIG):
        say(f"{folder / CONFIG}: was lost or damaged, and is written anew")
    try:
        before = override(TrainConfig(), read_table(path), source=str(path))
    except InputError as error:
        say(f"{folder}: the run's earlier settings cannot be compared with these ({error})")
        return
    changed = [
        line for line in differing_fields(config, before) if line.startswith(_DECIDE_THE_COURSE)
    ]
    if changed:
        say(f"{folder}: resumed with other settings, {', '.join(changed)} (now and before)")


_DECIDE_THE_COURSE = (
    "seed",
    "batch_size",
    "accumulation",
    "optimizer.",
    "model.seq_len",
    "model.moe.load_balance",
    "model.moe.importance",
    "model.moe.z_loss",
    "model.moe.router",
    "model.moe.capacity",
    "adapters.",
)
"""Prefixes of the fields that are worth a warning if they change on resuming. `steps` is missing,
since it is raised on purpose."""


def _write_folder(
    claim: RunFolder,
    config: TrainConfig,
    tokenizer: AbstractTokenizer | None,
    saved: Checkpoint | None,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Create the run folder, and for a new run delete an earlier run's files. Return the texts of
    the run's own files."""
    claim.make()
    try:
        if saved is None:
            claim.clear()
        (claim.path / HANG).unlink(missing_ok=True)  # left by an earlier process
        # The file is used to resume the run; "replace" in it would erase the run that it describes.
        files = {CONFIG: as_json(replace(config, existing="resume"))}
        claim.write(CONFIG, files[CONFIG])
        if isinstance(tokenizer, HubTokenizer):
            files[TOKENIZER] = _write_tokenizer(claim, tokenizer, saved, say)
    except OSError as error:
        raise unwritable(claim.path, error) from error
    return files


def _write_tokenizer(
    claim: RunFolder, tokenizer: HubTokenizer, saved: Checkpoint | None, say: Callable[[str], None]
) -> str:
    """Write the run's tokenizer into its folder unless it is there already. A resumed run takes it
    from the checkpoint. Return its text."""
    path = claim.path / TOKENIZER
    text = tokenizer.text if saved is None else read_text(saved.folder / TOKENIZER)
    if kind_of(path) != "a file" or read_bytes(path) != text.encode():
        claim.write(TOKENIZER, text)
        if saved is not None:
            say(f"{path}: was lost or damaged, and is taken from {saved.folder.name}")
    return text
