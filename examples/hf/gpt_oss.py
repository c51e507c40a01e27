"""Pre-training of gpt-oss by transformers' Trainer: python examples/hf/gpt_oss.py [NAME]

The family: biases in router and experts, clamped SwiGLU, gate and up interleaved.
examples/recipes/hf_trainer.py shows the same on several ranks.
"""

from small import pretrain

pretrain("gpt_oss")
