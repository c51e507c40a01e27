"""PEFT's LoRA on the experts of a transformers model, in one process: python
examples/recipes/lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from tiny import LENGTH, STEPS, VOCAB
from transformers import MixtralConfig, MixtralForCausalLM

import moesaic.transformers  # noqa: F401

sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
}
torch.manual_seed(0)
base = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
base.set_experts_implementation("moesaic")
targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets)
model = get_peft_model(base, config)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
ids = (torch.arange(VOCAB)[:, None] + torch.arange(LENGTH)) % VOCAB
for _ in range(STEPS):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
