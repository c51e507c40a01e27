"""transformers' Trainer over experts that are spread: torchrun --nproc-per-node 2
examples/recipes/hf_trainer.py"""

import os
import tempfile

import torch
import torch.distributed as dist
from tiny import LENGTH, STEPS, VOCAB
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

import moesaic.transformers  # noqa: F401

world = int(os.environ["WORLD_SIZE"])
sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
}
config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
name = os.path.join(
    tempfile.gettempdir(), f"tiny-mixtral-{os.environ['MASTER_PORT']}-{os.environ['RANK']}"
)
torch.manual_seed(0)
MixtralForCausalLM(config).save_pretrained(name)  # a name from the hub in your program

spread = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="moesaic")
model = AutoModelForCausalLM.from_pretrained(
    name, experts_implementation="moesaic", distributed_config=spread
)
ids = [(torch.arange(LENGTH) + first) % VOCAB for first in range(VOCAB)]
data = [{"input_ids": each, "labels": each} for each in ids]
given = TrainingArguments(
    name,
    max_steps=STEPS,
    learning_rate=0.01,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model.train(), args=given, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry and os.environ["RANK"] == "0":
        print(f"loss {float(entry['loss']):.6f}")
dist.destroy_process_group()
