"""Experts in NF4, adapters on attention and on every expert, on any number of small cards; run by
python or by torchrun:

    torchrun --nproc-per-node 2 examples/hf/qlora.py [NAME]

Each rank reads and keeps its own experts. The adapters are saved in PEFT's format; started again,
it goes on from them.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from small import TEXTS, config_of, settings, show, tokenizer_of_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from moesaic.transformers import FourBitExpertsConfig, adopt_adapters, distributed_config

RUN = "runs/qlora"
world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
name = f"{RUN}/model-of-rank-{rank}"
tokenizer = tokenizer_of_bytes()
if len(sys.argv) > 1:
    name = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
else:
    torch.manual_seed(0)
    config = config_of("qwen3_moe")
    config.moe_intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(name)

spread = {"distributed_config": distributed_config(ep_size=world)} if world > 1 else {}
base = AutoModelForCausalLM.from_pretrained(
    name, quantization_config=FourBitExpertsConfig(), experts_implementation="moesaic", **spread
)
if Path(RUN, "adapter_config.json").exists():
    model = PeftModel.from_pretrained(base, RUN, is_trainable=True)
else:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    )
adopt_adapters(model)
data = Dataset.from_dict({"text": TEXTS})
given = SFTConfig(**settings(RUN), max_length=128, bf16=False)
trainer = SFTTrainer(model=model, args=given, train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.save_model(RUN)
show(trainer.state.log_history)
