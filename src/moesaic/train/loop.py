"""The training loop: micro-batches, optimizer steps, evaluation, checkpoints, and a clean stop on a
signal.

A step runs `accumulation` micro-batches, one after another or two in flight, and then the
optimizer. All ranks run the same loop and meet in collectives, so what a rank decides alone is
agreed first (`Ranks`). After a loss spike the run may roll back: it is opened anew at its last
checkpoint and leaves out the samples up to the spike. Balancing may move experts between ranks;
they return home (`at_home`) before weights are saved or compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from moesaic.comm.process_groups import timeout_of
from moesaic.errors import TrainingError, in_one_line
from moesaic.interleaved import in_flight
from moesaic.layer import MoE, balance_on_step
from moesaic.models.gpt import GPT, flops_per_token
from moesaic.parallel import clip, gradient_norm, micro_batches
from moesaic.routing.injection import set_loss_scale
from moesaic.routing.routing import Routing
from moesaic.runtime.telemetry import LoadMeter
from moesaic.train.auto_plan import (
    Candidates,
    find_candidates,
    name_better_split,
    start_auto,
    with_planned,
)
from moesaic.train.balance import DecisionMeter, ExpertMover, budget_values
from moesaic.train.checkpoint import PLAN_TABLE, Saving, save_checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.evaluate import evaluate, largest_parameter
from moesaic.train.launch import stop_requests
from moesaic.train.machine import autocast, matmul_flops_per_second
from moesaic.train.machines import once_all_ended
from moesaic.train.metrics import Metrics
from moesaic.train.numbers import (
    LossSpikeError,
    Spikes,
    collapsed_routers,
    find_origin,
    require_same_weights,
    weights_not_finite,
    wrong_numbers,
)
from moesaic.train.optimizer import learning_rate
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.progress import Clock, TrainingProgress, status
from moesaic.train.ranks import require_same_config
from moesaic.train.record import RoutingObserver, check_routing
from moesaic.train.run_folder import CHECKPOINTS
from moesaic.train.state import RunState, open_run
from moesaic.train.task import DECODER, TrainingTask
from moesaic.train.watch import Watch

T = TypeVar("T")
AuxiliaryLosses = list[list[dict[str, Tensor]]]
"""The auxiliary losses of a step by name: by micro-batch, then by MoE layer of this rank."""
MOST_RETURNS = 3
"""How often a run may roll back from a spike to the same checkpoint. After that, spikes no longer
roll it back."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    folder: Path
    step: int
    """Optimizer steps taken in total."""
    val_nats_per_byte: float | None
    """Validation loss of this process's last evaluation, per byte of text (per token for `.bin`
    files). None only if the run was stopped before its first evaluation. A run that is resumed
    after its last step is evaluated once more."""
    seconds: float
    """Total seconds spent in training steps, without evaluation."""
    was_stopped: bool
    """True if a signal ended the run early; it can be resumed."""
    got_signal: bool = False
    """Whether this process itself got such a signal, not only another rank."""


def train(
    config: TrainConfig, *, console: Console | None = None, task: TrainingTask = DECODER
) -> TrainResult:
    """Train a model as configured. If a process group is initialised, all its ranks train together.

    Args:
        console: receives the first rank's progress; None for standard output.
        task: what is trained.

    Raises:
        InputError: for bad input; no half-written files are left behind.
        TrainingError: if the loss or gradient of several consecutive steps, a parameter or the
            validation loss is not finite, if ranks hold different copies of a weight, or if another
            rank died. The last checkpoint is kept.
    """
    console = console or Console()
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def say(line: str) -> None:
        if is_first:
            console.print(in_one_line(line), highlight=False, markup=False, soft_wrap=True)

    with _watch_start(config, task) as watch, watch.long():
        require_same_config(config)  # before ranks do different things, which would hang
        is_planned = bool(config.planner.plan)  # which `with_planned` empties
        config = with_planned(config, say)
        check_routing(config)
        candidates = find_candidates(config)
        if not is_planned:
            name_better_split(config, say)
    # samples are numbered by the step that they would have without rollbacks
    next_sample_step: int | None = None
    returns: Counter[int] = Counter()  # rollbacks by the step of their checkpoint
    while True:
        with _watch_start(config, task) as watch, watch.long():
            run = open_run(config, say=say, announce=say, task=task)
            if next_sample_step is not None:
                run.left_out = next_sample_step - run.step
                returns[run.step] += 1
            own_console = console if run.ranks.is_first else Console(quiet=True)
            trainer = Trainer(run, own_console, candidates)
        trainer.rolls_back = config.on_spike == "rollback" and returns[run.step] < MOST_RETURNS
        try:
            return trainer.run()
        except LossSpikeError:  # `run.step` is the step before the spike
            next_sample_step = run.step + 1 + run.left_out
            config = replace(config, existing="resume")
        finally:
            run.claim.release()


def _watch_start(config: TrainConfig, task: TrainingTask) -> Watch:
    """Return a watch over the ranks while they have no model yet."""
    return Watch(
        nn.Module(),
        folder=None,
        patience=config.start_patience,
        step=lambda: "the start",
        advice=lambda: "start the run again",
        command=task.command,
    )


class Trainer:
    """Runs the steps of a `RunState`."""

    def __init__(
        self, run: RunState, console: Console, candidates: Candidates | None = None
    ) -> None:
        self.state = run
        self.config = run.config
        self.model = run.model
        self.console = console
        self.ranks = run.ranks
        self.peak: float | None = None
        """Rate of matrix products of all ranks in FLOP/s; None on CPUs, whose cores they share."""
        if run.device.type != "cpu":
            self.peak = self.ranks.world * matmul_flops_per_second(run.device, run.dtype)
        self.meter = LoadMeter()  # of this rank's MoE layers, between lines of metrics
        self.clock = Clock(run.seconds)
        self.routing = RoutingObserver(run)
        """Records or replays routing, if the run is configured to."""
        self.decisions = DecisionMeter(run.model, run.dtype.itemsize)
        """Collects how the layers were balanced, between lines of metrics."""
        self.spikes = Spikes()
        self.moe_layers = {
            name: part for name, part in run.model.named_modules() if isinstance(part, MoE)
        }
        """The MoE layers of this rank by their names in the model."""
        self._layers: Sequence[int] = range(len(self.moe_layers))
        """Numbers of the model's MoE layers on this rank."""
        if isinstance(run.model, PipelinedGPT):
            self._layers = run.model.layers
        self._watch = Watch(
            run.model,
            folder=run.claim,
            patience=run.config.patience,
            step=lambda: f"step {self.state.step + 1}",
            advice=run.advice,
            command=run.task.command,
        )
        self.rolls_back = False
        """Whether a loss spike rolls the run back to its last checkpoint."""
        self._saving: Saving | None = None
        self._saving_group: str | bool = run.config.save.background
        """Whether checkpoints are written in the background; of several ranks, then their group."""
        self._begin_counts(run)
        self._metrics: Metrics | None = None
        """None on all ranks but the first."""
        self._say: Callable[[str], None] = partial(
            console.print, highlight=False, markup=False, soft_wrap=True
        )
        """Prints a line of progress; it becomes that of the progress bar while there is one."""
        self.auto = start_auto(
            run, candidates, clock=lambda: self.clock.seconds, say=lambda line: self._say(line)
        )
        """Chooses plans while training; None if the run has a fixed one."""
        self.experts = ExpertMover(
            run.config,
            run.model,
            run.ranks.mesh,
            run.optimizer,
            # a run in float64 moves experts as one in float32 does
            element_bytes=min(run.dtype.itemsize, 4),
        )

    def _begin_counts(self, run: RunState) -> None:
        """Begin what is counted from step to step."""
        self._reported_times = [run.seconds] + [0.0] * (1 + run.ranks.world)
        """What `_rank_times` read at its last call: seconds of training, of compute, and of waits
        for each rank."""
        self._skipped_in_row = 0
        """How many of the last steps were skipped, one after the other."""
        self._collapsed: set[str] = set()
        """Names of the layers whose collapsed routers were reported."""

    def run(self) -> TrainResult:
        """Train until the last step or a signal, under a watch over the ranks. Return how the run
        ended."""
        state = self.state
        config = self.config
        val_loss = None
        handle = balance_on_step(state.optimizer, self.model)
        try:
            with (
                self._watch,
                stop_requests() as stop,
                TrainingProgress(
                    config.steps, state.step, console=self.console, label=state.folder.name
                ) as progress,
            ):
                self._open_metrics()
                self._say = progress.say
                progress.say(self._describe())
                stopped_by, _ = self.ranks.agree(stop)
                while state.step < config.steps and not stopped_by:
                    self._step_and_log(progress)
                    with self._watch.long():
                        if self._is_due(config.evaluate.every, state.step):
                            val_loss = self._evaluate()
                        if self._is_due(config.save.every, state.step):
                            self._save()
                    # a checkpoint in the background is finished once all ranks have written it
                    is_busy = self._saving is not None and not self._saving.is_written
                    stopped_by, is_busy = self.ranks.agree(stop, is_busy=is_busy)
                    if not is_busy:
                        self._finish_saving()
                is_early = state.step < config.steps
                with self._watch.long():
                    if is_early:
                        self._save()
                    self._finish_saving()
                    if val_loss is None and not is_early:  # resumed after its last step
                        val_loss = self._evaluate()
                if is_early:
                    progress.say(
                        f"stopped by {stopped_by} after step {state.step}, saved; "
                        f"{once_all_ended()}go on with {state.resume_command()}"
                    )
        finally:
            if self._metrics is not None:
                self._metrics.close()
            handle.remove()
        return TrainResult(
            state.folder,
            state.step,
            val_nats_per_byte=val_loss,
            seconds=self.clock.seconds,
            was_stopped=state.step < config.steps,
            got_signal=bool(stop),
        )

    def _open_metrics(self) -> None:
        """Open the metrics on the first rank."""
        folder = self.state.folder
        step = self.state.step
        with self.ranks.together():
            if self.ranks.is_first:
                self._metrics = Metrics(
                    folder, step, tensorboard=self.config.tensorboard, say=self._say
                )

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a line of metrics, on the first rank."""
        if self._metrics is not None:
            self._metrics.write(kind, step, values)

    def _is_due(self, every: int, step: int) -> bool:
        return step % every == 0 or step == self.config.steps

    def _step_and_log(self, progress: TrainingProgress) -> None:
        """Take one optimizer step, and show how many are done; if its values are due, log and show
        them too."""
        values = self._step()  # empty if they are not due
        step = self.state.step
        if values:
            values |= self._interval()
            self._log("train", step, values)
            progress.advance(step, status(values))
        progress.advance(step)

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step, or skip it if its numbers are wrong. Return the values to log,
        which are empty for steps that are not logged."""
        config = self.config
        state = self.state
        is_logged = self._is_due(config.log_every, state.step + 1)
        self.decisions.drop()  # those of an evaluation since the last step
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
                group["lr"] = rate * group["rate"]  # experts and routers may have other rates
        with self.clock.training(config.tokens_per_step):
            self.decisions.take()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
        self.decisions.add_seconds(self.clock.seconds - started)
        with self.clock.training():  # training time, but not time of the plan that ran
            self.experts.after_step()
        if not is_logged:
            return {}
        return {
            "loss": float(loss),
            "grad_norm": float(norm),
            "lr": rate,
            **self._mean_losses(auxiliary),
        }

    def _gradient_norm(self) -> Tensor:
        """Return the norm of the full model's gradient, (), the same on all ranks."""
        if isinstance(self.model, PipelinedGPT):
            assert self.ranks.mesh is not None
            return self.model.gradient_norm(self.ranks.mesh)
        return gradient_norm(self.model.parameters())

    def _accumulate(self, *, again: bool = False) -> tuple[Tensor, AuxiliaryLosses]:
        """Add up the gradients of the step's micro-batches. Return their mean loss over all ranks,
        (), and the auxiliary losses.

        Args:
            again: whether the same step ran before, so that its routing is already recorded and
                counted.
        """
        count = self.config.accumulation
        state = self.state
        self.model.train()
        self.routing.begin_step()
        set_loss_scale(self.model, 1 / count)  # of the auxiliary losses
        if self.ranks.dp * self.ranks.pp > 1:
            # Noise depends on the step, the dp group and the stage; ranks of a tp group draw the
            # same. `group` is another number for each dp group of each stage.
            group = self.ranks.dp_index + self.ranks.dp * self.ranks.stage
            torch.manual_seed(hash((self.config.seed, state.step, group)))

        if isinstance(self.model, PipelinedGPT):
            batches = [self._batch(micro) for micro in range(count)]
            loss, routings = self.model.run_step(
                batches, lambda micro: self.routing.call(state.step, micro, again=again)
            )
            loss = self.model.agreed(loss, self.ranks)
            return loss, [self._note_load(calls, again=again) for calls in routings]
        if self.config.micro_batches_in_flight > 1:
            loss, auxiliary = self._run_in_flight(self.model, again=again)
        else:
            loss, auxiliary = self._run_in_turn(self.model, again=again)
        return self.ranks.mean(loss), auxiliary

    def _note_load(self, routings: list[Routing], *, again: bool) -> list[dict[str, Tensor]]:
        """Add a micro-batch to the load meter unless `again`. Return the auxiliary losses of its
        layers."""
        if not again:
            self.meter.add(routings)
        return [routing.losses for routing in routings]

    def _batch(self, micro: int) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and targets, (sequences, positions) each, of micro-batch
        `micro` of the current step."""
        state = self.state
        sample_step = state.step + state.left_out
        tokens, targets = state.batches.get(sample_step * self.config.accumulation + micro)
        return tokens.to(state.device), targets.to(state.device)

    def _run_in_turn(self, model: GPT, *, again: bool) -> tuple[Tensor, AuxiliaryLosses]:
        """Run forward and backward of all micro-batches, one after another. Return this rank's mean
        loss, (), and the auxiliary losses; `again` is that of `_accumulate`."""
        num_micro_batches = self.config.accumulation
        state = self.state
        loss_dtype = torch.promote_types(state.dtype, torch.float32)  # at least float32
        mean_loss = torch.zeros((), device=state.device, dtype=loss_dtype)
        auxiliary = []
        # the last micro-batch's backward pass reduces the gradients of all
        for micro in micro_batches(model, num_micro_batches, hold=state.hold):
            tokens, targets = self._batch(micro)
            recording = self.routing.call(state.step, micro, again=again)  # or replaying
            with recording, autocast(state.device, state.dtype):
                output = model(tokens, targets)
            assert output.loss is not None
            part_of_mean = output.loss / num_micro_batches
            part_of_mean.backward()
            mean_loss += part_of_mean.detach()
            auxiliary.append(self._note_load(output.routings, again=again))
        return mean_loss, auxiliary

    def _run_in_flight(self, model: GPT, *, again: bool) -> tuple[Tensor, AuxiliaryLosses]:
        """Run forward and backward of all micro-batches, two at a time. Return this rank's mean
        loss, and the auxiliary losses."""
        count = self.config.accumulation
        state = self.state
        total = torch.zeros(
            (), device=state.device, dtype=torch.promote_types(state.dtype, torch.float32)
        )
        auxiliary: dict[int, list[dict[str, Tensor]]] = {}

        def loss_of(micro: int) -> Tensor:
            """Run a micro-batch forward; return its part of the step's loss."""
            tokens, targets = self._batch(micro)
            with autocast(state.device, state.dtype):
                output = model(tokens, targets)
            assert output.loss is not None
            auxiliary[micro] = self._note_load(output.routings, again=again)
            return output.loss / count

        # Each `next` lets the model run another micro-batch; its last one makes the backward pass
        # reduce gradients, so it may only come when all micro-batches have run forward.
        passes = micro_batches(model, count, hold=state.hold)
        allowed = next(passes)  # number of the last micro-batch that was let run
        for losses in in_flight(loss_of, range(count), at_once=2):
            newest = len(auxiliary) - 1  # number of the last one that has run forward
            while allowed < newest:
                allowed = next(passes)
            loss = torch.stack(losses).sum()
            loss.backward()
            total += loss.detach()
            del losses, loss  # their graph, before the next two start
        next(passes, None)  # runs what stands behind the loop of `micro_batches`
        return total, [auxiliary[micro] for micro in range(count)]

    def _interval(self) -> dict[str, Any]:
        """Return speed and balance since the previous call."""
        speed = self.clock.interval()
        model = self.config.model
        flops = flops_per_token(model, self.model.num_active_parameters(), model.seq_len)
        values: dict[str, Any] = {"tokens_per_second": speed}
        if self.peak:
            values["mfu"] = flops * speed / self.peak
        values["seconds"] = self.clock.seconds
        values["layers"] = self._gather_layers(self._balance())
        if self.state.skipped:
            values["skipped"] = self.state.skipped
        values |= self._rank_times()
        plan = {} if self.auto is None else self.auto.values()
        if plan:
            values["plan"] = plan
        values |= self._of_all_stages(self.decisions.values() | budget_values(self.model))
        values |= self.experts.values()
        return values

    def _of_all_stages(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what was decided in the layers of all stages, from what was decided in this one.
        All ranks call it together."""
        if self.ranks.pp == 1:
            return values
        own = values.get("balance", {"decision_share": 0.0, "layers": []})
        layers = self._gather_layers(own["layers"])
        share = torch.tensor(own["decision_share"], dtype=torch.float64)
        largest = float(self.ranks.largest(share))
        budgets = self._gather_layers(values.get("memory_budget", []))
        merged: dict[str, Any] = {}
        if layers:
            merged["balance"] = {"decision_share": largest, "layers": layers}
        if budgets:
            merged["memory_budget"] = budgets
        return merged

    def _rank_times(self) -> dict[str, Any]:
        """Return, per rank, the seconds of its steps since the previous call, of its programs'
        compute, and of its waits for each rank.

        Only CPU runs report them: a host that queues work on a GPU can measure neither compute nor
        waits.
        """
        if self.ranks.mesh is None or self.state.device.type != "cpu":
            return {}
        transport = self.ranks.mesh.transport
        # in seconds: of training, of compute, and of waits for each rank
        times = [self.clock.seconds, transport.compute, *transport.waited]
        since = [value - before for value, before in zip(times, self._reported_times)]
        self._reported_times = times
        seconds = []
        compute = []
        waited = []
        for row in self.ranks.gathered(since):
            rounded = [round(value, 6) for value in row]
            seconds.append(rounded[0])
            compute.append(rounded[1])
            waited.append(rounded[2:])
        return {"ranks": {"seconds": seconds, "compute": compute, "waited": waited}}

    def _skip_step(self, wrong: str) -> None:
        """Skip a step with wrong numbers, on all ranks. End the run if it is the last of the
        allowed number in a row.

        Args:
            wrong: which number is not finite, in words.
        """
        state = self.state
        most = self.config.nonfinite_steps
        origin = find_origin(self.model, self.ranks, lambda: self._accumulate(again=True))
        state.optimizer.zero_grad()
        for layer in self.moe_layers.values():
            layer.step_counts.zero_()  # the load of this step
        self._skipped_in_row += 1
        if self._skipped_in_row == most:
            if most > 1:
                wrong = f"{wrong}, as were the {most - 1} before it"
            raise self._not_finite(wrong, origin)
        state.step += 1
        state.skipped += 1
        self._log("skipped", state.step, {"why": wrong, "origin": origin})
        self._say(
            f"{wrong}: {origin}; the step is skipped on all ranks ({self._skipped_in_row} in "
            f"a row, {most} end the run)"
        )

    def _not_finite(self, wrong: str, origin: str) -> TrainingError:
        """Return the error that ends the run: what is `wrong`, where that began ("" if it is not
        known), and what to do."""
        where = ": ".join(filter(None, (wrong, origin)))
        remedy = "lower --optimizer.lr, or raise --optimizer.warmup-steps"
        return TrainingError(f"{where}; {self.state.newest_checkpoint()}: {remedy}")

    def _look_for_spike(self, loss: float) -> None:
        """Report a spike of the loss, and roll back to the last checkpoint if the run is configured
        to.

        Raises:
            LossSpikeError: on all ranks, to roll back.
        """
        usual = self.spikes.usual(loss)
        if usual is None:
            return
        self._finish_saving()  # so that `checkpoints` has the one that is being written
        step = self.state.step + 1
        rolls_back = self.rolls_back and bool(self.state.checkpoints())
        self._log("spike", step, {"loss": loss, "usual": usual, "rolled_back": rolls_back})
        line = f"the loss of step {step} leaps to {loss:.4g} from {usual:.4g}"
        if rolls_back:
            self._say(
                f"{line}: going back to {self.state.checkpoints()[-1]}, the samples since are "
                "left out"
            )
            raise LossSpikeError
        hint = ""
        if self.config.on_spike != "rollback":
            hint = "; --on-spike rollback would take the run back"
        self._say(f"{line}, and the run goes on{hint}")

    def _balance(self) -> list[dict[str, object]]:
        """Return the load of this rank's layers since the previous call, as metrics. Report each
        collapsed router once in a run."""
        loads = self.meter.take()
        collapsed = collapsed_routers(loads, list(self.moe_layers), self.config.model.moe.top_k)
        for name in collapsed.keys() - self._collapsed:
            self._say(f"step {self.state.step}: {collapsed[name]}")
        self._collapsed |= collapsed.keys()
        return [load.as_dict() for load in loads]

    def _gather_layers(self, values: list[T]) -> list[T]:
        """Return one value per MoE layer of the whole model, from the values of the layers on this
        rank. All ranks call it together."""
        by_number = dict(zip(self._layers, values))  # `values` may be empty
        return list(self.ranks.merge_stages(by_number).values())

    def _mean_losses(self, auxiliary: AuxiliaryLosses) -> dict[str, float]:
        """Return each auxiliary loss by name, averaged over the layers and micro-batches of a
        step."""
        means_of_layers = []
        for calls in zip(*auxiliary):  # the losses of one layer, of each micro-batch
            means = {}
            for name in calls[0]:
                means[name] = float(torch.stack([losses[name] for losses in calls]).mean())
            means_of_layers.append(means)
        layers = self._gather_layers(means_of_layers)
        if not layers:
            return {}
        return {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}

    def _evaluate(self) -> float:
        """Measure and log the validation loss. Return it in nats per byte."""
        state = self.state
        evaluation = evaluate(
            self.model,
            state.corpus,
            state.eval_windows,
            batch_size=self.config.batch_size,
            dtype=state.dtype,
            ranks=self.ranks,
        )
        if not math.isfinite(evaluation.per_byte):
            wrong = (
                f"the validation loss of step {state.step} is not finite ({evaluation.per_token})"
            )
            raise self._not_finite(wrong, weights_not_finite(self.model, self.ranks))
        with self.experts.at_home():
            require_same_weights(
                self.model, self.ranks, state.step, self.state.advice(), align=False
            )
        losses = {"val_loss": evaluation.per_token, "val_nats_per_byte": evaluation.per_byte}
        self._log("eval", state.step, {**losses, "seconds": self.clock.seconds})
        line = f"{state.folder.name}: step {state.step}, validation {evaluation.per_byte:.4f} "
        line += "nats/byte"
        speed = self.clock.tokens_per_second
        if speed:
            line += f", {speed:,.0f} tokens/s"
        self._say(line)
        return evaluation.per_byte

    def _save(self) -> None:
        """Start to save a checkpoint, with every expert at its home."""
        with self.experts.at_home():
            self._start_saving()

    def _start_saving(self) -> None:
        """Start to save a checkpoint, once the weights of all ranks are finite and equal."""
        state = self.state
        self._finish_saving()
        with self.ranks.together():
            state.claim.require()
            if self._metrics is not None:
                self._metrics.flush()
        self.routing.flush()
        # The last step's gradient was checked, but its update may overflow. The earlier checkpoint
        # must survive that.
        largest = largest_parameter(self.model, self.ranks)
        if not math.isfinite(largest):
            wrong = f"the largest parameter of step {state.step} is not finite ({largest})"
            raise self._not_finite(wrong, weights_not_finite(self.model, self.ranks))
        require_same_weights(self.model, self.ranks, state.step, self.state.advice(), align=True)
        if self._saving_group is True and self.ranks.mesh is not None:
            # Keep the name only: a reference would keep the group alive after torch destroyed it.
            self._saving_group = dist.new_group(timeout=timeout_of(), backend="gloo").group_name
        self._saving = save_checkpoint(
            state.folder / CHECKPOINTS,
            step=state.step,
            model=self.model,
            model_config=self.config.model,
            vocab_size=state.corpus.vocab_size,
            optimizer=state.optimizer,
            extra=state.as_extra(self.clock.seconds),
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
            saving = self._saving
            self._saving = None
            with self._watch.long():
                saving.finish()

    def _plan_table(self) -> dict[str, str]:
        """Return the plan table as a file of a checkpoint, on the first rank; empty on the
        others."""
        table = self.auto.state() if self.auto is not None and self.ranks.is_first else None
        return {} if table is None else {PLAN_TABLE: json.dumps(table) + "\n"}

    def _describe(self) -> str:
        """Return a line on the run: the model, the data, the precision and the device."""
        model = self.model
        corpus = self.state.corpus
        line = (
            f"{self.state.folder.name}: {model.num_parameters() / 1e6:.2f} M parameters, "
            f"{model.num_active_parameters() / 1e6:.2f} M active; {corpus.description}, "
            f"{len(corpus.train):,} training tokens; {self.config.precision} on "
            f"{self.state.device}{self.ranks.in_words()}"
        )
        if self.peak:
            line += f", matmul peak {self.peak / 1e9:,.0f} GFLOP/s"
        if self.state.step:
            line += f"; resumed after step {self.state.step}"
        return line
