"""The options of a fine-tuning run, and the file of them that its folder keeps. Imports no
torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from moesaic.errors import InputError

RUN = "finetune.json"
MERGED = "merged"
"""The file that describes the run and the folder of the merged model, in the folder of a run."""
FREE = (
    "model",
    "data",
    "out",
    "ranks",
    "pp",
    "micro_batches_in_flight",
    "save_every",
    "merge",
    "logits",
    "resume",
    "memory_gib",
    "device",
)
"""Options that may differ when a run is resumed. `ranks` is compared by the number of ranks
themselves, `model` and `data` by their contents."""
OF_A_RANK = ("model", "data", "out", "ranks", "memory_gib", "device")
"""Options that may differ between ranks: paths of the same contents or folder, and what concerns
one machine."""
AT_LEAST_ONE = (
    "ranks",
    "pp",
    "rank",
    "alpha",
    "length",
    "batch",
    "micro_batch",
    "epochs",
    "steps",
    "save_every",
)
"""Options that are numbers of something."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of `moesaic finetune`."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model of transformers, or its name on the hub."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A text; a .jsonl, .json, .parquet or .csv file with "text" (which is taken) or "messages" in
    each line, entry or row; or a folder or name that datasets loads (split train)."""
    out: str = "runs/finetune"
    """Folder for checkpoints, adapters and the merged model."""
    ranks: int | None = None
    """Processes on this machine, which share the experts; None: one for each GPU, or those that
    torchrun has started."""
    pp: int = 1
    """Stages of layers. The ranks of a stage share its experts; micro-batches flow through the
    stages (1F1B)."""
    method: Literal["qlora", "qlora-double", "lora"] = "qlora"
    """qlora keeps the frozen experts in NF4, qlora-double also their scales in eight bits, lora in
    --dtype."""
    rank: int = 16
    """Rank of the adapters of attention and experts."""
    alpha: int = 32
    """Adapters are scaled by alpha / rank."""
    length: int = 2048
    """Tokens of a sequence; texts are joined and cut."""
    batch: int = 16
    """Sequences of an optimizer step, over all ranks."""
    micro_batch: int = 1
    """Sequences that a rank processes at a time."""
    micro_batches_in_flight: Literal[1, 2] = 1
    """With 2, a micro-batch's two halves: one computes while the messages of the other travel."""
    epochs: int = 1
    """Passes over DATA."""
    steps: int | None = None
    """Optimizer steps, in place of --epochs."""
    learning_rate: float = 2e-4
    """Largest learning rate; 3 % of the steps warm up, and a cosine goes to zero."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the model and of the merged weights; adapters and their optimizer states are
    float32."""
    plan: Literal["default", "auto"] = "default"
    """default gives the same bits in every run; auto times seven other plans of the experts in the
    first steps."""
    save_every: int = 100
    """Steps between checkpoints, of which the last two are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in the folder; give the same options again."""
    merge: bool = False
    """Also write the model with the adapters merged into its (dequantized) weights, into merged/ of
    the folder."""
    logits: Literal["auto", "yes", "no"] = "auto"
    """With --merge: compare logits of the merged model with those of the adapted one; auto does so
    up to 2 GiB."""
    memory_gib: float | None = None
    """Memory of a rank's device, GiB, to see whether the run fits; None: that of the GPU, or a
    share of the host's free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are any."""
    seed: int = 0
    """Seed of the adapters' first values and of the order of sequences."""

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.micro_batches_in_flight == 2 and self.micro_batch % 2:
            raise InputError(
                f"--micro-batches-in-flight 2 halves micro-batches, and --micro-batch is "
                f"{self.micro_batch}: choose an even one"
            )
        if not 0 <= self.seed < 2**32:  # as numpy takes it
            raise InputError(f"--seed {self.seed}: choose 0 or more, below 2**32")
        if not 0 < self.learning_rate < 1:
            raise InputError(f"--learning-rate {self.learning_rate}: must be between 0 and 1")

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the options that all ranks must have in common, by flag."""
        return {
            f"--{name.replace('_', '-')}": value
            for name, value in asdict(self).items()
            if name not in OF_A_RANK
        }

    def kept(self, world: int) -> dict[str, Any]:
        """Return what a resumed run must have in common with the run, and the number of ranks."""
        compared = {name: value for name, value in asdict(self).items() if name not in FREE}
        return compared | {"ranks": world}


def require_data(data: str) -> None:
    """Raise InputError if DATA is a path to nothing, or an empty file; a name on the hub is looked
    up later."""
    path = Path(data)
    if path.is_file():
        if not path.stat().st_size:
            raise InputError(f"{data}: is empty: name a file with text")
        return
    # A name on the hub is NAME or OWNER/NAME.
    is_like_a_path = path.is_absolute() or data.startswith(".") or data.count("/") > 1
    if not path.exists() and (path.suffix or is_like_a_path):
        raise InputError(f"{data}: no such file: name a text, a .jsonl or .json file, or a dataset")
