"""The training loop: micro-batches, optimizer steps, evaluation, checkpoints, and a clean stop on a signal."""

from __future__ import annotations

import json
import math
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from moesaic.errors import TrainingError
from moesaic.layer import MoE, balance_on_step
from moesaic.models.gpt import GPT, flops_per_token
from moesaic.models.split import local_part
from moesaic.parallel import clip, gradient_norm
from moesaic.routing.injection import set_loss_scale
from moesaic.routing.routing import Routing
from moesaic.runtime.telemetry import LoadMeter, churn, expert_sets
from moesaic.train.auto_plan import Candidates, find_candidates, start_auto, with_planned
from moesaic.train.balance import DecisionMeter, ExpertMover, budget_values
from moesaic.train.checkpoint import PLAN_TABLE, Saving, list_checkpoints, save_checkpoint
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.data import Corpus, as_batch, share
from moesaic.train.machine import autocast, matmul_flops_per_second
from moesaic.train.metrics import Metrics, NoMetrics
from moesaic.train.numbers import (
    LossSpikeError,
    Spikes,
    collapsed_routers,
    find_origin,
    require_same_weights,
    weights_not_finite,
    wrong_numbers,
)
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.progress import Clock, TrainingProgress, status
from moesaic.train.ranks import Ranks
from moesaic.train.record import RoutingObserver, check_routing
from moesaic.train.run_folder import CHECKPOINTS
from moesaic.train.state import RunState, open_run, rng_state
from moesaic.train.task import DECODER, TrainingTask
from moesaic.train.watch import Watch

DECAY_SHARE = 0.2
"""Share of the steps after the warm-up over which the wsd schedule decays (Hu et al. 2024 take 10 to 20 %)."""
T = TypeVar("T")
PROBE_SEQUENCES = 2
"""Number of validation sequences in the fixed batch on which churn is measured."""
MOST_RETURNS = 3
"""How often a run may roll back from a spike to the same checkpoint. After that, spikes no longer roll it back."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    folder: Path
    step: int
    """Optimizer steps taken in total."""
    val_nats_per_byte: float | None
    """Validation loss of this process's last evaluation, per byte of text (per token for `.bin` files). None only if
    the run was stopped before its first evaluation. A run that is resumed after its last step is evaluated once
    more."""
    seconds: float
    """Total seconds spent in training steps, without evaluation."""
    was_stopped: bool
    """True if a signal ended the run early; it can be resumed."""


def train(config: TrainConfig, *, console: Console | None = None, task: TrainingTask = DECODER) -> TrainResult:
    """Train a model as configured. If a process group is initialised, all its ranks train together.

    Args:
        console: receives the first rank's progress; None for standard output.
        task: what is trained.

    Raises:
        InputError: for bad input; no half-written files are left behind.
        TrainingError: if the loss or gradient of several consecutive steps, a parameter or the validation loss is not
            finite, if ranks hold different copies of a weight, or if another rank died. The last checkpoint is kept.
    """
    console = console or Console()
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def say(line: str) -> None:
        if is_first:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    with _watch_start(config):
        config = with_planned(config, say)
        check_routing(config)
        candidates = find_candidates(config)
    next_sample_step: int | None = None
    returns: Counter[int] = Counter()
    while True:
        with _watch_start(config):
            run = open_run(config, say, say, task)
            if next_sample_step is not None:  # the step whose samples come next
                run.left_out = next_sample_step - run.step
                returns[run.step] += 1
            trainer = Trainer(run, console if run.ranks.is_first else Console(quiet=True), candidates)
        trainer.rolls_back = config.on_spike == "rollback" and returns[run.step] < MOST_RETURNS
        try:
            long = (Trainer._save, Trainer._finish_saving, Trainer._evaluate)
            with Watch(run.model, run.claim, config.patience, trainer.step_in_words, trainer.advice, long):
                return trainer.run()
        except LossSpikeError:
            next_sample_step = run.step + 1 + run.left_out
            config = replace(config, existing="resume")
        finally:
            run.claim.release()


def _watch_start(config: TrainConfig) -> Watch:
    """Return a watch over the ranks while they have no model yet."""
    long = (with_planned, find_candidates, open_run)
    return Watch(nn.Module(), None, config.start_patience, lambda: "the start", lambda: "start the run again", long)


class Trainer:
    """Runs the steps of a `RunState`."""

    def __init__(self, run: RunState, console: Console, candidates: Candidates | None = None) -> None:
        self.state, self.config, self.model = run, run.config, run.model
        self.console = console
        self.ranks = run.ranks
        probe_windows = share(run.eval_windows[:PROBE_SEQUENCES], self.ranks.dp_index, self.ranks.dp)
        self.probe = as_batch(run.corpus.val, probe_windows, self.config.model.seq_len, run.corpus.objective)[0]
        self.peak = None  # ranks on CPUs share the cores, so that no rate measured on one of them is theirs
        if run.device.type != "cpu":
            self.peak = self.ranks.world * matmul_flops_per_second(run.device, run.dtype)
        self.meter = LoadMeter()
        self.clock = Clock(run.seconds)
        self.routing = RoutingObserver(run)
        self.decisions = DecisionMeter(run.model, run.dtype.itemsize)
        self.spikes = Spikes()
        self.moe_layers = {name: part for name, part in run.model.named_modules() if isinstance(part, MoE)}
        self.rolls_back = False
        """Whether a loss spike rolls the run back to its last checkpoint."""
        self._saving: Saving | None = None
        self._reported_times = [run.seconds] + [0.0] * (1 + run.ranks.world)
        self._saving_group: str | bool = run.config.save.background
        self._skipped_in_row = 0
        self._collapsed: set[str] = set()
        self._metrics: Metrics | NoMetrics = NoMetrics()
        self._say: Callable[[str], None] = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self.auto = start_auto(run, candidates, lambda: self.clock.seconds, lambda line: self._say(line))
        width = min(run.dtype.itemsize, 4)
        self.experts = ExpertMover(run.config, run.model, run.ranks.mesh, run.optimizer, width)

    def run(self) -> TrainResult:
        """Train until the last step or a signal. Return how the run ended."""
        state, config = self.state, self.config
        handle = balance_on_step(state.optimizer, self.model)
        with self.ranks.together():
            if self.ranks.is_first:
                self._metrics = Metrics(
                    state.folder,
                    start_step=state.step,
                    wandb=config.wandb,
                    tensorboard=config.tensorboard,
                    say=self._say,
                )
        val_loss = None
        try:
            with (
                _stop_requests() as stop,
                TrainingProgress(config.steps, state.step, console=self.console, label=state.folder.name) as progress,
            ):
                self._say = progress.say
                progress.say(self._describe())
                stopped_by, _ = self.ranks.agree(stop)
                while state.step < config.steps and not stopped_by:
                    values = self._step()
                    if values:
                        values |= self._interval()
                        self._metrics.write("train", state.step, values)
                        progress.advance(state.step, status(values))
                    progress.advance(state.step)
                    if self._is_due(config.evaluate.every, state.step):
                        val_loss = self._evaluate()
                    if self._is_due(config.save.every, state.step):
                        with self.experts.at_home():
                            self._save()
                    is_busy = self._saving is not None and not self._saving.is_written
                    stopped_by, is_busy = self.ranks.agree(stop, is_busy=is_busy)
                    if not is_busy:
                        self._finish_saving()
                if state.step < config.steps and stopped_by:
                    with self.experts.at_home():
                        self._save()
                self._finish_saving()
                if state.step < config.steps and stopped_by:
                    progress.say(f"stopped by {stopped_by} after step {state.step}, saved; go on with {self._resume()}")
                elif val_loss is None:  # resumed after its last step
                    val_loss = self._evaluate()
        finally:
            self._metrics.close()
            handle.remove()
        return TrainResult(state.folder, state.step, val_loss, self.clock.seconds, state.step < config.steps)

    def _is_due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step, or skip it if its numbers are wrong. Return the values to log, which are empty for
        steps that are not logged."""
        config, state = self.config, self.state
        logs = self._is_due(config.log_every, state.step + 1)
        self.decisions.drop()
        started = self.clock.seconds
        with self.clock.training():
            loss, auxiliary = self._accumulate()
            norm = self._gradient_norm()
            wrong = wrong_numbers(loss, norm, state.step + 1)
            if wrong:
                self._skip_step(wrong)
                return {}
            self._skipped_in_row = 0
            self._look_for_spike(float(loss))
            clip(self.model.parameters(), norm, config.optimizer.clip_norm or math.inf)
            rate = learning_rate(state.step, config.steps, config.optimizer)
            for group in state.optimizer.param_groups:
                group["lr"] = rate * group["rate"]
        before = self._probe_sets() if logs else []
        with self.clock.training(config.tokens_per_step):
            self.decisions.take()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
        self.decisions.add_seconds(self.clock.seconds - started)
        with self.clock.training():  # training time, but not time of the plan that ran
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

    def _accumulate(self, *, again: bool = False) -> tuple[Tensor, list[list[dict[str, Tensor]]]]:
        """Add up the gradients of the step's micro-batches. Return the mean loss, and each micro-batch's auxiliary
        losses by layer.

        Args:
            again: whether the same step ran before, so that its routing is already recorded and counted.
        """
        count, state = self.config.accumulation, self.state
        self.model.train()
        set_loss_scale(self.model, 1 / count)
        if self.ranks.dp * self.ranks.pp > 1:
            # Noise depends on the step, the dp group and the stage; ranks of a tp group draw the same.
            group = self.ranks.dp_index + self.ranks.dp * self.ranks.stage
            torch.manual_seed(hash((self.config.seed, state.step, group)))
        if isinstance(self.model, PipelinedGPT):
            batches = [self._batch(micro) for micro in range(count)]
            loss, routings = self.model.run_step(batches)
            auxiliary = [self._note_load(of_micro, again=again) for of_micro in routings]
        else:
            loss, auxiliary = self._run_in_turn(self.model, again=again)
        return self.ranks.mean(loss), auxiliary

    def _note_load(self, routings: list[Routing], *, again: bool) -> list[dict[str, Tensor]]:
        """Add a micro-batch to the load meter unless `again`. Return the auxiliary losses of its layers."""
        if not again:
            self.meter.add(routings)
        return [routing.losses for routing in routings]

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of one micro-batch of the current step."""
        state = self.state
        tokens, targets = state.batches.get((state.step + state.left_out) * self.config.accumulation + micro)
        return tokens.to(state.device), targets.to(state.device)

    def _run_in_turn(self, model: GPT, *, again: bool) -> tuple[Tensor, list[list[dict[str, Tensor]]]]:
        """Run forward and backward of all micro-batches, one after another."""
        count, state = self.config.accumulation, self.state
        loss = torch.zeros((), device=state.device, dtype=torch.promote_types(state.dtype, torch.float32))
        auxiliary = []
        for micro in range(count):
            tokens, targets = self._batch(micro)
            with self.routing.call(state.step, micro, again=again), autocast(state.device, state.dtype):
                output = model(tokens, targets)
            assert output.loss is not None
            (output.loss / count).backward()
            loss += output.loss.detach() / count
            auxiliary.append(self._note_load(output.routings, again=again))
        return loss, auxiliary

    def _interval(self) -> dict[str, Any]:
        """Return speed and balance since the previous call."""
        speed = self.clock.interval()
        model = self.config.model
        flops = flops_per_token(model, self.model.num_active_parameters(), model.seq_len)
        return {
            "tokens_per_second": speed,
            **({"mfu": flops * speed / self.peak} if self.peak else {}),
            "seconds": self.clock.seconds,
            "layers": self._gather_layers(self._balance()),
            **({"skipped": self.state.skipped} if self.state.skipped else {}),
            **self._rank_times(),
            **({"plan": plan} if (plan := {} if self.auto is None else self.auto.values()) else {}),
            **self.decisions.values(),
            **self.experts.values(),
            **budget_values(self.model),
        }

    def _rank_times(self) -> dict[str, Any]:
        """Return, per rank, the seconds of its steps since the previous call, of its programs' compute, and of its
        waits for each rank.

        Only CPU runs report them: a host that queues work on a GPU can measure neither compute nor waits.
        """
        if self.ranks.mesh is None or self.state.device.type != "cpu":
            return {}
        transport = self.ranks.mesh.transport
        now = [self.clock.seconds, transport.compute, *transport.waited]
        since, self._reported_times = [value - before for value, before in zip(now, self._reported_times)], now
        table = [[round(value, 6) for value in row] for row in self.ranks.gathered(since)]
        seconds, compute, waited = ([row[0] for row in table], [row[1] for row in table], [row[2:] for row in table])
        return {"ranks": {"seconds": seconds, "compute": compute, "waited": waited}}

    def _skip_step(self, wrong: str) -> None:
        """Skip a step with wrong numbers, on all ranks. End the run if it is the last of the allowed number in a row."""
        state, most = self.state, self.config.nonfinite_steps
        origin = find_origin(self.model, self.ranks, lambda: self._accumulate(again=True))
        state.optimizer.zero_grad()
        for layer in self.moe_layers.values():
            layer.step_counts.zero_()
        self._skipped_in_row += 1
        if self._skipped_in_row == most:
            raise self._not_finite(f"{wrong}, as were the {most - 1} before it" if most > 1 else wrong, origin)
        state.step += 1
        state.skipped += 1
        self._metrics.write("skipped", state.step, {"why": wrong, "origin": origin})
        self._say(
            f"{wrong}: {origin}; the step is skipped on all ranks ({self._skipped_in_row} in a row, {most} end the run)"
        )

    def _not_finite(self, wrong: str, origin: str) -> TrainingError:
        since = f": {origin}" if origin else ""
        return TrainingError(
            f"{wrong}{since}; {self._newest_checkpoint()}: lower --optimizer.lr, or raise --optimizer.warmup-steps"
        )

    def _look_for_spike(self, loss: float) -> None:
        """Report a spike of the loss, and roll back to the last checkpoint if the run is configured to.

        Raises:
            LossSpikeError: on all ranks, to roll back.
        """
        usual = self.spikes.usual(loss)
        if usual is None:
            return
        self._finish_saving()
        step, rolls_back = self.state.step + 1, self.rolls_back and bool(self._saved())
        self._metrics.write("spike", step, {"loss": loss, "usual": usual, "rolled_back": rolls_back})
        line = f"the loss of step {step} leaps to {loss:.4g} from {usual:.4g}"
        if rolls_back:
            self._say(f"{line}: going back to {self._saved()[-1]}, the samples since are left out")
            raise LossSpikeError
        hint = "" if self.config.on_spike == "rollback" else "; --on-spike rollback would take the run back"
        self._say(f"{line}, and the run goes on{hint}")

    def _balance(self) -> list[dict[str, object]]:
        """Return the load of the layers since the previous call. Report each collapsed router once."""
        loads = self.meter.take()
        collapsed = collapsed_routers(loads, list(self.moe_layers), self.config.model.moe.top_k)
        for name in collapsed.keys() - self._collapsed:
            self._say(f"step {self.state.step}: {collapsed[name]}")
        self._collapsed |= collapsed.keys()
        return [load.as_dict() for load in loads]

    def _gather_layers(self, values: list[T]) -> list[T]:
        """Return one value per MoE layer of the whole model, from the values of the layers on this rank. All ranks call
        it together."""
        return list(self.ranks.merge_stages(dict(zip(self._layers, values))).values())

    def _mean_losses(self, auxiliary: list[list[dict[str, Tensor]]]) -> dict[str, float]:
        """Return each auxiliary loss, averaged over the layers and micro-batches of a step."""
        means = [
            {name: float(torch.stack([losses[name] for losses in calls]).mean()) for name in calls[0]}
            for calls in zip(*auxiliary)
        ]
        layers = self._gather_layers(means)
        return {name: sum(layer[name] for layer in layers) / len(layers) for name in (layers[0] if layers else ())}

    @property
    def _layers(self) -> Sequence[int]:
        """Numbers of the model's MoE layers on this rank."""
        if isinstance(self.model, PipelinedGPT):
            return self.model.layers
        return range(len(self.moe_layers))

    def _evaluate(self) -> float:
        """Measure and log the validation loss. Return it in nats per byte."""
        state = self.state
        evaluation = evaluate(
            self.model, state.corpus, state.eval_windows,
            batch_size=self.config.batch_size, dtype=state.dtype, ranks=self.ranks,
        )  # fmt: skip
        if not math.isfinite(evaluation.per_byte):
            wrong = f"the validation loss of step {state.step} is not finite ({evaluation.per_token})"
            raise self._not_finite(wrong, weights_not_finite(self.model, self.ranks))
        with self.experts.at_home():
            require_same_weights(self.model, self.ranks, state.step, self.advice(), align=False)
        if not self._metrics.has("eval", state.step):
            values = {
                "val_loss": evaluation.per_token,
                "val_nats_per_byte": evaluation.per_byte,
                "seconds": self.clock.seconds,
            }
            self._metrics.write("eval", state.step, values)
        speed = self.clock.tokens_per_second
        self._say(
            f"{state.folder.name}: step {state.step}, validation {evaluation.per_byte:.4f} nats/byte"
            + (f", {speed:,.0f} tokens/s" if speed else "")
        )
        return evaluation.per_byte

    @torch.no_grad()
    def _probe_sets(self) -> list[Tensor]:
        """Return, per MoE layer, which experts each token of the fixed probe batch uses."""
        if self.config.model.is_dense:
            return []
        self.model.eval()
        with autocast(self.state.device, self.state.dtype):
            output = self.model(self.probe.to(self.state.device))
        self.model.train()
        return [expert_sets(routing) for routing in output.routings]

    def _churn(self, before: list[Tensor]) -> list[float]:
        """Return, per MoE layer, the share of the probe's tokens whose experts changed, over all dp groups."""
        changed = [(churn(a, b) * len(a), len(a)) for a, b in zip(before, self._probe_sets())]
        layers = self.model.num_sparse if isinstance(self.model, PipelinedGPT) else len(self.moe_layers)
        totals = torch.zeros(layers, 2, dtype=torch.float64)
        if changed:
            totals[list(self._layers)] = torch.tensor(changed, dtype=torch.float64)
        return [moved / max(tokens, 1) for moved, tokens in self.ranks.total(totals).tolist()]

    def _save(self) -> None:
        state = self.state
        self._finish_saving()
        with self.ranks.together():
            state.claim.require()
            self._metrics.flush()
        self.routing.flush()
        sealed: dict[str, Any] = {}
        with self.ranks.together():
            if self.ranks.is_first:
                sealed = state.claim.seal()
        # The last step's gradient was checked, but its update may overflow. The earlier checkpoint must survive that.
        largest = largest_parameter(self.model, self.ranks)
        if not math.isfinite(largest):
            wrong = f"the largest parameter of step {state.step} is not finite ({largest})"
            raise self._not_finite(wrong, weights_not_finite(self.model, self.ranks))
        require_same_weights(self.model, self.ranks, state.step, self.advice(), align=True)
        if self._saving_group is True and self.ranks.mesh is not None:
            # Keep the name only: a reference would keep the group alive after torch destroyed it.
            self._saving_group = dist.new_group(backend="gloo").group_name
        self._saving = save_checkpoint(
            state.folder / CHECKPOINTS,
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
                "skipped": state.skipped,
                "left_out": state.left_out,
                "has_text": state.corpus.tokenizer is not None,
                "sealed": sealed,
            },
            keep_last=self.config.save.keep,
            files=state.files | self._plan_table(),
            ranks=self.ranks,
            background=self._saving_group,
        )
        if not self._saving_group:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Publish the checkpoint that is being written, if any. All ranks call it together."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.finish()

    def step_in_words(self) -> str:
        """Return the step that the run is in, in words."""
        return f"step {self.state.step + 1}"

    def advice(self) -> str:
        """Return which checkpoint is intact, and the command that resumes the run."""
        return (
            f"{self._newest_checkpoint()}: go on with {self._resume()}"
            if self._saved()
            else f"{self._newest_checkpoint()}: start it again"
        )

    def _plan_table(self) -> dict[str, str]:
        """Return the plan table as a file of a checkpoint, on the first rank; empty on the others."""
        table = self.auto.state() if self.auto is not None and self.ranks.is_first else None
        return {} if table is None else {PLAN_TABLE: json.dumps(table) + "\n"}

    def _saved(self) -> list[Path]:
        return list_checkpoints(self.state.folder / CHECKPOINTS)

    def _newest_checkpoint(self) -> str:
        saved = self._saved()
        return f"the checkpoint {saved[-1]} is intact" if saved else "no checkpoint was written yet"

    def _resume(self) -> str:
        config_file = shlex.quote(str(self.state.folder / "config.json"))
        command = self.state.task.command
        if self.ranks.mesh is not None:
            command = f"torchrun --nproc-per-node {self.ranks.world} -m {command}"
        return f"{command} --config {config_file} --existing resume"

    def _describe(self) -> str:
        model, corpus = self.model, self.state.corpus
        return (
            f"{self.state.folder.name}: {model.num_parameters() / 1e6:.2f} M parameters, "
            f"{model.num_active_parameters() / 1e6:.2f} M active; {corpus.description}, {len(corpus.train):,} training tokens; "
            f"{self.config.precision} on {self.state.device}{self._ranks_in_words()}"
            + (f", matmul peak {self.peak / 1e9:,.0f} GFLOP/s" if self.peak else "")
            + (f"; resumed after step {self.state.step}" if self.state.step else "")
        )

    def _ranks_in_words(self) -> str:
        if self.ranks.mesh is None:
            return ""
        grid = self.ranks.mesh.grid
        stages = f"pp {self.ranks.pp}, each " if self.ranks.pp > 1 else ""
        return f" x {self.ranks.world} ranks ({stages}dp {grid.dp}, tp {grid.tp}; edp {grid.edp}, ep {grid.ep}, etp {grid.etp})"


@dataclass(frozen=True)
class Evaluation:
    """A model's loss on validation data, in nats."""

    per_token: float
    """Mean cross-entropy of the next token."""
    per_byte: float
    """The same loss per byte of the text behind the tokens, which makes different tokenizers comparable."""


@torch.no_grad()
def evaluate(
    model: GPT | PipelinedGPT,
    corpus: Corpus,
    windows: list[int],
    *,
    batch_size: int,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Measure a model on windows of the validation data, and restore its training mode.

    With several ranks, each data-parallel group takes its part of every batch, which may be empty. Batches, and with
    them capacities and drops, are therefore the same as with one process.

    Args:
        model, corpus: the run's model and data.
        ranks: the ranks that share the model; None for one process.
        windows: numbers of the sequences of validation data to measure.
        batch_size: sequences per forward pass.
        dtype: autocast dtype of the forward pass; float32 turns autocast off.
    """
    ranks = ranks or Ranks()
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(windows), batch_size):
        chosen = share(windows[first : first + batch_size], ranks.dp_index, ranks.dp)
        tokens, targets = as_batch(corpus.val, chosen, model.config.seq_len, corpus.objective)
        with autocast(device, dtype):
            output = model(tokens.to(device), targets.to(device))
        if chosen:
            loss: Tensor = output.loss
            total += loss.double() * len(chosen)
    model.train(was_training)
    per_token = float(ranks.mean(total)) * ranks.dp / len(windows)
    return Evaluation(per_token, per_token * len(corpus.val) / corpus.val_bytes)


@torch.no_grad()
def largest_parameter(model: nn.Module, ranks: Ranks) -> float:
    """Return the largest absolute value of all parameters on all ranks. The result is not finite if any parameter is
    not."""
    parts = [local_part(parameter.detach()) for parameter in model.parameters()]
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
    if ranks.mesh is not None:  # a maximum over ranks may drop a NaN
        largest = largest.nan_to_num(nan=math.inf)
    return float(ranks.largest(largest))


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warm-up, then a decay to `final_share` of the
    peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1)
    if config.schedule == "wsd":
        progress = 1 - (1 - progress) / DECAY_SHARE  # below 0 while the rate is stable
    progress = min(max(progress, 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.final_share + (1 - config.final_share) * left)


@contextmanager
def _stop_requests() -> Iterator[list[str]]:
    """Yield a list to which the first SIGINT or SIGTERM appends its name. A second signal has its usual effect."""
    received: list[str] = []
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for kind in (signal.SIGINT, signal.SIGTERM):
        try:
            before[kind] = signal.signal(kind, ask)
        except ValueError:  # outside the main thread, signals cannot be handled
            break
    try:
        yield received
    except RuntimeError:
        if dist.is_initialized() and before:  # torchrun sends SIGTERM to the remaining ranks; let them report first
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for stopped_by, handler in before.items():
            signal.signal(stopped_by, handler)
