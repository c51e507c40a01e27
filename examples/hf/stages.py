"""Layers in two stages over ranks; with four ranks, two share the experts of a stage:

    torchrun --nproc-per-node 2 examples/hf/stages.py [NAME]

Each rank reads its own layers. Attention and experts get adapters, saved in PEFT's format.
"""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from small import TEXTS, config_of, tokenizer_of_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from moesaic.finetune.adapters import save_adapters
from moesaic.finetune.staged import StagedModel
from moesaic.finetune.stages import load_stage, ranks_in_stages
from moesaic.train.launch import launch
from moesaic.transformers import FourBitExpertsConfig, adopt_adapters, distributed_config

STAGES, SEQUENCES, LENGTH, MICRO_BATCHES = 2, 2, 96, 4
RUN = Path("runs/stages")
name = sys.argv[1] if len(sys.argv) > 1 else f"{RUN}/model-of-rank-{os.environ['RANK']}"
if len(sys.argv) == 1:
    torch.manual_seed(0)
    config = config_of("qwen3_moe")
    config.moe_intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(name)
    tokenizer_of_bytes().save_pretrained(name)
logging.set_verbosity_error()  # else it warns of the weights of the other stage
place = launch()  # joins the processes of torchrun
device = "cuda" if torch.cuda.is_available() else "cpu"
ranks, cut = ranks_in_stages(STAGES, device)
tokenizer = AutoTokenizer.from_pretrained(name)
sharing = ranks.world // STAGES
spread = {"distributed_config": distributed_config(sharing, fsdp_size=sharing)}
options = {"experts_implementation": "moesaic", "quantization_config": FourBitExpertsConfig()}
base = load_stage(name, cut, **options, **(spread if sharing > 1 else {"device_map": device}))
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
torch.manual_seed(0)
model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], target_parameters=experts))
adopt_adapters(model, ranks.mesh.process_group)
trained = [each for each in model.train().parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
staged = StagedModel(base, ranks, (SEQUENCES, LENGTH), count=MICRO_BATCHES, device=device)
tokens = torch.tensor(tokenizer("".join(TEXTS))["input_ids"])
rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH).to(device)
own = rows[ranks.rank % sharing :: sharing]  # other sequences on each rank of a stage
for batch in own.split(SEQUENCES * MICRO_BATCHES)[:6]:
    loss = staged.step(batch)
    staged.clip(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if ranks.is_first:
        print(f"loss {loss.item():.4f}", flush=True)
save_adapters(model, ranks, RUN)
place.leave()
