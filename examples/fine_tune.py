"""Fine-tune a published model over the stages of a pipeline: torchrun --nproc-per-node 2 fine_tune.py MODEL DATA OUTPUT

MODEL is a name on the Hugging Face hub, or a folder. DATA is a .txt file of a sample a line, or a .jsonl file of
"messages" (chat), "prompt" and "completion", or "text".
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from huggingface_hub import HfApi
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig

from nxdpp import parallel_state
from nxdpp.integrations import MetricsCallback, PipelineSFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("model", "data", "output"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lora", action="store_true", help="train adapters in place of all weights")
parser.add_argument("--four-bit", action="store_true", help="adapters over frozen 4-bit weights of bitsandbytes")
parser.add_argument("--cpu", action="store_true", default=not torch.accelerator.is_available(), help="float32, no GPU")
parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint of OUTPUT")
parser.add_argument("--prompt", default="Once upon a time", help="what the tuned model answers")
parser.add_argument("--push", metavar="OWNER/NAME", help="private repository on the hub that gets the result")
asked = parser.parse_args()

kind, adapts = "text" if asked.data.endswith(".txt") else "json", asked.lora or asked.four_bit
rows = load_dataset(kind, data_files=asked.data, split="train").train_test_split(0.1, seed=0)
tokenizer = AutoTokenizer.from_pretrained(asked.model)
dtype = "float32" if asked.cpu else "bfloat16"
four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}  # 8 microbatches of 2 rows
schedule = {"max_steps": asked.steps, "eval_strategy": "steps", "eval_steps": (often := max(asked.steps // 4, 1))}
numbers = {"save_steps": often, "learning_rate": 2e-4 if adapts else 2e-5, "use_cpu": asked.cpu, "bf16": not asked.cpu}
args = SFTConfig(asked.output, report_to="none", **batches, **schedule, **numbers)
given: dict[str, Any] = {"quantization_config": four_bit if asked.four_bit else None}
given["peft_config"] = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapts else None
trainer = PipelineSFTTrainer(asked.model, args, None, rows["train"], rows["test"], tokenizer, **given)
trainer.add_callback(MetricsCallback(trainer))  # python -m nxdpp watch OUTPUT
complete = sorted(Path(asked.output).glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime)
trainer.train(resume_from_checkpoint=str(complete[-1].parent) if asked.resume and complete else None)
trainer.save_model()  # from_pretrained reads OUTPUT
inputs = tokenizer(asked.prompt, return_tensors="pt")
if "messages" in rows["train"].column_names:
    chat = [{"role": "user", "content": asked.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = trainer.pipelined.eval().generate(**inputs, max_new_tokens=40)
parallel_state.destroy_model_parallel()
if args.process_index == 0:
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    trainer.create_model_card()
    if asked.push:
        HfApi().create_repo(asked.push, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=asked.push, folder_path=asked.output, ignore_patterns=["*/*", "*.bin"])
