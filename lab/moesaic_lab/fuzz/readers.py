"""All file readers of Moesaic, each with a valid file to start from.

A test lists every function of the library that reads a file and checks that each of them is reached
from here.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import tokenizers
import torch
import transformers
from pyarrow import parquet
from rich.console import Console
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver

from moesaic.cli import main
from moesaic.configfile import as_json, override, read_table
from moesaic.errors import InputError, TrainingError
from moesaic.finetune.data import sequences
from moesaic.finetune.folder import require_folder
from moesaic.finetune.options import RUN, FinetuneOptions
from moesaic.finetune.states import read_states, write_states
from moesaic.planner import cluster
from moesaic.planner.cluster import read_cluster
from moesaic.planner.emit import from_flags
from moesaic.planner.plan_files import read_planned, write_plan
from moesaic.planner.plan_table import PlanTable
from moesaic.planner.presets import read_job
from moesaic.planner.workload import read_counts
from moesaic.program.plan import Plan
from moesaic.report.page import write_page
from moesaic.report.summary import read_runs
from moesaic.resuming import COMPLETE, DamagedError, checksum, require_sealed, sealed_sums
from moesaic.storage.nested import dumped, read_nested, write_nested
from moesaic.storage.shards import INDEX, write_tensors
from moesaic.traces.formats import FORMATS, ReadOptions
from moesaic.traces.load import faults
from moesaic.traces.trace import Trace, read_header, segment_name, write_segment
from moesaic.traces.trace import read_table as read_trace_table
from moesaic.train.auto_plan import read_plan_table
from moesaic.train.checkpoint import SUMS, load_checkpoint
from moesaic.train.config import DataConfig, TrainConfig
from moesaic.train.data import load_corpus
from moesaic.train.documents import read_documents
from moesaic.train.loop import train
from moesaic.train.metrics import METRICS, read_metrics
from moesaic.train.run_folder import HANG, RunFolder
from moesaic.train.shard_metadata import read_list
from moesaic.train.state import open_run
from moesaic.train.tokenizer import HubTokenizer
from moesaic.train.watch import read_hang
from moesaic.transformers import resume
from moesaic.weights.checkpoint import open_checkpoint
from moesaic.weights.contents import contents_of
from moesaic.weights.convert import convert, verify
from moesaic.weights.hub import Hub
from moesaic.weights.layout import Readable, full_region
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.source import companions, read_config
from moesaic.weights.tensor_files import read_dcp, read_safetensors, read_shards
from moesaic_lab.fuzz.examples import TUNE
from moesaic_lab.paper_train.data import CATALOGUE, read_pairs
from moesaic_lab.traces.published import read_laer, read_smartmoe
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment, make_trace


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A file reader under test."""

    base: str
    """Name of the folder, among those of `make_bases`, that holds a valid file."""
    file: str
    """File in that folder that is changed, or a pattern whose first match is changed."""
    read: Callable[[Path], object]
    """Called with the folder; reads the changed file."""
    seal: Callable[[Path], None] | None = None
    """Called with the folder after the change; writes new checksums."""

    def path(self, folder: Path) -> Path:
        """Return the path of the file that is changed; `folder` holds the folders of
        `make_bases`."""
        return min(path for path in (folder / self.base).rglob(self.file) if path.is_file())


def make_bases(folder: Path) -> None:
    """Write a valid file of every kind into subfolders of `folder`."""

    words = "one two three four five six seven eight nine ten"
    text = folder / "text" / "a.txt"
    text.parent.mkdir(parents=True)
    text.write_text(f"{words}\n" * 40, encoding="utf-8")
    config = override(TrainConfig(), _TINY | {"out": str(folder / "run")}, source="fuzz")
    config = override(config, {"data": {"path": [str(text)]}}, source="fuzz")
    train(config, console=Console(file=io.StringIO()))
    stuck = {
        "rank": 0,
        "process": "process 1 on a",
        "at": "x",
        "waits_for": {"1": 8},
        "stack": ["a"],
    }
    RunFolder(folder / "run").write(HANG, json.dumps({"line": "it hung", "ranks": [stuck]}))

    one = folder / "one"
    one.mkdir()
    (one / "config.json").write_text(as_json(config))
    vocabulary = {word: number for number, word in enumerate(words.split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="one"))
    tokenizer.save(str(one / "tokenizer.json"))
    _make_tables(one)
    _make_texts(one)
    _make_traces(folder, one)
    _make_weights(folder)


def _make_tables(one: Path) -> None:
    """Write plans, configurations, clusters and tables of counts."""
    write_plan(Plan(), one / "plan.json")
    planned = json.loads((one / "plan.json").read_text())
    planned["mesh"] = {"tp": 1, "ep": 2, "etp": 1, "innermost": "etp"}
    (one / "planned.json").write_text(json.dumps(planned))
    (one / "table.toml").write_text('out = "x"\nsteps = 3\n[model]\ndim = 16\nnum_heads = 2\n')
    preset = Path(cluster.__file__).parent / "clusters" / "bed-2x2.toml"
    (one / "cluster.toml").write_text(preset.read_text(encoding="utf-8"))
    np.save(one / "counts.npy", np.arange(8).reshape(2, 4))
    (one / "counts.csv").write_text("1, 2, 3\n4, 5, 6\n")
    (one / "plan-table.json").write_text(json.dumps(_used_table().state()))


def _make_texts(one: Path) -> None:
    """Write texts, chats and pairs, tokens, and files of a fine-tune."""
    (one / "documents.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    parquet.write_table(pyarrow.table({"text": ["a b", "c"] * 9}), one / "table.parquet")
    (one / "messages.mo").write_bytes(_catalogue({"one": "eins", "two": "zwei"}))
    (one / "pairs.jsonl").write_text(
        '{"source": "a b", "target": "c"}\n{"source": "d", "target": "e"}\n'
    )
    run = _finetune_in(one).kept(1) | {"contents": {"data": "", "model": ""}}
    (one / RUN).write_text(json.dumps(run))
    (one / COMPLETE).write_text(json.dumps({"sha256": {RUN: checksum(one / RUN)}}))
    chat = {"messages": [{"role": "a", "content": "b"}], "tools": "[{}]"}
    (one / "chats.json").write_text(json.dumps([{"text": "a b"}, chat]))
    (one / "documents.json").write_text('[{"text": "a b"}, {"text": "c"}]')
    states = {"optimizer": {}, "schedule": {}, "random": [torch.zeros(2)]}
    write_states(one / "states.safetensors", states)
    (one / "tokens.bin").write_bytes(np.arange(2000, dtype="<u2").tobytes())
    (one / "flags.txt").write_text(
        "--tensor-model-parallel-size 2 --expert-model-parallel-size=4 --moe-enable-deepep"
    )


def _make_traces(folder: Path, one: Path) -> None:
    """Write a routing trace in our format, and one in each foreign format."""
    routing = SyntheticRouting(steps=2, num_experts=4, sequences=2, seq_len=8)
    write_segment(make_segment(routing), one / "trace.npz")
    write_segment(make_segment(routing), folder / "segments" / segment_name(0))
    tokens = make_trace(replace(routing, tokens=True))
    for name, format in FORMATS.items():
        (folder / name).mkdir()
        format.write(tokens, folder / name / "trace")

    experts = [[[0, 3], [1, 2]], [[2, 0], [3, 1]]]  # (tokens, layers, top_k)
    of_vllm = {"prompt_routed_experts": experts, "choices": [{"routed_experts": experts}]}
    (one / "routed.json").write_text(json.dumps(of_vllm))
    # a response of SGLang without the shape, which has the numbers of tokens instead
    response = json.loads(next((folder / "sglang").rglob("*.json")).read_text())
    without_shape = {
        "routed_experts": response["meta_info"]["routed_experts"],
        "prompt_tokens": 6,
        "completion_tokens": 3,
    }
    (one / "answer.json").write_text(json.dumps([{"meta_info": without_shape}]))
    (one / "laer.csv").write_text(
        "rank,method,model_name,layer,iter,token_num\n0,A,m,0,0,3\n1,A,m,0,0,1\n"
    )
    (one / "gpt_iter0_rank0.log").write_text("0:[[2, 2], [2, 2]]\n1:[[2, 2], [1, 1]]\n")


def _make_weights(folder: Path) -> None:
    """Write checkpoints: of tensors alone, of whole models, quantized, converted, sharded."""
    hub = folder / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(_HUB))
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, hub / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    small = transformers.MixtralConfig(**_HUB | {"hidden_size": 16, "vocab_size": 20})
    transformers.MixtralForCausalLM(small).save_pretrained(folder / "whole")
    convert(folder / "whole", folder / "converted", to="megatron", logits=False)
    _make_finetuned(folder)
    _make_quantized(folder / "fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(
            {"model.a": torch.zeros(2, 3)}, checkpoint_id=folder / "shards", no_dist=True
        )
    write_tensors(folder / "ours", {"model.a": torch.zeros(2, 3)}, is_alone=True)
    nested = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "a": torch.ones(2)}
    write_nested(folder / "states.safetensors", nested)
    (folder / "schedule.json").write_text(dumped({"last_lr": [0.1], "step": 3}))


def _make_quantized(folder: Path) -> None:
    """Write a weight in fp8 and one in NF4."""
    folder.mkdir()
    config = _HUB | {"quantization_config": {"weight_block_size": [2, 2]}}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = json.dumps({"shape": [1, 64], "blocksize": 64, "quant_type": "nf4"}).encode()
    tensors = {
        "a": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a_scale_inv": torch.ones(2, 2),
        "b": torch.zeros(32, 1, dtype=torch.uint8),
        "b.absmax": torch.ones(1),
        "b.quant_state.bitsandbytes__nf4": torch.tensor(list(sizes), dtype=torch.uint8),
    }
    save_file(tensors, folder / "model.safetensors")


def _make_finetuned(folder: Path) -> None:
    """Write a model with a tokenizer, a text, and a fine-tune that stands at its first step."""
    words = {f"w{number}": number for number in range(20)}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="w0", eos_token="w2"
    )
    shutil.copytree(folder / "whole", folder / "mixtral")
    tokenizer.save_pretrained(folder / "mixtral")
    (folder / "words.txt").write_text(" ".join(f"w{number % 17 + 3}" for number in range(100)))
    (folder / "system.py").write_text(_SYSTEM)
    before = Path.cwd()
    os.chdir(folder)
    try:
        code = main.main(list(TUNE))
    finally:
        os.chdir(before)
    if code:
        raise TrainingError(f"the fine-tune of {folder} ended with code {code}")
    # as if it had been killed after the first of its two steps
    for path in (folder / "tuned").iterdir():
        if path.name == "checkpoint-2":
            shutil.rmtree(path)
        elif path.is_file() and path.name != RUN:
            path.unlink()


_SYSTEM = '''"""Experts of a dense layer, to be certified."""

import torch
import torch.nn.functional as F
from moesaic.testing.certify import AbstractRoutedExperts, MoEWeights


class Experts(AbstractRoutedExperts):
    def __init__(self, spec):
        own = spec.weights
        self.weights = [each.clone().requires_grad_() for each in (own.w1, own.w3, own.w2)]

    def run(self, x, experts, gates):
        w1, w3, w2 = self.weights
        hidden = F.silu(torch.einsum("td,ehd->teh", x, w1)) * torch.einsum("td,ehd->teh", x, w3)
        y = torch.einsum("teh,edh->ted", hidden, w2)
        chosen = y.gather(1, experts.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        return (gates.unsqueeze(-1) * chosen).sum(1)

    def gradients(self):
        grads = (torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights)
        return MoEWeights(*grads)
'''
_TINY: dict[str, Any] = {
    "steps": 2,
    "batch_size": 2,
    "device": "cpu",
    "threads": 1,
    "precision": "float32",
    "log_every": 1,
    "evaluate": {"every": 2, "sequences": 2},
    "save": {"every": 1},
    "tensorboard": False,
    "model": {
        "dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "seq_len": 8,
        "conv_width": 1,
        "moe": {"num_experts": 4, "top_k": 2, "hidden": 8},
    },
}
_HUB = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "head_dim": 8,
}


def _catalogue(texts: Mapping[str, str]) -> bytes:
    """Return a compiled gettext catalogue (a .mo file) with these texts and translations.

    Its parts are the format's mark, four numbers (version, number of texts, and the places of the
    two tables), the tables of texts and of translations, of (length, place) each, and all of these
    with a zero byte at the end.
    """
    encoded = [text.encode() for text in (*texts, *texts.values())]
    head_bytes = 20
    table_bytes = 8 * len(texts)
    place = head_bytes + 2 * table_bytes
    entries: list[int] = []
    for text in encoded:
        entries += [len(text), place]
        place += len(text) + 1
    numbers = [0, len(texts), head_bytes, head_bytes + table_bytes, *entries]
    packed = struct.pack(f"<{len(numbers)}I", *numbers)
    return CATALOGUE + packed + b"".join(text + b"\0" for text in encoded)


def _used_table() -> PlanTable:
    """Return a plan table that has recorded some measured steps."""
    plans = [Plan(), Plan(chunks=2), Plan(schedule="s1")]
    seconds = [0.3, 0.2, 0.25]
    table = PlanTable(plans, lambda load: list(seconds))
    for _ in range(60):
        chosen = table.choose()
        table.record(seconds[chosen], 100.0)
    return table


def _silent(line: str) -> None:
    """Print nothing."""


def _seal_last(folder: Path) -> None:
    """Write the checksums of a run's last checkpoint anew."""
    checkpoint = folder / "checkpoints" / "step-00000002"
    names = [path.name for path in checkpoint.iterdir() if path.is_file() and path.name != SUMS]
    lines = [f"{checksum(checkpoint / name)}  {name}\n" for name in sorted(names)]
    (checkpoint / SUMS).write_text("".join(lines))


def _train_config(path: Path) -> TrainConfig:
    """Read a training configuration."""
    return override(TrainConfig(), read_table(path), source=str(path))


def _resumed(folder: Path) -> object:
    """Resume a run from its last checkpoint."""
    config = override(_train_config(folder / "config.json"), {"out": str(folder)}, source="fuzz")
    run = open_run(config, _silent)
    run.claim.release()
    return run


def _reported(folder: Path) -> object:
    """Write the report of a run."""
    return write_page(read_runs([folder]), folder / "report.html")


def _trace(folder: Path) -> object:
    """Read a trace in our format."""
    read_trace_table(read_header(folder / "trace.npz"))
    return Trace.open(folder / "trace.npz").loads


def _foreign(name: str, path: Path) -> object:
    """Read a trace in a foreign format, and look for faults in it."""
    return faults(Trace.of(FORMATS[name].read(path, ReadOptions(top_k=2)), name))


def _documents(path: Path) -> object:
    """Read the texts of a table."""
    return read_documents(path, "text")


def _finetune_in(folder: Path) -> FinetuneOptions:
    """Return the options of a fine-tune that is resumed in a folder."""
    return FinetuneOptions(model="model", data="text", out=str(folder), resume=True)


def _sealed(folder: Path) -> object:
    """Compare a folder with its checksums."""
    try:
        require_sealed(folder)
        return sealed_sums(folder)
    except DamagedError as damage:
        raise InputError(f"{folder}: {damage}") from damage


def _states(path: Path) -> object:
    """Read a rank's states of a fine-tune."""
    try:
        return read_states(path)
    except DamagedError as damage:
        raise InputError(f"{path}: {damage}") from damage


def _sequences(path: Path) -> object:
    """Read the data of a fine-tune, with the tokenizer that lies beside it."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path.with_name("tokenizer.json"))
    )
    tokenizer.chat_template = "{{ messages }} {{ tools }}"
    return sequences(str(path), tokenizer, 1, 1)


def _elements(tensors: Mapping[str, Readable]) -> object:
    """Read all elements of tensors."""
    return [tensor.read(full_region(tensor.shape)) for tensor in tensors.values()]


def _plan_table(path: Path) -> object:
    """Restore a plan table, and use it."""
    table = _used_table()
    table.restore(read_plan_table(path) or {})
    table.choose()
    table.record(0.2, 1e4)
    return table.choose()


_LAST = "checkpoints/step-00000002"


def _table(name: str, read: Callable[[Path], object], *, base: str = "one") -> Reader:
    """Return a `Reader` whose `read` takes the path of the file `name`."""
    return Reader(base=base, file=name, read=lambda folder: read(folder / name))


def _of_step(
    name: str, read: Callable[[Path], object], seal: Callable[[Path], None] | None = _seal_last
) -> Reader:
    """Return a `Reader` for the file `name` of the last checkpoint; its `read` takes the run's
    folder."""
    return Reader(base="run", file=f"{_LAST}/{name}", seal=seal, read=read)


def _text_of(path: Path) -> str:
    """Return a file's text, whatever its bytes."""
    return path.read_text("utf-8", "replace")


READERS = {
    "training configuration": _table("config.json", _train_config),
    "configuration in TOML": _table("table.toml", _train_config),
    "plan": _table("planned.json", read_planned),
    "job": _table("config.json", lambda path: read_job(str(path))),
    "model of the hub": _table("config.json", lambda path: read_job(str(path)), base="hub"),
    "cluster": _table("cluster.toml", lambda path: read_cluster(str(path))),
    "counts": _table("counts.npy", read_counts),
    "counts in text": _table("counts.csv", read_counts),
    "trace": Reader(base="one", file="trace.npz", read=_trace),
    **{
        f"trace of {name}": Reader(
            base=name,
            file="*",
            read=lambda folder, name=name: _foreign(name, folder / "trace"),  # type: ignore[misc]
        )
        for name in FORMATS
    },
    "trace of laer": _table("laer.csv", lambda path: faults(Trace.of(read_laer(path), "laer"))),
    "trace of smartmoe": _table(
        "gpt_iter0_rank0.log",
        lambda path: faults(Trace.of(read_smartmoe(path, top_k=2), "smartmoe")),
    ),
    "response of vLLM": _table("routed.json", partial(_foreign, "vllm")),
    "response of SGLang": _table("answer.json", partial(_foreign, "sglang")),
    "documents": _table("documents.jsonl", _documents),
    "documents in a table of JSON": _table("documents.json", _documents),
    "documents in Parquet": _table("table.parquet", _documents),
    "data of a fine-tune": _table("documents.jsonl", _sequences),
    "list of data of a fine-tune": _table("chats.json", _sequences),
    "seal of a checkpoint": Reader(base="one", file=COMPLETE, read=_sealed),
    "states of a fine-tune": _table("states.safetensors", _states),
    "options of a fine-tune": Reader(
        base="one", file=RUN, read=lambda at: require_folder(_finetune_in(at), 1)
    ),
    "pairs": _table("pairs.jsonl", read_pairs),
    "catalogue": _table("messages.mo", read_pairs),
    "tokens": _table(
        "tokens.bin", lambda path: load_corpus(DataConfig(path=(str(path),), vocab_size=2000))
    ),
    "tokenizer": _table("tokenizer.json", HubTokenizer.load),
    "flags of Megatron": _table("flags.txt", lambda path: from_flags(_text_of(path))),
    "plan table": _table("plan-table.json", _plan_table),
    "metrics": Reader(base="run", file=METRICS, read=read_metrics),
    "report": Reader(base="run", file=METRICS, read=_reported),
    "configuration in a report": Reader(base="run", file="config.json", read=_reported),
    "record of a hang": Reader(base="run", file=HANG, read=read_hang),
    "mark of a run": Reader(
        base="run", file="config.json", read=lambda folder: RunFolder(folder).is_a_run()
    ),
    "state of a checkpoint": _of_step("state.json", _resumed),
    "tensors of a checkpoint": _of_step(
        "shards/shard-00001-model-00001-of-00001.safetensors", _resumed
    ),
    "list of tensors of a checkpoint": _of_step(f"shards/{INDEX}", _resumed),
    "list of sharded safetensors": Reader(
        base="ours", file=INDEX, read=lambda at: _elements(read_shards(at)[0])
    ),
    "sharded safetensors": Reader(
        base="ours", file="*.safetensors", read=lambda at: _elements(read_shards(at)[0])
    ),
    "nested state": _table("states.safetensors", read_nested, base="."),
    "schedule of a trainer": _table("schedule.json", resume.read_json, base="."),
    "checksums of a checkpoint": _of_step(
        SUMS, lambda at: load_checkpoint(at / "checkpoints", _silent), seal=None
    ),
    "list of shards": _table(
        ".metadata", lambda path: read_list(path.read_bytes(), "x"), base="shards"
    ),
    "shards": Reader(base="shards", file=".metadata", read=read_dcp),
    "tensors of shards": Reader(
        base="shards", file="*.distcp", read=lambda folder: _elements(read_dcp(folder)[0])
    ),
    "safetensors": Reader(
        base="hub", file="model.safetensors", read=lambda at: _elements(read_safetensors(at))
    ),
    "fp8 and NF4": Reader(
        base="fp8", file="model.safetensors", read=lambda folder: _elements(Hub().read(folder)[0])
    ),
    "blocks of fp8": Reader(
        base="fp8", file="config.json", read=lambda folder: _elements(Hub().read(folder)[0])
    ),
    "weights": Reader(
        base="whole",
        file="model.safetensors",
        read=lambda folder: open_checkpoint(
            folder, "hf", Architecture(read_config(folder, None))
        ).digests(),
    ),
    "receipt": Reader(base="converted", file="receipt.json", read=verify),
    "iteration of Megatron": Reader(
        base="converted", file="latest_checkpointed_iteration.txt", read=verify
    ),
    "index of safetensors": Reader(
        base="hub", file="model.safetensors.index.json", read=read_safetensors
    ),
    "contents of a checkpoint": Reader(base="whole", file="config.json", read=contents_of),
    "what accompanies weights": Reader(
        base="converted", file="generation_config.json", read=companions
    ),
    "configuration of transformers": Reader(
        base="hub", file="config.json", read=lambda at: read_config(at, None)
    ),
}
"""Readers by the kind of file that they read."""
