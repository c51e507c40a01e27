"""The routed experts that vLLM and SGLang return with a request: an array (tokens, MoE layers,
top_k) of experts.

vLLM    the array as `.npy`, or a JSON response of the server. In the response, "routed_experts" is
        a nested list or the base64 text of an `.npy`, and "prompt_routed_experts", if any, comes
        before it.
SGLang  a JSON response. "routed_experts" is base64 text of flat int32, in "meta_info" or in a
        choice's "sgl_ext". The response lacks the shape: add `"shape": [tokens, layers, top_k]`, or
        give --top-k if the response has the numbers of tokens.

A folder has a file per request, read in the order of their names. If all requests are equally long,
each becomes a sequence; otherwise all together become one sequence. `typed` says that a user typed
the path, which may then be a link.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InputError
from moesaic.files import entries, read_text, write, writing
from moesaic.traces.arrays import array_of, read_array
from moesaic.traces.formats.base import (
    DAMAGED,
    ReadOptions,
    TraceFormat,
    require_tokens,
    sent,
    tokens_segment,
)
from moesaic.traces.trace import Trace, TraceSegment

FIELD = "routed_experts"
PROMPT = "prompt_routed_experts"
MAGIC = b"\x93NUMPY"


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read a request, or a folder of requests, as one step.

    Raises:
        InputError: a file has no routed experts, or requests have different layers or top-k.
    """
    listed = entries(path, typed=True) if path.is_dir() else [path]
    files = [item for item in listed if item.suffix in (".npy", ".json")]
    requests = [experts for file in files for experts in _requests(file, options)]
    if not requests:
        raise InputError(
            f"trace {path}: holds no request in a .npy or .json file: name what vLLM or SGLang "
            "returned"
        )
    if len({experts.shape[1:] for experts in requests}) > 1:
        raise InputError(
            f"trace {path}: its requests have different layers or top-k: keep those of one model"
        )
    is_equally_long = len({len(experts) for experts in requests}) == 1
    of_layers = np.concatenate(requests).transpose(1, 0, 2)  # (layers, tokens, top_k)
    table = of_layers[None, None]  # one step of one micro-batch
    return tokens_segment(
        table,
        steps=[0],
        sequences=len(requests) if is_equally_long else 1,
        num_experts=options.num_experts,
        source={"format": "routed experts", "requests": len(requests)},
    )


def write_vllm(trace: Trace, path: Path) -> None:
    """Write a folder of int16 `.npy` files, a request for each step, micro-batch and sequence."""
    for name, experts in _sequences(trace, path, "vllm"):
        with writing(path / f"{name}.npy") as file:
            np.save(file, experts.astype(np.int16))


def write_sglang(trace: Trace, path: Path) -> None:
    """Write a folder of JSON responses, a request for each step, micro-batch and sequence."""
    for name, experts in _sequences(trace, path, "sglang"):
        text = base64.b64encode(experts.astype("<i4").tobytes()).decode("ascii")
        answer = {"meta_info": {FIELD: text}, "shape": list(experts.shape)}
        write(path / f"{name}.json", json.dumps(answer))


def _sequences(trace: Trace, folder: Path, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Create the folder and yield a file name and the experts of each sequence, (tokens, layers,
    top_k)."""
    require_tokens(trace, name)
    folder.mkdir(parents=True, exist_ok=True)
    for step in trace.steps:
        for micro in range(trace.shape.accumulation):
            of_layers = [
                sent(trace.experts(layer, step, micro).astype(np.int64))
                for layer in range(trace.shape.num_layers)
            ]
            experts = np.stack(of_layers, axis=1)
            for number, sequence_experts in enumerate(np.split(experts, trace.shape.sequences)):
                yield f"step{step:06d}-{micro}-{number:04d}", sequence_experts


def _requests(file: Path, options: ReadOptions) -> list[np.ndarray]:
    """Read the experts of each request in a file, (tokens, layers, top_k) int64."""
    try:
        if file.suffix == ".npy":
            requests = [read_array(file)]
        else:
            found = json.loads(read_text(file))
            answers = found if isinstance(found, list) else [found]
            requests = [_request(answer, options) for answer in answers]
    except DAMAGED as error:
        raise InputError(
            f"trace {file}: holds no routed experts ({error}): name what vLLM or SGLang returned"
        ) from error
    for experts in requests:
        if experts.ndim != 3 or experts.dtype.kind not in "iu":
            raise InputError(
                f"trace {file}: has shape {experts.shape}: it must hold whole numbers (tokens, "
                "layers, top_k)"
            )
    return [experts.astype(np.int64) for experts in requests]


def _request(answer: Any, options: ReadOptions) -> np.ndarray:
    """Return the experts of a response, (tokens, layers, top_k)."""
    choices = answer.get("choices") or []
    if len(choices) > 1:  # their numbers of tokens are counted together
        raise ValueError(f"it has {len(choices)} choices: ask for one, n=1")
    values = [_field(answer, name) for name in (PROMPT, FIELD)]
    return np.concatenate([_array(value, answer, options) for value in values if value])


def _field(answer: Any, name: str) -> Any:
    """Return a field of the response, of its meta_info, of its only choice, or of their sgl_ext;
    None if it is missing."""
    places = [answer, answer.get("meta_info"), *(answer.get("choices") or [])]
    places += [place.get("sgl_ext") for place in places if isinstance(place, dict)]
    for place in places:
        if isinstance(place, dict) and place.get(name):
            return place[name]
    return None


def _array(value: Any, answer: Any, options: ReadOptions) -> np.ndarray:
    """Decode experts, (tokens, layers, top_k), from a nested list, base64 of an .npy, or base64 of
    flat int32.

    Args:
        value: a field of the response.
        answer: the whole response, which may give the shape.
    """
    if isinstance(value, list):
        return np.array(value)
    data = base64.b64decode(value, validate=True)
    if data.startswith(MAGIC):
        return array_of(io.BytesIO(data), len(data))
    flat = np.frombuffer(data, dtype="<i4")
    if "shape" in answer:
        return flat.reshape(answer["shape"])
    prompt_tokens = _field(answer, "prompt_tokens")
    generated_tokens = _field(answer, "completion_tokens")
    are_numbers = isinstance(prompt_tokens, int) and isinstance(generated_tokens, int)
    if options.top_k is None or not are_numbers:
        raise ValueError(
            'SGLang responses lack the shape: add "shape": [tokens, layers, top_k], or give --top-k'
        )
    num_routed = prompt_tokens + generated_tokens - 1  # the last generated token is not routed
    return flat.reshape(num_routed, -1, options.top_k)


VLLM = TraceFormat(software="vLLM", reader=read, write=write_vllm)
SGLANG = TraceFormat(software="SGLang", reader=read, write=write_sglang)
