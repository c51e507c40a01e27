"""Flags of Megatron and torchtitan that change neither the time nor the memory of a step, or that
say what is assumed anyway.

Any other flag that no prediction reads is named to the user (`emit.unread_flags`): a flag that
nobody has thought about may matter. Names have hyphens in place of underscores.
"""

from __future__ import annotations

MODEL = (
    "add-qkv-bias attention-output-gate disable-bias-linear ffn-hidden-size "
    "group-query-attention init-method-std init-method-xavier-uniform kv-channels kv-lora-rank "
    "make-vocab-size-divisible-by max-position-embeddings moe-layer-freq moe-layer-recurrence "
    "moe-router-bias-update-rate moe-router-enable-expert-bias moe-router-fusion "
    "moe-router-group-topk moe-router-num-groups moe-router-pre-softmax "
    "moe-router-score-function moe-router-topk-scaling-factor "
    "moe-shared-expert-intermediate-size mscale mscale-all-dim multi-latent-attention "
    "no-position-embedding norm-epsilon normalization num-query-groups "
    "original-max-position-embeddings padded-vocab-size position-embedding-type q-lora-rank "
    "qk-head-dim qk-layernorm qk-pos-emb-head-dim rope-scaling-factor rope-type rotary-base "
    "rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor swiglu "
    "untie-embeddings-and-output-weights use-rope-scaling use-rotary-position-embeddings "
    "v-head-dim vocab-size model.flavor model.hf-assets-path model.name"
)
"""What `--model` says already. Sizes that a job also has are compared with it (`emit.SIZES`)."""
OPTIMIZATION = (
    "adam-beta1 adam-beta2 adam-eps clip-grad decoupled-lr decoupled-min-lr end-weight-decay "
    "hysteresis initial-loss-scale loss-scale loss-scale-window lr lr-decay-iters "
    "lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters "
    "lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style "
    "min-loss-scale min-lr moe-aux-loss-coeff moe-input-jitter-eps "
    "moe-router-load-balancing-type moe-z-loss-coeff mtp-loss-scaling-factor "
    "override-opt-param-scheduler seed start-weight-decay train-iters train-samples "
    "te-rng-tracker use-checkpoint-opt-param-scheduler weight-decay weight-decay-incr-style "
    "exit-duration-in-mins exit-interval exit-signal-handler lr-scheduler.decay-ratio "
    "lr-scheduler.decay-type lr-scheduler.min-lr-factor lr-scheduler.warmup-steps "
    "optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.lr optimizer.weight-decay "
    "training.max-norm training.seed training.steps debug.seed debug.deterministic-warn-only"
)
"""How weights are changed, when, and for how long."""
DATA = (
    "cache-mla-latents data-args-path data-cache-path data-path dataloader-type eod-mask-loss "
    "legacy-tokenizer merge-file mmap-bin-files mock-data "
    "no-create-attention-mask-in-dataloader no-mmap-bin-files num-dataset-builder-threads "
    "num-workers per-split-data-args-path reset-attention-mask reset-position-ids sft split "
    "test-data-path tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens "
    "tokenizer-hf-include-special-tokens tokenizer-hf-use-fast tokenizer-metadata "
    "tokenizer-model tokenizer-type train-data-path trust-remote-code valid-data-path "
    "vocab-extra-ids vocab-file training.dataset training.dataset-path"
)
"""Texts and tokenizers."""
CHECKPOINTS = (
    "async-save auto-detect-ckpt-format ckpt-assume-constant-structure ckpt-convert-format "
    "ckpt-convert-save ckpt-format ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step "
    "dist-ckpt-format dist-ckpt-strictness dist-ckpt-workers exit-on-missing-checkpoint "
    "finetune load no-load-optim no-load-rng no-save-optim no-save-rng "
    "no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type "
    "non-persistent-save-interval override-ckpt-iteration pretrained-checkpoint save "
    "save-interval save-retain-interval use-checkpoint-args use-dist-ckpt "
    "use-persistent-ckpt-worker checkpoint.async-mode checkpoint.enable "
    "checkpoint.enable-checkpoint checkpoint.exclude-from-loading checkpoint.export-dtype "
    "checkpoint.folder checkpoint.initial-load-path checkpoint.interval "
    "checkpoint.keep-latest-k checkpoint.last-save-in-hf checkpoint.last-save-model-only "
    "checkpoint.load-step"
)
"""What is saved and loaded, between steps."""
WATCHING = (
    "eval-interval eval-iters full-validation full-validation-iters log-energy log-interval "
    "log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard log-memory-interval "
    "log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress "
    "log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard "
    "log-world-size-to-tensorboard logging-level moe-per-layer-logging no-one-logger "
    "one-logger-async one-logger-project one-logger-run-name tensorboard-dir "
    "tensorboard-log-interval tensorboard-queue-size timing-log-level timing-log-option "
    "wandb-entity wandb-exp-name wandb-project wandb-save-dir "
    "job.custom-config-module job.description job.dump-folder job.print-args job.print-config "
    "metrics.disable-color-printing metrics.enable-tensorboard metrics.enable-wandb "
    "metrics.log-freq metrics.save-for-all-ranks metrics.save-tb-folder "
    "profiling.enable-profiling profiling.profile-freq profiling.save-traces-folder "
    "validation.dataset validation.enable validation.freq validation.local-batch-size "
    "validation.seq-len validation.steps"
)
"""What is measured, printed and evaluated, between steps."""
RUNNING = (
    "distributed-backend distributed-timeout-minutes local-rank rank use-mcore-models "
    "no-use-tokenizer-cache world-size comm.init-timeout-seconds comm.trace-buf-size "
    "comm.train-timeout-seconds"
)
"""How processes find each other."""
ASSUMED = (
    "attention-softmax-in-fp32 bf16 fp16 moe-grouped-gemm moe-permute-fusion "
    "moe-router-padding-for-fp8 moe-token-drop-policy no-check-for-nan-in-loss-and-grad "
    "no-masked-softmax-fusion sequence-parallel "
    "training.disable-cuda-graphs use-flash-attn"
)
"""What predictions assume: 16-bit and grouped products, fused attention and permutation, sequence
parallelism beside tp, and launches one by one. With a value such as "false" these are named."""
VARIABLES = "CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_DEVICE_MAX_CONNECTIONS=32"
"""Variables of the environment."""
HARMLESS = frozenset(
    " ".join(
        (MODEL, OPTIMIZATION, DATA, CHECKPOINTS, WATCHING, RUNNING, ASSUMED, VARIABLES)
    ).split()
)
"""Flags that are harmless whatever their values."""
HARMLESS_VALUES: dict[str, tuple[str, ...]] = {
    "attention-backend": ("auto", "flash", "fused"),
    "attention-dropout": ("0", "0.0"),
    "cp-comm-type": ("p2p",),
    "cuda-graph-impl": ("none",),
    "exp-avg-dtype": ("fp32",),
    "exp-avg-sq-dtype": ("fp32",),
    "hidden-dropout": ("0", "0.0"),
    "main-grads-dtype": ("fp32",),
    "main-params-dtype": ("fp32",),
    "moe-flex-dispatcher-backend": ("deepep",),
    "moe-router-dtype": ("fp32", "fp64"),
    "optimizer": ("adam", "adamw"),
    "optimizer.name": ("Adam", "AdamW"),
    "parallelism.enable-async-tensor-parallel": ("false", "False"),
    "training.mixed-precision-param": ("bfloat16",),
    "training.mixed-precision-reduce": ("float32",),
    "transformer-impl": ("transformer_engine",),
}
"""Flags that are harmless with some values, which are those that predictions assume."""
