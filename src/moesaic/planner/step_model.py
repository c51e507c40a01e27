"""`StepModel`: a transformer with MoE layers, and how it is trained. `step.py` predicts its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from moesaic.errors import InputError
from moesaic.planner.cluster import ScoreKernel
from moesaic.planner.pipeline import Pipeline
from moesaic.planner.workload import Workload

Part = Literal["block", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What backward can recompute: a whole block, or a part of it under Megatron's name."""


class StageRun(NamedTuple):
    """A run of consecutive layers of a pipeline."""

    blocks: int
    sparse: int
    """Blocks among them with an MoE layer."""
    outputs: int
    """How many times the run computes the output."""


Sharded = Literal["parameters", "gradients", "optimizer", "none"]
"""As in `StepModel.sharded`."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Cost of one operation that a system runs unfused, step by step, beyond one fused kernel.

    In eager PyTorch every step is a kernel that reads its inputs and writes its result. The numbers are counted in the
    sources that `COSTS` names, never fitted to a step. They are bytes per value of two bytes, less the bytes that the
    step model already counts for one fused kernel (`planner/step.py`, `planner/compute.py`). Broadcast factors, such as the
    cosines of a rotation, count nothing. A test counts the same steps one by one.
    """

    forward: float
    """Bytes per value, forward."""
    backward: float
    """Bytes per value, backward."""
    kernels: tuple[int, int]
    """Number of kernels, forward and backward."""
    per_expert: tuple[int, int] = (0, 0)
    """Number of kernels per expert of a rank, forward and backward, if the system loops over experts."""

    def seconds(self, values: float, memory: float, launch: float, experts: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass: traffic or kernel launches, whichever takes longer.

        Args:
            values: values of a rank.
            memory: bytes per second.
            launch: seconds of the host per kernel.
            experts: experts of a rank.
        """
        passes = zip((self.forward, self.backward), self.kernels, self.per_expert)
        forward, backward = (
            max(traffic * values / memory, (kernels + experts * per_expert) * launch) if values else 0.0
            for traffic, kernels, per_expert in passes
        )
        return forward, backward


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
"""Operations that may run step by step. Their values are, in this order: those of a block's norms and of norms of
queries and keys; queries and keys that are rotated; results of attention; hidden values of experts; copies of tokens;
both halves of experts' first results; copies of tokens again."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A transformer with MoE layers, and how it is trained."""

    num_layers: int
    """Blocks of attention and a feed-forward layer."""
    layer: Workload
    """The MoE layers; its tokens are those of a micro-batch of one data-parallel group."""
    seq_len: int
    """Tokens per sequence."""
    moe_every: int = 1
    """Every `moe_every`-th block has an MoE layer, counted from the last block; the others are dense."""
    dense_hidden: int = 0
    """Inner width of dense feed-forward layers; 0 for `top_k` times the experts' width."""
    vocab: int = 0
    """Vocabulary of the embedding and the output; 0 leaves both out."""
    micro_batches: int = 1
    """Micro-batches per optimizer step."""
    recomputed: tuple[Part, ...] = ()
    """What backward recomputes. "block": each block keeps its input only. Parts: the scores, the norms' results, the
    up-projections of low-rank attention, dense feed-forward layers, MoE layers, results of their activation, shared
    experts."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes in an MoE layer; 0 for none."""
    parameter_bytes: int = 4
    """Bytes of a parameter, of its gradient, and of each of Adam's two moments."""
    gathered_bytes: int = 0
    """Bytes of a sharded parameter while it is gathered; 0 for `parameter_bytes`."""
    sparse_layers: int | None = None
    """Number of blocks with an MoE layer; None to derive it from `moe_every`."""
    attention_parameters: float = 0.0
    """Parameters of a block's attention, mean over blocks; 0 for four matrices dim x dim."""
    score_operations: float = 0.0
    """Operations per token and block between queries, keys and values, mean over blocks; 0 for heads that are together
    as wide as a token and see all earlier tokens."""
    key_values: float = 0.0
    """Values per token of a block's keys and values; 0 for twice a token's width."""
    shares_sequence: int = 1
    """Ranks that share each sequence and pass keys and values round (context parallelism)."""
    attention_kept: float = 0.0
    """Values per token that a block's attention keeps for backward, input included, mean over blocks; 0 for 5.5 times a
    token's width: input, queries, keys, values, result, and a dropout mask (Korthikanti et al. 2022, section 4.1)."""
    attention_up_kept: float = 0.0
    """Of `attention_kept`: results of the up-projections of low-rank attention, which `mla_up_proj` recomputes."""
    attention_copied: float = 0.0
    """Values per token that a block reads and writes between projections and scores: norms of queries and keys,
    rotations, and joining the parts of low-rank attention."""
    attention_up: float = 0.0
    """Parameters of a block's up-projections of low-rank attention."""
    head_dim: float = 0.0
    """Width of a head's queries; 0 for the largest width for which the cluster gives the speed of scores."""
    score_kernel: ScoreKernel = "best"
    """Kernel that computes the scores."""
    stepwise: tuple[str, ...] = ()
    """Operations that run step by step rather than as fused kernels: keys of `COSTS`."""
    attention_normed: float = 0.0
    """Values per token and block that norms inside attention read."""
    attention_rotated: float = 0.0
    """Values per token and block of queries and keys that are rotated."""
    attention_result: float = 0.0
    """Values per token and block of the result of attention; 0 for a token's width."""
    keeps_activated: bool = False
    """Feed-forward layers also keep the results of their activation, as they do unless a product recomputes them."""
    embeddings: int = 2
    """Number of matrices vocab x dim: embedding and output; 1 if they are tied."""
    sharded: Sharded = "parameters"
    """What is sharded over data-parallel ranks. parameters: parameters, gradients and optimizer state (FSDP2, ZeRO-3).
    With the others, every rank holds whole parameters as wide as activations. optimizer: the float32 master and moments
    are sharded (ZeRO-1); gradients are reduced and parameters gathered once per step. gradients: gradients are sharded
    too, and reduced in every micro-batch (ZeRO-2). none: nothing is sharded, and gradients are all-reduced once per
    step."""
    outputs: int = 1
    """How many times the output is computed per token: once, plus once per further token that is predicted."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Pipeline schedule. `num_layers` counts the layers that a rank runs per micro-batch, and `vocab` is the rank's
    part."""
    runs: tuple[StageRun, ...] = ()
    """Runs of layers of the whole pipeline, if they differ; () if they are equal."""
    alive: float = 0.0
    """Micro-batches whose activations a rank keeps at once; 0 for those of the pipeline's rank that keeps most."""
    replicas: int = 1
    """Number of copies of each shard, which all-reduce their gradients: HSDP, or instances of a distributed optimizer."""
    overlapped: bool = False
    """All-to-alls overlap with the computation of another micro-batch."""
    hides_parameters: bool = True
    """Parameters that are gathered once per step are gathered behind the first forward pass rather than before it."""
    hides_gradients: bool = True
    """Gradients that are reduced once per step are reduced behind the last backward pass rather than after it."""
    loss_bytes: int = 36
    """Bytes that the loss reads and writes per logit, forward and backward. PyTorch's cross entropy of a float32 copy
    takes 36: the copy and its gradient 6 each, log-softmax 8 and 12, zeros 4."""
    sequence_parallel: bool = False
    """Norms and residuals work on a part of the positions. Tensor parallelism then uses a reduce-scatter and an
    all-gather in place of an all-reduce."""

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
        for operation in self.stepwise:
            if operation not in COSTS:
                raise InputError(f"model.stepwise={operation!r}: choose of {', '.join(COSTS)}")
        if self.layer.tokens % self.seq_len:
            raise InputError(
                f"model.layer.tokens={self.layer.tokens} are not whole sequences of model.seq_len={self.seq_len}: choose a "
                "multiple"
            )

    @property
    def moe_layers(self) -> int:
        """Number of MoE layers; the last block has one."""
        return -(-self.num_layers // self.moe_every) if self.sparse_layers is None else self.sparse_layers

    @property
    def attention(self) -> float:
        """Parameters of a block's attention."""
        return self.attention_parameters or 4 * self.layer.dim * self.layer.dim

    @property
    def scores(self) -> float:
        """Operations per token and block between queries, keys and values."""
        return self.score_operations or 2 * 2 * self.seq_len * self.layer.dim / 2

    @property
    def inner(self) -> int:
        """Inner width of dense feed-forward layers."""
        return self.dense_hidden or self.layer.top_k * self.layer.hidden

    @property
    def dense_parameters(self) -> float:
        """Parameters outside the experts, routers included."""
        dim = self.layer.dim
        blocks = self.num_layers * self.attention + self.moe_layers * dim * self.layer.num_experts
        dense = (self.num_layers - self.moe_layers) * self.layer.matrices * dim * self.inner
        return blocks + dense + self.embeddings * self.vocab * dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.layer.num_experts * self.layer.matrices * self.layer.dim * self.layer.hidden
