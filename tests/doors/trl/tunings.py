"""Fine-tunings of tiny models that TRL in one process and the pipeline's trainers over ranks both run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from nxdpp.integrations import PipelineDPOTrainer, PipelineSFTTrainer
from tests.doors.transformers.trainings import take_device_of_ranks
from tests.support.models import VOCABULARY, llama, mixtral, qwen3

_SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<unk>"]
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{% generation %}{{ message.content }} </s>{% endgeneration %} {% else %}<user> {{ message.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ..., and a chat template that marks the assistant's tokens."""
    words = [*_SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(_SPECIAL)))]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=_TEMPLATE
    )


def _words(number: int, count: int) -> str:
    return " ".join(f"w{(number * 7 + place * place * 3) % (VOCABULARY - len(_SPECIAL))}" for place in range(count))


def texts(rows: int) -> Dataset:
    return Dataset.from_dict({"text": [_words(row, 4 + row * 5 % 9) for row in range(rows)]})


def completions(rows: int) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_words(row, 2 + row % 3) for row in range(rows)],
            "completion": [" " + _words(row + 9, 3 + row * 3 % 5) for row in range(rows)],
        }
    )


def chats(rows: int) -> Dataset:
    return Dataset.from_dict({"messages": [_chat(row) for row in range(rows)]})


def _chat(row: int) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[turn % 2], "content": _words(row + turn, 2 + (row + turn) % 4)}
        for turn in range(4)
    ]


def pairs(rows: int) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_words(row, 2 + row % 3) for row in range(rows)],
            "chosen": [" " + _words(row + 5, 3 + row % 4) for row in range(rows)],
            "rejected": [" " + _words(row + 11, 2 + row % 5) for row in range(rows)],
        }
    )


def small_llama() -> nn.Module:
    return llama(2)


def small_qwen3() -> nn.Module:
    return qwen3(2)


def small_mixtral() -> nn.Module:
    return mixtral(2)


@dataclass(frozen=True)
class Tuning:
    """One fine-tuning.

    Attributes:
        args: fields of the configuration that differ from the ones that all have.
        data: gives a data set of a number of rows.
        model: constructor of the model.
        adapted: the model gets adapters; ``"before"`` the trainer is made, or ``"by the trainer"``.
        evaluated: rows of the evaluation's data set; 0 for none.
        reference: constructor of the reference model.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[int], Dataset] = texts
    model: Callable[..., nn.Module] = small_llama
    adapted: str = ""
    evaluated: int = 0
    reference: Callable[[], nn.Module] | None = None

    @property
    def is_dpo(self) -> bool:
        """``True`` for pairs."""
        return self.data is pairs

    def trainer(
        self, folder: Path, replicas: int = 1, evaluated_by: int = 1, *, over_ranks: bool = False, **pipeline: Any
    ) -> Any:
        """Return the trainer; one process trains on the batches of ``replicas``, and evaluates others' together."""
        torch.manual_seed(0)
        model = self.model()
        take_device_of_ranks()
        args = {**_SHARED, **self.args, "output_dir": str(folder)}
        if not over_ranks:
            args["per_device_train_batch_size"] *= replicas
            args["per_device_eval_batch_size"] *= evaluated_by
        given: dict[str, Any] = {"train_dataset": self.data(24), "processing_class": tokenizer()}
        if self.evaluated:
            given["eval_dataset"] = self.data(self.evaluated)
        if self.adapted == "before":
            model = get_peft_model(model, lora())
        elif self.adapted:
            given["peft_config"] = lora()
        if self.reference is not None:
            torch.manual_seed(1)
            given["ref_model"] = self.reference()
        if over_ranks:
            given |= pipeline
        if self.is_dpo:
            cls: Any = PipelineDPOTrainer if over_ranks else DPOTrainer
            return cls(model, args=DPOConfig(**args), **given)
        cls = PipelineSFTTrainer if over_ranks else SFTTrainer
        return cls(model, SFTConfig(**args), **given)


def lora() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)


_SHARED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
}
_FOUR = {"gradient_accumulation_steps": 4}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
_SAVED = {**_EVALUATED, "save_strategy": "steps", "save_steps": 2}
_PACKED = {"packing": True, "max_length": 24, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
_LOSSES = [
    *("sigmoid", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm"),
]

STAGES = {
    "chats": Tuning({"assistant_only_loss": True, **_EVALUATED}, chats, small_qwen3, evaluated=4),
    "packed, dynamic": Tuning({**_PACKED, "loss_type": "dft", "max_grad_norm": 0.1}),
    "experts": Tuning(model=small_mixtral),
    "pairs after adapters": Tuning(
        {"loss_type": "hinge", "f_divergence_type": "js_divergence", **_SAVED},
        pairs,
        adapted="before",
        evaluated=4,
    ),
    "many losses": Tuning(
        {"loss_type": _LOSSES, "loss_weights": [0.1] * len(_LOSSES), "label_smoothing": 0.1},
        pairs,
        reference=small_llama,
    ),
    "weighted pairs": Tuning(
        {"use_weighting": True, "ld_alpha": 0.5, "label_smoothing": 0.1, "loss_type": "robust", "bf16": True},
        pairs,
        reference=small_llama,
    ),
    "known references": Tuning(
        {
            "precompute_ref_log_probs": True,
            "loss_type": ["ipo", "sft"],
            "loss_weights": [1.0, 0.5],
            "beta": 0.5,
            **_EVALUATED,
        },
        pairs,
        evaluated=4,
    ),
}
"""Fine-tunings over two stages."""
RESUMED = "pairs after adapters"
"""The fine-tuning with a checkpoint after step 2."""
REPLICATED = {
    "completions": Tuning(_EVALUATED, completions, small_qwen3, evaluated=8),
    "pairs with adapters": Tuning({**_EVALUATED, **_FOUR}, pairs, qwen3, adapted="by the trainer", evaluated=8),
}
"""Fine-tunings of two replicas of two stages."""
SHARDED = Tuning({"gradient_checkpointing": True, **_FOUR}, pairs, llama, reference=llama)
