"""Pre-training of Qwen3-MoE by transformers' Trainer: python examples/hf/qwen3_moe.py [NAME]

The family: softmax router whose weights sum to 1 after the choice, no shared expert.
examples/recipes/hf_trainer.py shows the same on several ranks.
"""

from small import pretrain

pretrain("qwen3_moe")
