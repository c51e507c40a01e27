"""What a run asks of traces before it starts: that one to replay fits it, and that its own has no step twice."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moesaic.errors import InputError
from moesaic.traces.trace import (
    PATTERN,
    Trace,
    TraceSegment,
    TraceShape,
    differences,
    read_header,
    read_table,
    segments_of,
    steps_in_words,
    write_segment,
)
from moesaic.train.config import TrainConfig
from moesaic.train.durable import checksum


def check_routing(config: TrainConfig, step: int = 0) -> Trace | None:
    """Make sure that a run can record and replay what it is asked to; returns the trace to replay.

    Args:
        config: of the run.
        step: at which it starts.

    Raises:
        InputError: for a model without MoE layers, a router by which tokens do not choose, a trace of another model, of
            counts only, or without some of the steps.
    """
    if config.record_routing == "none" and config.replay_routing is None:
        return None
    option = "replay_routing" if config.replay_routing is not None else f"record_routing={config.record_routing}"
    if not any(config.model.is_sparse(layer) for layer in range(config.model.num_layers)):
        raise InputError(f"{option}: the model has no MoE layers: set model.ffn=moe, or leave it out")
    by_token = config.replay_routing is not None or config.record_routing == "tokens"
    if by_token and config.model.moe.router == "expert_choice":
        raise InputError(
            f"{option}: under model.moe.router=expert_choice tokens do not choose experts: use record_routing=counts, or "
            "another router"
        )
    if config.replay_routing is None:
        return None
    path = Path(config.replay_routing)
    own = Path(config.out).resolve()
    if own in (path.resolve(), *path.resolve().parents):
        raise InputError(f"replay_routing={path}: lies in out={config.out}, which this run writes: choose another out")
    trace = Trace.open(path)
    found = differences(trace.shape, shape_of(config))
    if found:
        raise InputError(f"replay_routing={path}: is of another model or batch, {', '.join(found)}: set the same here")
    if trace.holds != "tokens":
        raise InputError(
            f"replay_routing={path}: holds counts only: record the tokens' experts with --record-routing tokens"
        )
    if set(range(step, config.steps)) - set(trace.steps):
        raise InputError(
            f"replay_routing={path}: holds steps {steps_in_words(trace.steps)}, the run wants {step} to {config.steps - 1}: "
            "set fewer steps, or record more"
        )
    return trace


def shape_of(config: TrainConfig) -> TraceShape:
    """Return the shape of a run's traces."""
    model = config.model
    return TraceShape(
        num_layers=sum(model.is_sparse(layer) for layer in range(model.num_layers)),
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        sequences=config.batch_size,
        seq_len=model.seq_len,
        accumulation=config.accumulation,
    )


def prune(folder: Path, step: int) -> None:
    """Remove from a trace what a run that starts at a step will take anew, or, from step 0, what an earlier run left.

    Raises:
        InputError: if a segment across the step is damaged, or the folder cannot be changed.
    """
    for path in sorted(folder.glob(PATTERN)):
        header = read_header(path) if step else None
        if header is None or header.steps[0] >= step:
            try:
                path.unlink()
            except OSError as error:
                raise InputError(f"trace {path}: cannot be removed ({error.strerror}): check the folder") from error
        elif header.steps[-1] >= step:
            whole = TraceSegment(
                header.shape, header.holds, header.steps, read_table(header), header.groups, header.source
            )
            write_segment(whole.before(step), path)


def digest_of(path: Path) -> str:
    """Return a checksum over the files of a trace."""
    return hashlib.sha256("".join(checksum(segment) for segment in segments_of(path)).encode()).hexdigest()
