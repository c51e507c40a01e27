"""The training loop: micro-batches, steps, evaluation, checkpoints, and leaving cleanly."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from moesaic.errors import TrainingError
from moesaic.layer import balance_on_step
from moesaic.routing.losses import set_loss_scale
from moesaic.routing.routing import Routing
from moesaic.runtime.telemetry import LoadMeter, churn, expert_sets
from moesaic.train.checkpoint import list_checkpoints, save_checkpoint
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.data import as_batch
from moesaic.train.machine import matmul_flops_per_second
from moesaic.train.metrics import Metrics
from moesaic.train.progress import TrainingProgress
from moesaic.train.state import RunState, open_run, rng_state


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    folder: Path
    step: int
    """Optimizer steps taken in all."""
    val_nats_per_byte: float | None
    """Of the last evaluation; None if the run was stopped before one."""
    seconds: float
    """Spent in training steps in all, without evaluation."""
    was_stopped: bool
    """True if a signal ended it early; it can be resumed."""


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train a model as configured.

    Args:
        config: the configuration.
        console: where progress goes; None for standard output.

    Raises:
        InputError: for bad input; nothing half-written stays behind.
        TrainingError: if the loss or the gradient is no longer finite; the last checkpoint stays.
    """
    console = console or Console()
    run = open_run(config, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
    return Trainer(run, console).run()


class Trainer:
    """Runs the steps of a `RunState`.

    Args:
        run: what to train.
        console: where progress goes.
    """

    def __init__(self, run: RunState, console: Console) -> None:
        self.state, self.config, self.model = run, run.config, run.model
        self.console = console
        probe_windows = run.eval_windows[: self.config.probe_sequences]
        self.probe = as_batch(run.corpus.val, probe_windows, self.config.model.seq_len)[0]
        self.peak = matmul_flops_per_second(run.device, run.dtype)
        self.meter = LoadMeter()
        self.seconds = run.seconds

    def run(self) -> TrainResult:
        """Train to the last step, or until a signal; returns how it ended."""
        state, config = self.state, self.config
        handle = balance_on_step(state.optimizer, self.model)
        metrics = Metrics(state.folder, start_step=state.step, tensorboard=config.tensorboard)
        val_loss = None
        try:
            with (
                _stop_requests() as stop,
                TrainingProgress(config.steps, state.step, console=self.console, label=state.folder.name) as progress,
            ):
                progress.say(self._describe())
                while state.step < config.steps and not stop:
                    values = self._step()
                    if _due(state.step, config.log_every, config.steps):
                        metrics.write("train", state.step, values | self._interval())
                        progress.advance(state.step, _status(values, self.tokens_per_second))
                    progress.advance(state.step)
                    if _due(state.step, config.eval_every, config.steps):
                        val_loss = self._evaluate(metrics, progress)
                    if _due(state.step, config.save_every, config.steps):
                        self._save()
                if stop and state.step < config.steps:
                    self._save()
                    progress.say(
                        f"stopped by {stop[0]} after step {state.step}, saved; go on with "
                        f"moesaic train --config {state.folder / 'config.json'} --existing resume"
                    )
        finally:
            metrics.close()
            handle.remove()
        return TrainResult(state.folder, state.step, val_loss, self.seconds, state.step < config.steps)

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of this process, evaluation not counted."""
        spent = self.seconds - self.state.seconds
        return self._timed_tokens / spent if spent else 0.0

    _timed_tokens = 0
    _interval_seconds = 0.0
    _interval_tokens = 0

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step; returns its values."""
        start = time.perf_counter()
        config, state = self.config, self.state
        self.model.train()
        loss = torch.zeros((), device=state.device)
        routings: list[Routing] = []
        set_loss_scale(self.model, 1 / config.accumulation)
        for micro in range(config.accumulation):
            tokens, targets = state.batches.get(state.step * config.accumulation + micro)
            with self._autocast():
                output = self.model(tokens.to(state.device), targets.to(state.device))
            assert output.loss is not None
            (output.loss / config.accumulation).backward()
            loss += output.loss.detach() / config.accumulation
            routings = output.routings
            self.meter.add(routings)
        limit = config.optimizer.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        logs = _due(state.step + 1, config.log_every, config.steps)
        saves = _due(state.step + 1, config.save_every, config.steps)
        if state.device.type == "cpu" or logs or saves:  # on a GPU every check waits for the device
            self._require_finite(loss, norm)
        rate = learning_rate(state.step, config.steps, config.optimizer)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        before = self._probe_sets() if logs else []
        self._settle(start)
        start = time.perf_counter()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        self._settle(start, tokens=config.tokens_per_step)
        values: dict[str, Any] = {}
        if logs:
            moved = [churn(a, b) for a, b in zip(before, self._probe_sets())]
            auxiliary = {name: float(value) for name, value in _mean_losses(routings).items()}
            values = {"loss": float(loss), "grad_norm": float(norm), "lr": rate, "churn": moved, **auxiliary}
        return values

    def _settle(self, start: float, tokens: int = 0) -> None:
        """Count time since `start` and tokens as training."""
        spent = time.perf_counter() - start
        self.seconds += spent
        self._interval_seconds += spent
        self._timed_tokens += tokens
        self._interval_tokens += tokens

    def _interval(self) -> dict[str, Any]:
        """Return speed and balance since the last call."""
        speed = self._interval_tokens / max(self._interval_seconds, 1e-9)
        self._interval_tokens, self._interval_seconds = 0, 0.0
        flops = self.model.flops_per_token(self.config.model.seq_len) * speed
        return {
            "tokens_per_second": speed,
            "mfu": flops / self.peak,
            "seconds": self.seconds,
            "layers": [layer.as_dict() for layer in self.meter.take()],
        }

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            return
        what = "loss" if not math.isfinite(float(loss)) else "gradient norm"
        saved = list_checkpoints(self.state.folder / "checkpoints")
        kept = f"the checkpoint {saved[-1]} is intact" if saved else "no checkpoint was written yet"
        raise TrainingError(
            f"the {what} of step {self.state.step + 1} is not finite ({float(loss)}, gradient norm {float(norm)}); {kept}: "
            "lower --optimizer.lr, or raise --optimizer.warmup-steps"
        )

    @torch.no_grad()
    def _evaluate(self, metrics: Metrics, progress: TrainingProgress) -> float:
        """Measure the validation loss; returns nats per byte."""
        state, size = self.state, self.config.batch_size
        self.model.eval()
        total = 0.0
        for first in range(0, len(state.eval_windows), size):
            windows = state.eval_windows[first : first + size]
            tokens, targets = as_batch(state.corpus.val, windows, self.config.model.seq_len)
            with self._autocast():
                output = self.model(tokens.to(state.device), targets.to(state.device))
            total += float(output.loss) * len(windows)
        loss = total / len(state.eval_windows)
        per_byte = loss * len(state.corpus.val) / state.corpus.val_bytes
        values = {"val_loss": loss, "val_nats_per_byte": per_byte, "seconds": self.seconds}
        metrics.write("eval", state.step, values)
        progress.say(
            f"{state.folder.name}: step {state.step}, validation {per_byte:.4f} nats/byte, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        return per_byte

    @torch.no_grad()
    def _probe_sets(self) -> list[Tensor]:
        """Return which experts each token of the fixed probe batch uses, per MoE layer."""
        if self.config.model.ffn == "dense":
            return []
        self.model.eval()
        with self._autocast():
            output = self.model(self.probe.to(self.state.device))
        self.model.train()
        return [expert_sets(routing) for routing in output.routings]

    def _autocast(self) -> torch.autocast:
        on = self.state.dtype != torch.float32
        return torch.autocast(self.state.device.type, self.state.dtype if on else torch.bfloat16, enabled=on)

    def _save(self) -> None:
        state = self.state
        save_checkpoint(
            state.folder / "checkpoints",
            step=state.step,
            model=self.model,
            model_config=self.config.model,
            vocab_size=state.corpus.vocab_size,
            optimizer=state.optimizer,
            extra={
                "rng": rng_state(state.device),
                "precision": self.config.precision,
                "seconds": self.seconds,
                "has_text": state.corpus.tokenizer is not None,
            },
            keep_last=self.config.keep_last,
        )

    def _describe(self) -> str:
        model, corpus = self.model, self.state.corpus
        return (
            f"{self.state.folder.name}: {model.num_parameters() / 1e6:.2f} M parameters, "
            f"{model.num_active_parameters() / 1e6:.2f} M active; {corpus.description}, {len(corpus.train):,} training tokens; "
            f"{self.config.precision} on {self.state.device}, matmul peak {self.peak / 1e9:,.0f} GFLOP/s"
        )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step `step`, counted from 0: linear warm-up, then a cosine to `final_share` of the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.final_share + (1 - config.final_share) * cosine)


def _due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def _status(values: dict[str, Any], speed: float) -> str:
    return f"loss {values['loss']:.3f}  {speed:,.0f} tokens/s"


def _mean_losses(routings: list[Routing]) -> dict[str, Tensor]:
    """Return each auxiliary loss's mean over the layers of the last micro-batch."""
    names = routings[0].losses if routings else {}
    return {name: torch.stack([routing.losses[name] for routing in routings]).mean() for name in names}


@contextmanager
def _stop_requests() -> Iterator[list[str]]:
    """Yield a list that the first SIGINT or SIGTERM puts its name into; the second one has its usual effect."""
    asked: list[str] = []
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for kind in (signal.SIGINT, signal.SIGTERM):
        try:
            before[kind] = signal.signal(kind, ask)
        except ValueError:  # not in the main thread, where signals cannot be handled
            break
    try:
        yield asked
    finally:
        for stopped_by, handler in before.items():
            signal.signal(stopped_by, handler)
