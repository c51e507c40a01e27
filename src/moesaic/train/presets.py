"""Presets: functions that return a configuration. `--preset NAME` starts from one; flags override it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.train.config import DataConfig, OptimizerConfig, TrainConfig


def demo() -> TrainConfig:
    """Return the sparse half of `make demo`: a byte-level GPT-MoE that trains in about three minutes on two CPU cores.

    The experts are narrow on purpose: of the shapes tried, this one gained most over a dense model (docs/log.md).
    """
    return TrainConfig(
        out="runs/demo/moe",
        steps=600,
        batch_size=8,
        eval_every=100,
        save_every=300,
        model=ModelConfig(
            dim=128, num_layers=4, num_heads=4, seq_len=256, moe=MoEConfig(num_experts=64, top_k=2, hidden=64)
        ),
        optimizer=OptimizerConfig(lr=3e-3),
    )


def demo_dense() -> TrainConfig:
    """Return the dense half of `make demo`: the same active parameters, tokens and steps."""
    config = demo()
    return replace(config, out="runs/demo/dense", model=replace(config.model, ffn="dense"))


def gpt_tiny() -> TrainConfig:
    """Return a model that trains in seconds: for tests and for trying things out."""
    return TrainConfig(
        out="runs/gpt-tiny",
        steps=50,
        batch_size=4,
        eval_every=25,
        eval_sequences=8,
        model=ModelConfig(
            dim=32, num_layers=2, num_heads=2, seq_len=64, moe=MoEConfig(num_experts=4, top_k=2, hidden=32)
        ),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=10),
    )


def gpt_small() -> TrainConfig:
    """Return a GPT-2-small-sized sparse model (124 M active parameters, 8 experts) for one GPU, with a BPE tokenizer."""
    return TrainConfig(
        out="runs/gpt-small",
        steps=20_000,
        batch_size=16,
        accumulation=4,
        eval_every=500,
        save_every=1000,
        model=ModelConfig(
            dim=768,
            num_layers=12,
            num_heads=12,
            seq_len=1024,
            moe=MoEConfig(num_experts=8, top_k=2, hidden=1024, z_loss=1e-3),
            checkpoint_activations=True,
        ),
        data=DataConfig(vocab_size=16_384),
        optimizer=OptimizerConfig(lr=6e-4, warmup_steps=500),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "demo-dense": demo_dense,
    "gpt-tiny": gpt_tiny,
    "gpt-small": gpt_small,
}
