"""What a training step is made of: `StepModel`, a transformer with MoE layers and how it is trained; `step.py` predicts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from moesaic.cost.cluster import ScoreKernel
from moesaic.cost.pipeline import Pipeline
from moesaic.cost.workload import Workload
from moesaic.errors import InputError

Part = Literal["block", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What is computed again in backward: a whole block, or a part of it under the name that Megatron has for it."""


class StageRun(NamedTuple):
    """A run of layers of a pipeline."""

    blocks: int
    sparse: int
    """Of them, those with an MoE layer."""
    outputs: int
    """How often it computes the output."""


Sharded = Literal["parameters", "gradients", "optimizer", "none"]
"""As of `StepModel.sharded`."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What one thing costs where a system runs it step by step, beyond one fused kernel.

    Every operation of eager PyTorch is a kernel that reads its inputs and writes its result. The numbers are counted in the
    sources that `COSTS` names, never fitted to a step: bytes per value of two bytes, less those that a step's model already
    counts for one fused kernel (`cost/step.py`, `cost/compute.py`). Broadcast factors, such as the cosines of a rotation, count
    nothing. A test counts the same operations one by one.
    """

    forward: float
    """Bytes per value."""
    backward: float
    """Bytes per value."""
    kernels: tuple[int, int]
    """Kernels of a pass, forward and backward."""
    per_expert: tuple[int, int] = (0, 0)
    """Kernels of a pass for each expert of a rank, where they loop over experts."""

    def seconds(self, values: float, memory: float, launch: float, experts: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass: those of the bytes, or of launching so many kernels.

        Args:
            values: of a rank.
            memory: bytes per second.
            launch: seconds that the host takes for a kernel.
            experts: of a rank.
        """
        both = zip((self.forward, self.backward), self.kernels, self.per_expert)
        there, back = (
            max(each * values / memory, (kernels + experts * looped) * launch) if values else 0.0
            for each, kernels, looped in both
        )
        return there, back


COSTS: dict[str, Steps] = {
    # transformers' RMSNorm: cast 6, square 8, mean 4, product 8, cast 6, weights 4; its gradient 92; fused 4 and 8.
    "norms": Steps(forward=32, backward=84, kernels=(7, 15)),
    # transformers' apply_rotary_pos_emb: products 8, turned halves 6, sum 6; its gradient 28; fused 4 and 8.
    "rotation": Steps(forward=16, backward=20, kernels=(5, 9)),
    # Automodel's, on a float32 copy: casts 12, four products of halves 16, two sums of halves 12, joined 8; 52 back.
    "float32_rotation": Steps(forward=44, backward=44, kernels=(9, 12)),
    # Automodel's of DeepSeek: a float32 copy 6, the complex product 8, cast 6; the same back; nothing fused is counted.
    "complex_rotation": Steps(forward=20, backward=20, kernels=(3, 3)),
    # Automodel's FlexAttention: the result times a float32 factor per head 6, cast 6; 34 back.
    "sinks": Steps(forward=12, backward=34, kernels=(4, 7)),
    # transformers' act_fn(gate) * up: 4 and 6 of a hidden value; back 12, 6, and 8 to join halves; fused 6 and 12.
    "activation": Steps(forward=4, backward=14, kernels=(2, 5)),
    # transformers' grouped_mm_experts_forward: rows of tokens, sorted, weighted, sorted back 4 each, summed 2; back 34.
    "permutation": Steps(forward=12, backward=24, kernels=(9, 12)),
    # Automodel's GroupedExpertsDeepEP._apply_bias of the first product's results: sums 4, joined 4; back 2 and 4.
    "first_bias": Steps(forward=8, backward=6, kernels=(1, 1), per_expert=(1, 1)),
    # The same and Megatron's TEGroupedMLP._apply_bias of the last one's, whose weights are float32: products 4, sums 10,
    # joined 8, cast 6; back 6, 6, 12, 12 and 4.
    "last_bias": Steps(forward=28, backward=40, kernels=(2, 3), per_expert=(2, 6)),
    # PyTorch's cross entropy is counted by its bytes per logit (`StepModel.loss_bytes`).
    "loss": Steps(forward=0, backward=0, kernels=(0, 0)),
}
"""What may run step by step. Values are those of a block's norms and of norms of queries and keys; queries and keys that are
rotated; what attention gives; hidden values of experts; copies of tokens; both halves of experts' first results; copies of
tokens again."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A transformer with MoE layers, and how it is trained."""

    num_layers: int
    """Blocks of attention and a feed-forward layer."""
    layer: Workload
    """Of the MoE layers; its tokens are those of a micro-batch of one data-parallel group."""
    seq_len: int
    """Tokens of a sequence."""
    moe_every: int = 1
    """Each how-many-th block has an MoE layer, counted from the last block; the others are dense."""
    dense_hidden: int = 0
    """Inner width of dense feed-forward layers; 0 for top_k times the experts'."""
    vocab: int = 0
    """Of the embedding and the output; 0 leaves both out."""
    micro_batches: int = 1
    """Accumulated before the optimizer steps."""
    recomputed: tuple[Part, ...] = ()
    """What backward computes again. "block": each block keeps its input only. Of the parts: the scores, the norms' results,
    what low-rank attention expands, dense feed-forward layers, MoE layers, what their activation gives, shared experts."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes in an MoE layer; 0 for none."""
    parameter_bytes: int = 4
    """Of a parameter, of its gradient, and of each of Adam's two moments."""
    gathered_bytes: int = 0
    """Of a parameter that lies in parts, on its way to the ranks that compute with it; 0 for `parameter_bytes`."""
    sparse_layers: int | None = None
    """Blocks with an MoE layer; None for those that `moe_every` says."""
    attention_parameters: float = 0.0
    """Of a block's attention, the mean over blocks; 0 for four matrices dim x dim."""
    score_operations: float = 0.0
    """Of a token and block where queries meet keys and values, the mean over blocks; 0 for heads as wide as a token that see
    all tokens before it."""
    key_values: float = 0.0
    """Values per token of a block's keys and values; 0 for two of a token's width."""
    shares_sequence: int = 1
    """Ranks that have a part of each sequence, and pass keys and values round (context parallelism)."""
    attention_kept: float = 0.0
    """Values per token that a block's attention keeps for backward, its input among them, the mean over blocks; 0 for 5.5 times
    a token's width: input, queries, keys, values, result, and the mask of a dropout (Korthikanti et al. 2022, section 4.1)."""
    attention_up_kept: float = 0.0
    """Of these, what low-rank attention expands, which `mla_up_proj` computes again."""
    attention_copied: float = 0.0
    """Values per token that a block reads and writes between projections and scores: norms of queries and keys, rotations, and
    putting together what low-rank attention has in parts."""
    attention_up: float = 0.0
    """Parameters of a block that expand them."""
    head_dim: float = 0.0
    """Width of a head's queries; 0 for the widest that the cluster knows the scores of."""
    score_kernel: ScoreKernel = "best"
    """What computes the scores."""
    stepwise: tuple[str, ...] = ()
    """What runs step by step in place of fused kernels: keys of `COSTS`."""
    attention_normed: float = 0.0
    """Values per token and block of norms inside attention."""
    attention_rotated: float = 0.0
    """Values per token and block of queries and keys that are rotated."""
    attention_result: float = 0.0
    """Values per token and block that the scores give; 0 for a token's width."""
    keeps_activated: bool = False
    """Feed-forward layers also keep what their activation gives, as they do without a product that computes it again."""
    embeddings: int = 2
    """Matrices vocab x dim: embedding and output; 1 where they are one."""
    sharded: Sharded = "parameters"
    """What lies in parts on data-parallel ranks. parameters: all that belongs to one (FSDP2, ZeRO-3). The others have
    parameters as wide as activations whole on every rank. optimizer: the float32 master and moments lie in parts (ZeRO-1);
    gradients are reduced and parameters gathered once per step. gradients: they do too, and are reduced in every micro-batch
    (ZeRO-2). none: nothing does, and gradients are all-reduced once per step."""
    outputs: int = 1
    """How often the output is computed for a token: once, and once more for every further token that is predicted."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Its stages; `num_layers` are those that a rank works through for a micro-batch, and `vocab` its part."""
    runs: tuple[StageRun, ...] = ()
    """Runs of layers of the whole pipeline, where they are unlike; () for equal ones."""
    alive: float = 0.0
    """Micro-batches whose activations a rank keeps at once; 0 for those of the rank of the pipeline that keeps most."""
    replicas: int = 1
    """Copies of what lies in parts, which all-reduce their gradients: HSDP, or instances of a distributed optimizer."""
    overlapped: bool = False
    """All-to-alls run beside another micro-batch's computing."""
    hides_parameters: bool = True
    """Parameters that are gathered once per step come behind the first forward pass, rather than before it."""
    hides_gradients: bool = True
    """Gradients that are reduced once per step go behind the last backward pass, rather than after it."""
    loss_bytes: int = 36
    """Read and written per logit by the loss, forward and backward: 36 by PyTorch's cross entropy of a float32 copy (the copy
    and its gradient 6 each, log-softmax 8 and 12, zeros 4)."""
    sequence_parallel: bool = False
    """Norms and residuals see a part of the positions, so that tensor parallelism scatters its sums and gathers them again in
    place of an all-reduce."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "seq_len", "moe_every", "micro_batches", "parameter_bytes", "replicas"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("dense_hidden", "vocab", "shared_hidden"):
            if getattr(self, name) < 0:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 0")
        for part in self.recomputed:
            if part not in PARTS:
                raise InputError(f"model.recomputed={part!r}: choose of {', '.join(PARTS)}")
        for each in self.stepwise:
            if each not in COSTS:
                raise InputError(f"model.stepwise={each!r}: choose of {', '.join(COSTS)}")
        if self.layer.tokens % self.seq_len:
            raise InputError(
                f"model.layer.tokens={self.layer.tokens} are no whole sequences of model.seq_len={self.seq_len}: choose a "
                "multiple"
            )

    @property
    def moe_layers(self) -> int:
        """MoE layers; the last block has one."""
        return -(-self.num_layers // self.moe_every) if self.sparse_layers is None else self.sparse_layers

    @property
    def attention(self) -> float:
        """Parameters of a block's attention."""
        return self.attention_parameters or 4 * self.layer.dim * self.layer.dim

    @property
    def scores(self) -> float:
        """Operations per token and block where queries meet keys and values."""
        return self.score_operations or 2 * 2 * self.seq_len * self.layer.dim / 2

    @property
    def inner(self) -> int:
        """Inner width of dense feed-forward layers."""
        return self.dense_hidden or self.layer.top_k * self.layer.hidden

    @property
    def dense_parameters(self) -> float:
        """Parameters outside the experts; the router's among them."""
        dim = self.layer.dim
        blocks = self.num_layers * self.attention + self.moe_layers * dim * self.layer.num_experts
        dense = (self.num_layers - self.moe_layers) * self.layer.matrices * dim * self.inner
        return blocks + dense + self.embeddings * self.vocab * dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.layer.num_experts * self.layer.matrices * self.layer.dim * self.layer.hidden
