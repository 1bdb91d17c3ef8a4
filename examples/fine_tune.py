"""Fine-tune a published model over the stages of a pipeline, and let it answer.

    torchrun --nproc-per-node 2 examples/fine_tune.py MODEL DATA --output runs/tuned

MODEL is a name on the Hugging Face hub, or a folder. DATA is a text file, of which each line is a sample; or JSON lines
with "messages" (chat), "prompt" and "completion", or "text". A second start with the same folder resumes.
"""

import argparse
from pathlib import Path

import torch.distributed as dist
from datasets import load_dataset
from huggingface_hub import HfApi
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

from nxdpp.integrations import MetricsCallback, PipelineSFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("data")
parser.add_argument("--output", default="runs/tuned", help="folder of checkpoints and of the tuned model")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lora", action="store_true", help="train adapters in place of all weights")
parser.add_argument("--four-bit", action="store_true", help="adapters over frozen 4-bit weights of bitsandbytes")
parser.add_argument("--cpu", action="store_true", help="float32 on the CPU, over gloo")
parser.add_argument("--prompt", default="Once upon a time", help="what the tuned model continues")
parser.add_argument("--push", metavar="OWNER/NAME", help="repository on the hub that gets the result")
asked = parser.parse_args()

rows = load_dataset("text" if asked.data.endswith(".txt") else "json", data_files=asked.data, split="train")
rows = rows.train_test_split(0.1, seed=0)
tokenizer = AutoTokenizer.from_pretrained(asked.model)
settings = SFTConfig(
    asked.output,
    max_steps=asked.steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,  # the microbatches of the pipeline: four times the processes is a good start
    learning_rate=2e-4 if asked.lora or asked.four_bit else 2e-5,
    eval_strategy="steps",
    eval_steps=0.25,  # of all steps
    save_steps=0.25,
    save_total_limit=2,
    use_cpu=asked.cpu,
    bf16=not asked.cpu,
    report_to="none",
)
if asked.four_bit:
    settings.model_init_kwargs = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
adapters = asked.lora or asked.four_bit
lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
trainer = PipelineSFTTrainer(asked.model, settings, None, rows["train"], rows["test"], tokenizer, peft_config=lora)
trainer.add_callback(MetricsCallback(trainer))  # python -m nxdpp watch runs/tuned
trainer.train(resume_from_checkpoint=get_last_checkpoint(asked.output) if Path(asked.output).is_dir() else None)
trainer.save_model()  # from_pretrained reads the folder

tokens = trainer.pipelined.eval().generate(**tokenizer(asked.prompt, return_tensors="pt"), max_new_tokens=40)
if dist.get_rank() == 0:
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    trainer.create_model_card()
    if asked.push:
        HfApi().create_repo(asked.push, exist_ok=True)
        HfApi().upload_folder(repo_id=asked.push, folder_path=asked.output, ignore_patterns="checkpoint-*")
dist.barrier()
