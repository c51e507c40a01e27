"""Pre-training of DeepSeek-V3's shape by transformers' Trainer: python examples/hf/deepseek_v3.py
[NAME]

The family: sigmoid router over the best groups with a balancing bias, latent attention, a shared
expert. examples/recipes/hf_trainer.py shows the same on several ranks.
"""

from small import pretrain

pretrain("deepseek_v3")
