"""Flags of other training systems: reads layouts from them (`moesaic plan explain`),
and writes layouts as flags (`moesaic plan emit`).

`SYSTEMS` says what each system has. Nothing that it lacks is searched for it or written.

A field is one of `OthersLayout`. Flags are read without their hyphens, and with hyphens in place of
underscores. Functions that write a layout return lines, each of one flag or of several.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

from moesaic.errors import InputError, suggestion
from moesaic.planner.harmless_flags import ASSUMED, HARMLESS, HARMLESS_VALUES
from moesaic.planner.hub import HubShape
from moesaic.planner.hub_attention import Attention, GroupedAttention, LowRankAttention
from moesaic.planner.job import Job
from moesaic.planner.other_systems import Offers, OthersLayout
from moesaic.planner.plan_files import mesh_table
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.step import PARTS, Part, Schedule, Sharded
from moesaic.program.plan import Crossing, Plan

STRATEGIES: dict[str, Sharded] = {
    "no_shard": "none",
    "optim": "optimizer",
    "optim_grads": "gradients",
    "optim_grads_params": "parameters",
}
"""Values of `sharded` by their names in Megatron's FSDP."""
RECIPES = dict.fromkeys(("delayed", "tensorwise", "blockwise"), "fp8") | {"mxfp8": "mxfp8"}
"""Precisions by the names of Transformer Engine's recipes for scaling."""
TORCH_SCHEDULES: dict[str, tuple[Schedule, int]] = {
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("1f1b", 2),
    "InterleavedZeroBubble": ("zb-h1", 2),
    "ZBVZeroBubble": ("zb-v", 1),
    "DualPipeV": ("dualpipev", 1),
}
"""Pipeline schedules by their names in PyTorch, with the runs that torchtitan gives a rank."""
MODES: dict[str, tuple[Part, ...]] = {
    "none": (),
    "full": ("block",),
    "selective": ("layernorm", "moe"),
}
"""Recomputed parts by the names of torchtitan's modes. Mode selective keeps the scores and every
second dense product, but no grouped product, since that is not in `_op_sac_save_list` of
torchtitan. Here it counts as if all dense products were kept."""


class Alone(NamedTuple):
    """A flag without a value, and the value that it sets."""

    value: Any


MEGATRON: dict[str, tuple[str, Any]] = {
    "tensor-model-parallel-size": ("tp", int),
    "pipeline-model-parallel-size": ("pp", int),
    "num-virtual-stages-per-pipeline-rank": ("virtual_pp", int),
    "num-layers-per-virtual-pipeline-stage": ("virtual_layers", int),
    "enable-zero-bubble": ("schedule", Alone("zb-h1")),
    "zero-bubble-v-schedule": ("schedule", Alone("zb-v")),
    "schedules-method": ("schedule", {"dualpipev": "dualpipev"}),
    "mtp-num-layers": ("mtp", int),
    "context-parallel-size": ("cp", int),
    "expert-model-parallel-size": ("ep", int),
    "expert-tensor-parallel-size": ("etp", int),
    "micro-batch-size": ("micro_batch", int),
    "global-batch-size": ("global_batch", int),
    "recompute-granularity": ("recompute", {"full": ("block",), "selective": ("core_attn",)}),
    "recompute-activations": ("recompute", Alone(("core_attn",))),
    "recompute-modules": ("recompute", list),
    "recompute-method": ("recompute_method", {"uniform": "uniform", "block": "block"}),
    "recompute-num-layers": ("recompute_layers", int),
    "overlap-moe-expert-parallel-comm": ("overlapped", Alone(True)),
    "use-distributed-optimizer": ("sharded", Alone("optimizer")),
    "num-distributed-optimizer-instances": ("replicas", int),
    "use-megatron-fsdp": ("sharded", Alone("parameters")),
    "data-parallel-sharding-strategy": ("sharded", STRATEGIES),
    "overlap-param-gather": ("hides_parameters", Alone(True)),
    "grad-reduce-in-bf16": ("float32_reduced", Alone(False)),
    "overlap-grad-reduce": ("hides_gradients", Alone(True)),
    "cross-entropy-loss-fusion": ("fused_loss", Alone(True)),
    "moe-enable-deepep": ("all_to_all", Alone("deepep")),
    "moe-token-dispatcher-type": ("all_to_all", {"alltoall": "linear", "flex": "deepep"}),
    "fp8-format": ("precision", dict.fromkeys(("e4m3", "hybrid"), "fp8")),
    "fp8-recipe": ("precision", RECIPES),
}
"""Flags of Megatron, and of extensions of it (zero bubbles, DualPipeV), that define a layout. Each
has the field that it sets, and a function from its word to the value, a table from words to values,
or `list` if it takes several words. Of those that set one field the last in the table wins, in
whatever order they are given."""
GRAPHS = ("cuda-graph-impl", "cuda-graph-scope")
"""Flags of Megatron that turn CUDA graphs on; `full_iteration` after one of them (the first since
0.18, the second before) makes a whole step one graph. Graphs of parts of a layer are not read."""
WHOLE_STEP = "full_iteration"
APART = ("hides_parameters", "hides_gradients", "fused_loss")
"""Fields that are False in Megatron unless a flag sets them."""
WHOLE_BLOCKS: tuple[tuple[str, Any], ...] = (
    ("recompute_method", "uniform"),
    ("recompute_layers", 1),
)
"""Fields of a system that recomputes all blocks, each by itself, or none."""
RECOMPUTE = "activation-checkpoint:"
"""What torchtitan 0.3 writes before the name of a mode. It is a subcommand, after which no more
flags may follow."""
SUBCOMMAND = re.compile(r"(?<![\w-])(?:--)?activation[-_]checkpoint:")
"""`RECOMPUTE` as somebody may write it."""


def _size_or_default(word: str) -> int:
    """Return a size, 0 for torchtitan's default of -1."""
    return 0 if word == "-1" else int(word)


TORCHTITAN: dict[str, tuple[str, Any]] = {
    "parallelism.tensor-parallel-degree": ("tp", int),
    "parallelism.pipeline-parallel-degree": ("pp", int),
    "parallelism.pipeline-parallel-schedule": ("schedule", TORCH_SCHEDULES),
    "parallelism.pipeline-parallel-microbatch-size": ("micro_batch", int),
    "parallelism.context-parallel-degree": ("cp", int),
    "parallelism.expert-parallel-degree": ("ep", int),
    "parallelism.expert-tensor-parallel-degree": ("etp", int),
    "parallelism.data-parallel-replicate-degree": ("replicas", int),
    "parallelism.data-parallel-shard-degree": ("shards", _size_or_default),
    "training.local-batch-size": ("local_batch", int),
    "training.global-batch-size": ("global_batch", _size_or_default),
    "activation-checkpoint.mode": ("recompute", MODES),
}
"""Flags of torchtitan that define a layout, in the form of `MEGATRON`."""


def _fields_of(given: list[Given]) -> dict[str, Any]:
    """Return the fields that flags set, without those that are left aside (`_moot`)."""
    known = MEGATRON | TORCHTITAN
    order = list(known)
    moot = _moot(given)
    values: dict[str, Any] = {}
    read = [flag for flag in given if flag.name in known]
    for flag in sorted(read, key=lambda flag: order.index(flag.name)):
        field, make = known[flag.name]  # `make` says how words become a value (`MEGATRON`)
        value = _flag_value(flag, make)
        if flag.name not in moot:
            values[field] = value
    return values


def from_flags(flags: str) -> OthersLayout:
    """Return the layout that flags of Megatron or torchtitan define; `unread_flags` names those
    that it leaves out.

    Raises:
        InputError: if no flag is known, if a flag lacks its value, or if its value is unknown.
    """
    try:
        words = _words(flags)
    except ValueError as error:
        raise InputError(
            f"--flags: the flags do not parse ({error}): close what is quoted"
        ) from error
    given = _given(words)
    _check_said_once(given)
    values = _fields_of(given)
    if _is_one_graph(given):
        values["graphs"] = True
    if not values:
        raise _no_flag_error(given)
    if any(flag.name in TORCHTITAN for flag in given):
        # FSDP2 gathers parameters for every block, but keeps them whole between the micro-batches
        # of a pipeline.
        local = values.get("local_batch", 1)
        has_stages = values.get("pp", 1) > 1
        values["local_batch"] = local
        values["micro_batch"] = values.get("micro_batch", 1) if has_stages else local
        values["schedule"], values["virtual_pp"] = values.get("schedule", ("1f1b", 1))
        defaults: dict[str, Any] = {"sharded": "gradients" if has_stages else "parameters"}
        return OthersLayout(**defaults | values)
    # By default, Megatron splits experts over tp like attention, keeps the whole optimizer on every
    # rank, does not overlap parameters and gradients, and computes the loss step by step.
    defaults = {"etp": values.get("tp", 1), "sharded": "none", **dict.fromkeys(APART, False)}
    return OthersLayout(**defaults | values)


def _check_said_once(given: list[Given]) -> None:
    """Raise InputError if flags of both systems set one field, or two of Megatron's the runs of a
    stage."""
    if {flag.name for flag in given} >= RUNS:
        raise InputError(
            "--flags: --num-virtual-stages-per-pipeline-rank and "
            "--num-layers-per-virtual-pipeline-stage say the same in two ways: give one"
        )
    flag_by_field = {MEGATRON[flag.name][0]: flag for flag in given if flag.name in MEGATRON}
    for flag in given:
        same = flag_by_field.get(TORCHTITAN[flag.name][0]) if flag.name in TORCHTITAN else None
        if same is not None:
            raise InputError(
                f"--flags: {same.word} of Megatron and {flag.word} of torchtitan say the same: "
                "give the flags of one system"
            )


def _no_flag_error(given: list[Given]) -> InputError:
    """Return the error that no flag splits a model, which names the first of those given."""
    # a list of a shell or a variable has its whole word as its name, and is no flag
    first = next((flag.name for flag in given if flag.name != flag.word), "")
    only = f"--{first}" if first else "nothing"
    near = suggestion(first, [*MEGATRON, *TORCHTITAN])
    return InputError(
        f"--flags: found no flag of Megatron or torchtitan that splits a model, only {only}{near}"
    )


COMMENT = re.compile(
    r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?:^|(?<=\s))#[^\n]*""", re.DOTALL | re.MULTILINE
)
"""What is quoted or escaped (a group), or a comment, which begins a word and ends with its line."""
DASHED = re.compile(r"[-\u2010-\u2015\u2212]+(?=[A-Za-z])")
"""What a flag begins with: hyphens, or dashes that an editor made of them. A negative number has no
letter after them."""
UNDASHED = re.compile(r"^[\s+~\-\u2010-\u2015\u2212]+|[=:].*|,$", re.DOTALL)
"""What surrounds the name of a setting that is not written as a flag: marks before it, and its
value."""
LIST = re.compile(
    r"\$\{\w+\[[@*]\]\}|\$[@*]|\$\{?\w*(?:ARG|ARGS|ARGUMENTS|FLAGS|OPTS|OPTIONS)\}?", re.IGNORECASE
)
"""A list of flags of a shell, which only the shell knows: an array, or a variable of that name."""
VARIABLE = re.compile(r"(CUBLAS|CUDA|NCCL|NVTE|NVSHMEM|PYTORCH|TORCH|TRITON|UCX)_?[A-Z0-9_]*=.*")
"""A variable of the environment that may change how libraries compute or send."""
NEGATIVE = ("false", "0", "no", "off", "none", "null")
"""Values, in lower case, that take a flag without a value back."""


def _words(flags: str) -> list[str]:
    """Return the words of flags as a shell does, without comments.

    `--a=b` is two words, and torchtitan's subcommand for recomputation becomes a flag.
    """
    # What is quoted or escaped (the group) stays, since a # in it begins no comment. A comment ends
    # with its line, even behind a backslash.
    without_comments = COMMENT.sub(lambda match: match[1] or "", flags.replace("\r\n", "\n"))
    words = []
    joined = without_comments.replace("\\\n", " ")
    written_as_flag = SUBCOMMAND.sub("--activation-checkpoint.mode ", joined)
    for word in shlex.split(written_as_flag):
        words += word.split("=", 1) if word.startswith("-") else [word]
    return words


class Given(NamedTuple):
    """A flag as somebody gave it."""

    word: str
    """The flag as written."""
    name: str
    """Its name with hyphens in place of underscores, without the first ones."""
    values: list[str]
    """The words between it and the next flag."""

    @property
    def value(self) -> str:
        """The first of these words; "" if there is none."""
        return self.values[0] if self.values else ""


def _given(words: list[str]) -> list[Given]:
    """Return the flags among words, in their order; one that is given twice appears twice. A list
    of a shell is a flag of that name, and so is a variable of the environment before all flags.

    Raises:
        InputError: if a flag that would be read has no two hyphens.
    """
    given: list[Given] = []
    is_after_flag = False
    for word in words:
        dashes = DASHED.match(word)
        if dashes is None or dashes[0] != "--":
            _refuse_without_hyphens(word)
        if dashes:
            is_after_flag = True
            name = word[dashes.end() :].replace("_", "-")
            given.append(Given(word, name, []))
        elif LIST.fullmatch(word) or (VARIABLE.fullmatch(word) and not is_after_flag):
            given.append(Given(word, word, []))
        elif given:  # a value of the last flag; words before all flags are left out
            given[-1].values.append(word)
    return given


def _refuse_without_hyphens(word: str) -> None:
    """Raise InputError if a word without two hyphens is the name of a flag that would be read, as
    of a YAML file (`name: 4`) or of an override (`++model.name=4`)."""
    path = UNDASHED.sub("", word).replace("_", "-")
    for name in (path, path.rpartition(".")[2]):
        if name in {*MEGATRON, *TORCHTITAN, *SIZES}:
            raise InputError(f"--flags: {word!r} is no flag: write two hyphens, --{name}")


def _is_one_graph(given: list[Given]) -> bool:
    """Return whether flags make a whole step one CUDA graph."""
    return any(flag.name in GRAPHS and WHOLE_STEP in flag.values for flag in given)


SIZES: dict[str, Callable[[Job], int]] = {
    "seq-length": lambda job: job.model.seq_len,
    "training.seq-len": lambda job: job.model.seq_len,
    "num-layers": lambda job: job.model.num_layers,
    "hidden-size": lambda job: job.model.dim,
    "num-attention-heads": lambda job: job.model.num_heads,
    "num-experts": lambda job: job.model.moe.num_experts,
    "moe-router-topk": lambda job: job.model.moe.top_k,
    "moe-ffn-hidden-size": lambda job: job.model.moe.hidden,
}
"""Flags for the sizes of a model, and the function that reads the same size from a job."""

MOST_PADDING = 0.01
"""Largest part of a vocabulary that padding adds, or that a tokenizer leaves unused."""


def _fits_vocabulary(job: Job, size: int) -> bool:
    """Return whether a size is that of a job's vocabulary, but for padding."""
    return abs(size - job.data.vocab_size) <= MOST_PADDING * job.data.vocab_size


LATENT_SIZES = {
    "q-lora-rank": "query_rank",
    "kv-lora-rank": "rank",
    "qk-head-dim": "nope",
    "qk-pos-emb-head-dim": "rope",
    "v-head-dim": "value",
}
GROUPED_SIZES = {"num-query-groups": "kv_heads", "kv-channels": "head_dim"}
"""Flags for sizes of latent attention (`LATENT_SIZES`), and of attention whose heads share keys,
with the names of these sizes. Megatron reads those of `LATENT_SIZES` under latent attention alone,
and those of `GROUPED_SIZES` elsewhere alone."""


def _attention_of(job: Job) -> Attention | None:
    """Return the attention of a job's blocks; None if it has no description."""
    model = job.model
    if isinstance(model, HubShape):
        return model.attention_sizes
    return GroupedAttention(
        dim=model.dim,
        heads=model.num_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        is_gated=False,
        norms_heads=model.block.qk_norm,
    )


def _fits_attention(flag: str, job: Job, size: int) -> bool:
    """Return whether a size is that of a job's attention."""
    sizes = _attention_of(job)
    is_latent = isinstance(sizes, LowRankAttention)
    if flag in GROUPED_SIZES and is_latent:  # not read by Megatron, whatever it says
        return True
    # a latent size of a job without latent attention has no match: it is of another model
    return bool(size == getattr(sizes, (LATENT_SIZES | GROUPED_SIZES)[flag], None))


FITTING: dict[str, Callable[[Job, int], bool]] = {
    "ffn-hidden-size": lambda job, size: size in (job.model.dense_hidden, job.model.moe.hidden),
    "moe-shared-expert-intermediate-size": lambda job, size: size == job.model.moe.shared_hidden,
    "moe-layer-freq": lambda job, every: (
        every > 0 and job.dense_layers == job.model.num_layers - -(-job.model.num_layers // every)
    ),
    "moe-router-num-groups": lambda job, size: size == job.model.routing.get("groups", 1),
    "moe-router-group-topk": lambda job, size: size == job.model.routing.get("top_groups", 1),
    "vocab-size": _fits_vocabulary,
    "padded-vocab-size": _fits_vocabulary,
    **{flag: partial(_fits_attention, flag) for flag in LATENT_SIZES | GROUPED_SIZES},
}
"""Further flags for sizes, which are named where they are not those of the job."""
DESCRIBING: dict[str, Callable[[Job], bool]] = {
    "attention-output-gate": lambda job: getattr(_attention_of(job), "is_gated", False),
    "multi-latent-attention": lambda job: isinstance(_attention_of(job), LowRankAttention),
    "swiglu": lambda job: job.model.moe.experts == "swiglu",
    "untie-embeddings-and-output-weights": lambda job: not job.model.tied,
}
"""Flags without a value that say what a model is, and whether they are right of a job; they are
named where they are not."""
LAYERS = re.compile(r"\[([01])\](?:\*([0-9]+))?")
"""A part of a list of layers, dense (0) or not (1), such as "[0]*3"."""


def _has_dense_layers(job: Job, layers: str) -> bool:
    """Return whether a list of layers, such as "([0]*3+[1]*58)", is that of a job, by its numbers
    of dense and other layers."""
    found = {"0": 0, "1": 0}
    for kind, count in LAYERS.findall(layers):
        found[kind] += int(count or 1)
    # nothing but parts of a list, and what joins them
    is_list = not LAYERS.sub("", layers).strip("()+ ")
    dense = job.dense_layers
    return is_list and found == {"0": dense, "1": job.model.num_layers - dense}


def unread_flags(flags: str, job: Job) -> list[str]:
    """Return the flags that no prediction reads and that are not known to be harmless, each as it
    was written, once.

    Args:
        flags: flags of Megatron or torchtitan.
        job: the training job.

    Raises:
        InputError: if a flag gives a size of the model or a sequence length that is not that of the
            job.
    """
    given = _given(_words(flags))
    for flag in given:
        size_of = SIZES.get(flag.name)
        if size_of is None or not flag.value.isdecimal():
            continue
        size = size_of(job)
        if int(flag.value) != size:
            option = " (--seq-len)" if "seq" in flag.name else ""
            raise InputError(
                f"--flags: {flag.word} {flag.value}, but the planned model has {size}: make "
                f"them agree{option}"
            )
    known = {*MEGATRON, *TORCHTITAN, *SIZES, *HARMLESS} - _moot(given)
    if _is_one_graph(given):
        known.update(GRAPHS)
    return list(dict.fromkeys(flag.word for flag in given if _is_unread(flag, known, job)))


def _is_unread(flag: Given, known: set[str], job: Job) -> bool:
    """Return whether a flag may matter and no prediction reads it; `known` are names of flags that
    are read or harmless."""
    is_number = flag.value.isdecimal() and len(flag.values) == 1
    # a list of layers in place of a number: matters unless it is that of the job
    if flag.name == "moe-layer-freq" and not is_number:
        return not _has_dense_layers(job, flag.value)
    # a size: matters unless it is a number that fits the job
    if flag.name in FITTING:
        return not (is_number and FITTING[flag.name](job, int(flag.value)))
    # a size that `unread_flags` compares with the job's if it is a number
    if flag.name in SIZES:
        return not is_number
    # what describes the model, or is assumed to be on: matters if its value switches it off
    if flag.name in DESCRIBING or flag.name in ASSUMED.split():
        describes = DESCRIBING.get(flag.name, lambda _: True)
        is_off = any(value.lower() in NEGATIVE for value in flag.values)
        return is_off or not describes(job)
    # any other flag: matters unless it is read, or harmless, at least with this value
    allowed = HARMLESS_VALUES.get(flag.name, ())
    return flag.name not in known and not (flag.values and set(flag.values) <= set(allowed))


RUNS = {"num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"}
OF_STAGES = RUNS | {
    "enable-zero-bubble",
    "zero-bubble-v-schedule",
    "schedules-method",
    "parallelism.pipeline-parallel-schedule",
    "parallelism.pipeline-parallel-microbatch-size",
}
"""Flags that need pipeline stages; those of `RUNS` say how many runs a stage has."""
STAGES = ("pipeline-model-parallel-size", "parallelism.pipeline-parallel-degree")


def _moot(given: list[Given]) -> set[str]:
    """Return the names of flags that Megatron or torchtitan leaves aside, or refuses, beside the
    others or without one that they need: what they say is in no prediction."""
    values = {flag.name: flag.value for flag in given}
    granularity = values.get("recompute-granularity")
    moot = set[str]()
    if "recompute-activations" in values:
        if granularity == "full":
            moot.add("recompute-granularity")
        granularity = "selective"
    if granularity != "selective":
        moot.add("recompute-modules")
    if granularity == "full":
        moot.add("overlap-moe-expert-parallel-comm")
    else:
        moot |= {"recompute-method", "recompute-num-layers"}
    if "fp8-format" not in values:
        moot.add("fp8-recipe")
    if values.get("moe-token-dispatcher-type") != "flex":
        moot.add("moe-enable-deepep")
    if "use-megatron-fsdp" not in values:
        moot.add("data-parallel-sharding-strategy")
        if "use-distributed-optimizer" not in values:
            moot |= {"num-distributed-optimizer-instances", "overlap-param-gather"}
    if all(values.get(name, "1") == "1" for name in STAGES):
        moot |= OF_STAGES
    return moot


def _check_single(flag: Given, most: int) -> None:
    """Raise InputError if more words follow a flag than it takes: nobody would read them."""
    if len(flag.values) > most:
        words = ", ".join(map(repr, flag.values))
        takes = "one value" if most else "no value"
        raise InputError(f"--flags: {flag.word} takes {takes}, got {words}")


def _flag_value(given: Given, make: Any) -> Any:
    """Return the value that a flag gives with the words after it; `make` is the second entry of the
    flag in `MEGATRON`."""
    flag = given.word
    value = given.value
    if isinstance(make, Alone):
        _check_single(given, most=0)
        return make.value
    if make is list:  # several words
        if not given.values:
            raise InputError(f"--flags: {flag} is empty: name at least one of {', '.join(PARTS)}")
        return tuple(given.values)
    _check_single(given, most=1)
    if isinstance(make, dict):  # a table of words
        if value not in make:
            raise InputError(f"--flags: {flag}={value!r}: choose one of {', '.join(make)}")
        return make[value]
    try:  # a function, which is `int`
        return make(value)
    except ValueError as error:
        raise InputError(f"--flags: {flag} needs a whole number, got {value!r}") from error


def layout_of(job: Job, planned: PlannedStep) -> OthersLayout:
    """Return the layout of other systems that is most similar to one of our plans."""
    grid = planned.grid
    plan = planned.plan
    split = planned.split
    return OthersLayout(
        tp=grid.tp,
        pp=split.pp,
        virtual_pp=split.parts,
        ep=grid.ep,
        etp=grid.etp,
        micro_batch=split.of(job).batch_size // grid.dp,
        global_batch=job.batch_size * job.accumulation,
        recompute=("block",) if job.model.checkpoint_activations else (),
        # LINK: our plan sends each copy, else a token once to a node and to a rank
        all_to_all="multicast" if plan.crossing is not Crossing.LINK else "linear",
        overlapped=plan.chunks > 1,
        # PyTorch's pipelines keep parameters whole between micro-batches
        sharded="parameters" if split.pp == 1 else "gradients",
    )


@dataclass(frozen=True, kw_only=True)
class System:
    """A training system whose flags are written."""

    write: Callable[[Job, OthersLayout, PlannedStep | None], list[str]]
    """Writes a layout as flags. The last argument is the plan of ours that the layout comes from,
    or None; flags for its choices are included as far as the system has them."""
    version: str = ""
    """The version whose flags are written."""
    offers: Offers = field(default_factory=Offers)
    """What the system has, of the choices of a layout."""
    any_parts: bool = False
    """Whether any parts can be recomputed, not only the combinations that are offered."""
    lacks: tuple[tuple[str, Any], ...] = ()
    """Fields of a layout that the system has no flags for, with the only value that it runs."""

    def flags(
        self, name: str, job: Job, layout: OthersLayout, planned: PlannedStep | None = None
    ) -> list[str]:
        """Return the layout as flags; raises InputError if the system named `name` lacks something
        of it."""
        if planned is not None and not self.offers.overlaps:  # our chunks have no flag there
            layout = replace(layout, overlapped=False)
        # offered with a number of runs per rank, so one schedule may be offered several times
        schedules = dict.fromkeys(schedule for schedule, _ in self.offers.schedules)
        supported: dict[str, tuple[Any, ...]] = {
            "schedule": tuple(schedules),
            "precision": self.offers.precisions,
        }
        if not self.any_parts:
            supported["recompute"] = self.offers.recompute
        for lacking, only in self.lacks:  # a field without a flag, and the only value that runs
            supported[lacking] = (only,)
        for choice, values in supported.items():
            if getattr(layout, choice) not in values:
                raise InputError(
                    f"emit {name}: {self.version or name} does not support "
                    f"{choice}={getattr(layout, choice)!r}: choose "
                    f"{' or '.join(map(repr, values))}, or another system"
                )
        return self.write(job, layout, planned)


PRECISIONS = {
    "bf16": "",
    "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}
"""Flags of precisions in Megatron."""


def _megatron(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    """Return the flags with which Megatron runs a layout; numbers that are Megatron's defaults are
    left out."""
    moe = job.model.moe
    model = job.model
    sequence_parallel = " --sequence-parallel" if layout.tp > 1 else ""
    dispatcher = "flex --moe-enable-deepep" if layout.by_deepep else "alltoall"
    lines = [
        f"--tensor-model-parallel-size {layout.tp}{sequence_parallel}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--expert-model-parallel-size {layout.ep}",
        f"--expert-tensor-parallel-size {layout.etp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--seq-length {model.seq_len}",
        f"--num-experts {moe.num_experts}",
        f"--moe-router-topk {moe.top_k}",
        f"--moe-ffn-hidden-size {moe.hidden}",
        "--moe-grouped-gemm",
        f"--moe-token-dispatcher-type {dispatcher}",
        "--bf16",
    ]
    # each flag with its number, and Megatron's default
    numbers = {
        "global-batch-size": (layout.global_batch, 0),
        "context-parallel-size": (layout.cp, 1),
        "num-distributed-optimizer-instances": (layout.replicas, 1),
        "mtp-num-layers": (layout.mtp, 0),
        "num-virtual-stages-per-pipeline-rank": (layout.virtual_pp, 1),
        "num-layers-per-virtual-pipeline-stage": (layout.virtual_layers, 0),
    }
    lines += [f"--{flag} {number}" for flag, (number, usual) in numbers.items() if number != usual]
    for flag, (field_name, _) in MEGATRON.items():  # what is off unless a flag turns it on
        if field_name in APART and getattr(layout, field_name):
            lines.append(f"--{flag}")
    lines += _megatron_sharding(layout)
    if layout.overlapped:
        lines.append("--overlap-moe-expert-parallel-comm")
    if not layout.float32_reduced:
        lines.append("--grad-reduce-in-bf16")
    if layout.graphs:
        lines.append(f"--{GRAPHS[0]} {WHOLE_STEP}")
    lines += _megatron_recomputation(layout)
    if layout.is_narrow:
        lines.append(PRECISIONS[layout.precision])
    return lines + _megatron_groups(model.routing)


def _megatron_sharding(layout: OthersLayout) -> list[str]:
    """Return Megatron's flags of what is sharded over data-parallel ranks."""
    if layout.sharded == "none":
        return []
    if layout.sharded == "optimizer":
        return ["--use-distributed-optimizer"]
    strategy_of = {sharded: strategy for strategy, sharded in STRATEGIES.items()}
    strategy = strategy_of[layout.sharded]
    return [f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"]


def _megatron_recomputation(layout: OthersLayout) -> list[str]:
    """Return Megatron's flags of what backward recomputes."""
    if not layout.recompute:
        return []
    if "block" not in layout.recompute:
        modules = " ".join(layout.recompute)
        return [f"--recompute-granularity selective --recompute-modules {modules}"]
    return [
        f"--recompute-granularity full --recompute-method {layout.recompute_method} "
        f"--recompute-num-layers {layout.recompute_layers}"
    ]


def _megatron_groups(routing: Mapping[str, Any]) -> list[str]:
    """Return Megatron's flags of a router that is limited to groups of experts."""
    if routing.get("groups", 1) <= 1:
        return []
    return [
        f"--moe-router-num-groups {routing['groups']} --moe-router-group-topk "
        f"{routing['top_groups']}"
    ]


def _torchtitan(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    """Return the flags with which torchtitan runs a layout."""
    mode = next(mode for mode, parts in MODES.items() if parts == layout.recompute)
    lines = [
        f"--parallelism.tensor_parallel_degree {layout.tp}",
        "--parallelism.data_parallel_shard_degree -1",
        f"--parallelism.expert_parallel_degree {layout.ep}",
        f"--training.local_batch_size {max(layout.local_batch, layout.micro_batch)}",
        f"--training.seq_len {job.model.seq_len}",
    ]
    if layout.global_batch > 0:
        lines.append(f"--training.global_batch_size {layout.global_batch}")
    if layout.cp > 1:
        lines.append(f"--parallelism.context_parallel_degree {layout.cp}")
    if layout.replicas > 1:
        lines.append(f"--parallelism.data_parallel_replicate_degree {layout.replicas}")
    if layout.pp > 1:
        lines += [
            f"--parallelism.pipeline_parallel_degree {layout.pp}",
            f"--parallelism.pipeline_parallel_schedule {_schedule_name(layout)}",
            f"--parallelism.pipeline_parallel_microbatch_size {layout.micro_batch}",
        ]
    # torchtitan refuses CUDA graphs with either
    if layout.ep > 1 or layout.pp > 1:
        lines.append("--training.disable_cuda_graphs")
    return [*lines, f"{RECOMPUTE}{mode}"]


def _automodel(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    """Return the flags with which NeMo Automodel runs a layout."""
    sizes = {"tp_size": layout.tp, "cp_size": layout.cp, "pp_size": layout.pp, "ep_size": layout.ep}
    if layout.replicas > 1:
        sizes["dp_replicate_size"] = layout.replicas
    # A pipeline cuts the local batch of a data-parallel group into micro-batches.
    local = max(layout.local_batch, layout.micro_batch * layout.pp)
    lines = ["--distributed.strategy fsdp2"]
    lines += [f"--distributed.{name} {size}" for name, size in sizes.items()]
    lines += [
        f"--step_scheduler.local_batch_size {local}",
        f"--dataset.seq_length {job.model.seq_len}",
    ]
    if layout.global_batch > 0:
        lines.append(f"--step_scheduler.global_batch_size {layout.global_batch}")
    if layout.recompute:
        lines.append("--distributed.activation_checkpointing true")
    if layout.by_deepep:
        lines.append("--model.backend.dispatcher deepep")
    if layout.pp > 1:
        lines += [
            f"--distributed.pipeline.pp_schedule {_schedule_name(layout).lower()}",
            f"--distributed.pipeline.pp_microbatch_size {layout.micro_batch}",
        ]
    return lines


def _schedule_name(layout: OthersLayout) -> str:
    """Return the PyTorch name of the pipeline schedule of a layout."""
    name_of = {each: name for name, each in TORCH_SCHEDULES.items()}
    runs = [runs for schedule, runs in name_of if schedule == layout.schedule]
    if layout.virtual_pp not in runs:
        raise InputError(
            f"emit: PyTorch's {layout.schedule} does not support virtual_pp={layout.virtual_pp}: "
            f"choose {' or '.join(map(str, runs))}, or give --pp for the system's best layout"
        )
    return name_of[layout.schedule, layout.virtual_pp]


def _moesaic(job: Job, layout: OthersLayout, planned: PlannedStep | None) -> list[str]:
    """Return the flags with which Moesaic runs a layout, with those of the plan that differ from
    its defaults."""
    mesh: dict[str, Any] = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
    if layout.pp > 1:
        mesh |= {"pp": layout.pp, "parts_per_stage": layout.virtual_pp}
    plan = Plan(all_to_all=layout.all_to_all)
    if planned is not None:
        mesh |= mesh_table(planned)
        plan = planned.plan
    lines = [f"--mesh.{name.replace('_', '-')} {value}" for name, value in mesh.items()]
    for choice in fields(Plan):
        value = getattr(plan, choice.name)
        if value != getattr(Plan(), choice.name):
            flag = f"--plan.{choice.name.replace('_', '-')}"
            is_switch = isinstance(value, bool)
            lines.append(flag if is_switch else f"{flag} {value}")
    if planned is not None:
        cut = planned.split.of(job)
        lines += [f"--batch-size {cut.batch_size}", f"--accumulation {cut.accumulation}"]
        if planned.split.in_flight > 1:
            lines.append(f"--micro-batches-in-flight {planned.split.in_flight}")
    if layout.recompute:
        lines.append("--model.checkpoint-activations")
    return lines


PYTORCH = tuple(TORCH_SCHEDULES.values())
"""Pipeline schedules of PyTorch."""
OF_PYTORCH = (
    ("etp", 1),
    ("mtp", 0),
    ("virtual_layers", 0),
    ("overlapped", False),
    ("graphs", False),
    *WHOLE_BLOCKS,
)
"""What torchtitan and NeMo Automodel lack, in the form of `System.lacks`."""
SELECTIVE: tuple[tuple[Part, ...], ...] = (
    (),
    ("moe_act",),
    ("layernorm", "moe_act"),
    ("layernorm", "mla_up_proj", "moe_act"),
    ("core_attn",),
    ("block",),
)
"""Combinations of recomputed parts that are searched for Megatron."""
SYSTEMS: dict[str, System] = {
    "megatron": System(
        write=_megatron,
        version="Megatron-LM 0.20",
        any_parts=True,
        offers=Offers(
            schedules=(("1f1b", 1), ("1f1b", 2), ("1f1b", 4)),
            recompute=SELECTIVE,
            all_to_alls=("linear", "deepep"),
            overlaps=True,
            precisions=("bf16", "fp8", "mxfp8"),
        ),
    ),
    "torchtitan": System(
        write=_torchtitan,
        version="torchtitan 0.3.0",
        offers=Offers(schedules=PYTORCH, recompute=tuple(MODES.values()), sharded="parameters"),
        lacks=OF_PYTORCH,
    ),
    "automodel": System(
        write=_automodel,
        version="NeMo Automodel",
        offers=Offers(schedules=PYTORCH, all_to_alls=("linear", "deepep"), sharded="parameters"),
        lacks=OF_PYTORCH,
    ),
    "moesaic": System(
        write=_moesaic,
        version="moesaic train --config MODEL.toml",
        offers=Offers(sharded="parameters"),
        lacks=(("cp", 1), ("mtp", 0), ("replicas", 1), ("graphs", False), *WHOLE_BLOCKS),
    ),
}
"""Systems by name. To add one, write a function for its flags."""
