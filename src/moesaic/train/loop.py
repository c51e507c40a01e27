"""The training loop: micro-batches, steps, evaluation, checkpoints, and leaving cleanly."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from moesaic.errors import TrainingError
from moesaic.layer import MoE, balance_on_step
from moesaic.models.gpt import GPT
from moesaic.models.split import local_part
from moesaic.parallel import clip, gradient_norm
from moesaic.routing.injection import set_loss_scale
from moesaic.routing.routing import Routing
from moesaic.runtime.telemetry import LoadMeter, churn, expert_sets
from moesaic.train.auto_plan import AutoPlanner, Candidates, find_candidates, with_planned
from moesaic.train.balance import ExpertMover, budget_values
from moesaic.train.checkpoint import list_checkpoints, save_checkpoint
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.data import as_batch
from moesaic.train.evaluate import evaluate, share
from moesaic.train.machine import autocast, matmul_flops_per_second
from moesaic.train.metrics import Metrics, NoMetrics
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.progress import Clock, TrainingProgress, status
from moesaic.train.ranks import Ranks
from moesaic.train.record import RoutingObserver, check_routing
from moesaic.train.state import RunState, open_run, rng_state
from moesaic.train.watch import Watch

T = TypeVar("T")
PROBE_SEQUENCES = 2
"""Validation sequences of the fixed batch on which churn is measured."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    folder: Path
    step: int
    """Optimizer steps taken in all."""
    val_nats_per_byte: float | None
    """Of this process's last evaluation, on validation data, per byte of text (per token for `.bin` files). None only if
    the run was stopped before one; a run that is taken up again after its last step is evaluated once more."""
    seconds: float
    """Spent in training steps in all, without evaluation."""
    was_stopped: bool
    """True if a signal ended it early; it can be resumed."""


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train a model as configured; where a process group is initialised, together with its other ranks.

    Args:
        config: the configuration.
        console: where the first rank's progress goes; None for standard output.

    Raises:
        InputError: for bad input; nothing half-written stays behind.
        TrainingError: if the loss, the gradient, a parameter or the validation loss is no longer finite, or another rank has
            died; the last checkpoint stays.
    """
    console = console or Console()
    config = with_planned(config)
    check_routing(config)
    candidates = find_candidates(config)
    run = open_run(config, lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
    trainer = Trainer(run, console if run.ranks.is_first else Console(quiet=True), candidates)
    try:
        with Watch(run.model, run.claim, config.patience, trainer.at, trainer.how_to_go_on):
            return trainer.run()
    finally:
        run.claim.release()


class Trainer:
    """Runs the steps of a `RunState`.

    Args:
        run: what to train.
        console: where progress goes.
        candidates: plans to switch between; None for none.
    """

    def __init__(self, run: RunState, console: Console, candidates: Candidates | None = None) -> None:
        self.state, self.config, self.model = run, run.config, run.model
        self.console = console
        self.ranks = run.ranks
        probe_windows = share(run.eval_windows[:PROBE_SEQUENCES], self.ranks.dp_index, self.ranks.dp)
        self.probe = as_batch(run.corpus.val, probe_windows, self.config.model.seq_len)[0]
        self.peak = self.ranks.world * matmul_flops_per_second(run.device, run.dtype)
        self.meter = LoadMeter()
        self.clock = Clock(run.seconds)
        self.routing = RoutingObserver(run)
        self.planner = AutoPlanner(run, candidates)
        width = min(run.dtype.itemsize, 4)
        self.experts = ExpertMover(run.config, run.model, run.ranks.mesh, run.optimizer, width)

    def run(self) -> TrainResult:
        """Train to the last step, or until a signal; returns how it ended."""
        state, config = self.state, self.config
        handle = balance_on_step(state.optimizer, self.model)
        with self.ranks.together():
            metrics = self._open_metrics()
        val_loss = None
        try:
            with (
                _stop_requests() as stop,
                TrainingProgress(config.steps, state.step, console=self.console, label=state.folder.name) as progress,
            ):
                for line in (self._describe(), *self.planner.describe()):
                    progress.say(line)
                stopped_by = self.ranks.agree_to_stop(stop)
                while state.step < config.steps and not stopped_by:
                    values = self._step()
                    if _due(state.step, config.log_every, config.steps):
                        values |= self._interval()
                        metrics.write("train", state.step, values)
                        progress.advance(state.step, status(values))
                    progress.advance(state.step)
                    if _due(state.step, config.eval_every, config.steps):
                        val_loss = self._evaluate(metrics, progress)
                    if _due(state.step, config.save_every, config.steps):
                        with self.experts.at_home():
                            self._save()
                    stopped_by = self.ranks.agree_to_stop(stop)
                if state.step < config.steps and stopped_by:
                    with self.experts.at_home():
                        self._save()
                    progress.say(f"stopped by {stopped_by} after step {state.step}, saved; go on with {self._resume()}")
                elif val_loss is None:  # taken up again after its last step
                    val_loss = self._evaluate(metrics, progress)
        finally:
            metrics.close()
            handle.remove()
        return TrainResult(state.folder, state.step, val_loss, self.clock.seconds, state.step < config.steps)

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step; returns its values if the step is logged."""
        config, state = self.config, self.state
        logs = _due(state.step + 1, config.log_every, config.steps)
        saves = _due(state.step + 1, config.save_every, config.steps)
        self.planner.before_step()
        started = self.clock.seconds
        with self.clock.training():
            loss, auxiliary = self._accumulate()
            norm = self._gradient_norm()
            clip(self.model.parameters(), norm, config.optimizer.clip_norm or math.inf)
            if state.device.type == "cpu" or logs or saves:  # on a GPU every check waits for the device
                self._require_finite(loss, norm)
            rate = learning_rate(state.step, config.steps, config.optimizer)
            for group in state.optimizer.param_groups:
                group["lr"] = rate
        before = self._probe_sets() if logs else []
        with self.clock.training(config.tokens_per_step):
            self.planner.note_load()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
        self.planner.after_step(self.clock.seconds - started)
        with self.clock.training():  # counts, but says nothing about the plan that ran
            self.experts.after_step()
        if not logs:
            return {}
        values = {"loss": float(loss), "grad_norm": float(norm), "lr": rate, "churn": self._churn(before)}
        return values | self._mean_losses(auxiliary)

    def _gradient_norm(self) -> Tensor:
        if isinstance(self.model, PipelinedGPT):
            assert self.ranks.mesh is not None
            return self.model.gradient_norm(self.ranks.mesh)
        return gradient_norm(self.model.parameters())

    def _accumulate(self) -> tuple[Tensor, list[list[dict[str, Tensor]]]]:
        """Add up the gradient of the step's micro-batches; returns the mean loss and each one's auxiliary losses, by layer."""
        count, state = self.config.accumulation, self.state
        self.model.train()
        set_loss_scale(self.model, 1 / count)
        if (
            self.ranks.dp * self.ranks.pp > 1
        ):  # alike in a tp group, apart in each dp group and stage, a function of the step
            group = self.ranks.dp_index + self.ranks.dp * self.ranks.stage
            torch.manual_seed(hash((self.config.seed, state.step, group)))
        if isinstance(self.model, PipelinedGPT):
            batches = [self._batch(micro) for micro in range(count)]
            loss, routings = self.model.run_step(batches)
            auxiliary = [self._noted(of_micro) for of_micro in routings]
        else:
            loss, auxiliary = self._run_in_turn(self.model)
        return self.ranks.mean(loss), auxiliary

    def _noted(self, routings: list[Routing]) -> list[dict[str, Tensor]]:
        """Add a micro-batch to the load; returns the auxiliary losses of its layers."""
        self.meter.add(routings)
        return [routing.losses for routing in routings]

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a micro-batch of the step."""
        state = self.state
        tokens, targets = state.batches.get(state.step * self.config.accumulation + micro)
        return tokens.to(state.device), targets.to(state.device)

    def _run_in_turn(self, model: GPT) -> tuple[Tensor, list[list[dict[str, Tensor]]]]:
        """Run forward and backward of one micro-batch after the other."""
        count, state = self.config.accumulation, self.state
        loss = torch.zeros((), device=state.device, dtype=torch.promote_types(state.dtype, torch.float32))
        auxiliary = []
        for micro in range(count):
            tokens, targets = self._batch(micro)
            with self.routing.call(state.step, micro), autocast(state.device, state.dtype):
                output = model(tokens, targets)
            assert output.loss is not None
            (output.loss / count).backward()
            loss += output.loss.detach() / count
            auxiliary.append(self._noted(output.routings))
        return loss, auxiliary

    def _interval(self) -> dict[str, Any]:
        """Return speed and balance since the last call."""
        speed = self.clock.interval()
        flops = self.model.flops_per_token(self.config.model.seq_len) * speed
        return {
            "tokens_per_second": speed,
            "mfu": flops / self.peak,
            "seconds": self.clock.seconds,
            "layers": self._of_all_layers([layer.as_dict() for layer in self.meter.take()]),
            **self.planner.values(),
            **self.experts.values(),
            **budget_values(self.model),
        }

    def _of_all_layers(self, own: list[T]) -> list[T]:
        """Return what each MoE layer of the model has, from what those that are here have; all ranks call it together."""
        return list(self.ranks.of_stages(dict(zip(self._layers, own))).values())

    def _mean_losses(self, auxiliary: list[list[dict[str, Tensor]]]) -> dict[str, float]:
        """Return each auxiliary loss's mean over the layers and the micro-batches of a step."""
        own = [
            {name: float(torch.stack([each[name] for each in calls]).mean()) for name in calls[0]}
            for calls in zip(*auxiliary)
        ]
        layers = self._of_all_layers(own)
        return {name: sum(layer[name] for layer in layers) / len(layers) for name in (layers[0] if layers else ())}

    @property
    def _layers(self) -> Sequence[int]:
        """Which of the model's MoE layers are here."""
        if isinstance(self.model, PipelinedGPT):
            return self.model.layers
        return range(sum(isinstance(block.ffn, MoE) for block in self.model.blocks))

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            return
        what = "loss" if not math.isfinite(float(loss)) else "gradient norm"
        raise self._not_finite(what, self.state.step + 1, f"{float(loss)}, gradient norm {float(norm)}")

    def _not_finite(self, what: str, step: int, values: str) -> TrainingError:
        loads = self._of_all_layers([load.nonfinite for load in self.meter.take()])
        wrong = [(layer, copies) for layer, copies in enumerate(loads) if copies]
        since = (
            "; the router of MoE layer {} is the first with weights of NaN, for {} token copies".format(*wrong[0])
            if wrong
            else ""
        )
        return TrainingError(
            f"the {what} of step {step} is not finite ({values}){since}; {self._kept()}: "
            "lower --optimizer.lr, or raise --optimizer.warmup-steps"
        )

    def _evaluate(self, metrics: Metrics | NoMetrics, progress: TrainingProgress) -> float:
        """Measure and write down the validation loss; returns nats per byte."""
        state = self.state
        found = evaluate(
            self.model, state.corpus, state.eval_windows,
            batch_size=self.config.batch_size, dtype=state.dtype, ranks=self.ranks,
        )  # fmt: skip
        if not math.isfinite(found.per_byte):
            raise self._not_finite("validation loss", state.step, str(found.per_token))
        if not metrics.has("eval", state.step):
            values = {"val_loss": found.per_token, "val_nats_per_byte": found.per_byte, "seconds": self.clock.seconds}
            metrics.write("eval", state.step, values)
        speed = self.clock.tokens_per_second
        progress.say(
            f"{state.folder.name}: step {state.step}, validation {found.per_byte:.4f} nats/byte"
            + (f", {speed:,.0f} tokens/s" if speed else "")
        )
        return found.per_byte

    @torch.no_grad()
    def _probe_sets(self) -> list[Tensor]:
        """Return which experts each token of the fixed probe batch uses, per MoE layer."""
        if self.config.model.ffn == "dense":
            return []
        self.model.eval()
        with autocast(self.state.device, self.state.dtype):
            output = self.model(self.probe.to(self.state.device))
        self.model.train()
        return [expert_sets(routing) for routing in output.routings]

    def _churn(self, before: list[Tensor]) -> list[float]:
        """Return for each MoE layer the share of the probe's tokens, over all dp groups, whose experts changed."""
        here = [(churn(a, b) * len(a), len(a)) for a, b in zip(before, self._probe_sets())]
        found = torch.zeros(sum(map(self.config.model.is_sparse, range(self.config.model.num_layers))), 2).double()
        if here:
            found[list(self._layers)] = torch.tensor(here, dtype=torch.float64)
        return [moved / max(tokens, 1) for moved, tokens in self.ranks.total(found).tolist()]

    def _open_metrics(self) -> Metrics | NoMetrics:
        if not self.ranks.is_first:
            return NoMetrics()
        return Metrics(self.state.folder, start_step=self.state.step, tensorboard=self.config.tensorboard)

    def _save(self) -> None:
        state = self.state
        with self.ranks.together():
            state.claim.require()
        self.routing.flush()
        # The step before was checked, but the update may overflow; the earlier checkpoint must outlive that.
        largest = largest_parameter(self.model, self.ranks)
        if not math.isfinite(largest):
            raise self._not_finite("largest parameter", state.step, str(largest))
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
                "seconds": self.clock.seconds,
                "train_tokens": state.fingerprint,
                "has_text": state.corpus.tokenizer is not None,
            },
            keep_last=self.config.keep_last,
            ranks=self.ranks,
        )
        self.planner.save()

    def at(self) -> str:
        """Return what the run is at, in words."""
        return f"step {self.state.step + 1}"

    def how_to_go_on(self) -> str:
        """Return what is saved, and the command that takes the run up again."""
        return f"{self._kept()}: go on with {self._resume()}" if self._saved() else f"{self._kept()}: start it again"

    def _saved(self) -> list[Path]:
        return list_checkpoints(self.state.folder / "checkpoints")

    def _kept(self) -> str:
        saved = self._saved()
        return f"the checkpoint {saved[-1]} is intact" if saved else "no checkpoint was written yet"

    def _resume(self) -> str:
        kept = shlex.quote(str(self.state.folder / "config.json"))
        command = "moesaic" if self.ranks.mesh is None else f"torchrun --nproc-per-node {self.ranks.world} -m moesaic"
        return f"{command} train --config {kept} --existing resume"

    def _describe(self) -> str:
        model, corpus = self.model, self.state.corpus
        return (
            f"{self.state.folder.name}: {model.num_parameters() / 1e6:.2f} M parameters, "
            f"{model.num_active_parameters() / 1e6:.2f} M active; {corpus.description}, {len(corpus.train):,} training tokens; "
            f"{self.config.precision} on {self.state.device}{self._ranks_in_words()}, "
            f"matmul peak {self.peak / 1e9:,.0f} GFLOP/s"
        )

    def _ranks_in_words(self) -> str:
        if self.ranks.mesh is None:
            return ""
        grid = self.ranks.mesh.grid
        stages = f"pp {self.ranks.pp}, each " if self.ranks.pp > 1 else ""
        return f" x {self.ranks.world} ranks ({stages}dp {grid.dp}, tp {grid.tp}; edp {grid.edp}, ep {grid.ep}, etp {grid.etp})"


@torch.no_grad()
def largest_parameter(model: nn.Module, ranks: Ranks) -> float:
    """Return the largest absolute value of any parameter on any rank; not finite if one is not."""
    parts = [local_part(parameter.detach()) for parameter in model.parameters()]
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
    if ranks.mesh is not None:  # a maximum over ranks may lose what is not a number
        largest = largest.nan_to_num(nan=math.inf)
    return float(ranks.largest(largest))


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the rate of step `step`, counted from 0: linear warm-up, then a cosine to `final_share` of the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.final_share + (1 - config.final_share) * cosine)


def _due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


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
