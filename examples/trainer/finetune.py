"""Fine-tune a small model with ``transformers.Trainer``'s arguments, over the stages of a pipeline.

::

    torchrun --nproc-per-node 4 examples/trainer/finetune.py
    torchrun --nproc-per-node 4 examples/trainer/finetune.py --pipeline_parallel_size 2 --bf16    # two replicas

The text is the standard library of the running Python, and a token is a byte. Without ``--model_name_or_path`` the
model is a small Llama with random weights. All fields of ``TrainingArguments`` are flags.
"""

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
)

from nxdpp.integrations import PipelineTrainer


@dataclass
class Options:
    """Flags besides ``TrainingArguments``'."""

    pipeline_parallel_size: int | None = field(default=None, metadata={"help": "Ranks of a pipeline; by default all."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "A causal model to fine-tune."})
    text: str | None = field(default=None, metadata={"help": "Files to train on, a pattern such as 'docs/*.md'."})
    sequence_length: int = field(default=128, metadata={"help": "Tokens of a row."})
    prompt: str = field(default="def ", metadata={"help": "The sample begins with it."})


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of ``length`` tokens, one after the other in the text."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def bytes_as_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, and one for the end of a file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def small_llama(vocabulary: int, end: int) -> LlamaForCausalLM:
    """A Llama of 8 layers, whose random weights are equal on all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config)


def read(pattern: str | None) -> str:
    """The text of the files of ``pattern``, by default of the top-level modules of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    files = library.glob("*.py") if pattern is None else Path().glob(pattern)
    texts = [file.read_text(errors="replace") for file in sorted(files)]
    if not texts:
        raise SystemExit(f"--text {pattern!r} matches no file.")
    return "".join(texts)


def parse() -> tuple[Options, TrainingArguments]:
    """Return the flags, some with different defaults than in ``TrainingArguments``."""
    classes: Any = (Options, TrainingArguments)
    parser = HfArgumentParser(classes)
    parser.set_defaults(
        output_dir="runs/trainer",
        use_cpu=not torch.accelerator.is_available(),
        max_steps=150,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=15,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        disable_tqdm=True,
        report_to="none",
    )
    options, args = parser.parse_args_into_dataclasses()
    return options, args


def main() -> None:
    """Train, save, and sample from the saved model."""
    options, args = parse()
    if options.model_name_or_path is None:
        tokenizer: Any = bytes_as_tokens()
        model: Any = small_llama(len(tokenizer), tokenizer.eos_token_id)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path)
    tokens = torch.tensor(tokenizer(read(options.text))["input_ids"])
    held_out = min(len(tokens) // 20, 64 * options.sequence_length)
    trainer = PipelineTrainer(
        model,
        args,
        data_collator=default_data_collator,
        train_dataset=Rows(tokens[:-held_out], options.sequence_length),
        eval_dataset=Rows(tokens[-held_out:], options.sequence_length),
        processing_class=tokenizer,
        pipeline_parallel_size=options.pipeline_parallel_size,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(sample(str(args.output_dir), options.prompt))


def sample(directory: str, prompt: str) -> str:
    """``prompt`` and 80 tokens that the model saved in ``directory`` adds to it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, max_new_tokens=80, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    main()
