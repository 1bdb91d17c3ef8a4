"""PEFT: adapters of transformers models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
from torch import nn

from tools.zoo.libraries.case import Batch, Case
from tools.zoo.tiny_models import build

_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": None,
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
}


def _adapted(task: str, model_type: str, adapter: Callable[..., Any], settings: dict[str, Any]) -> nn.Module:
    config = adapter(task_type=_TASKS[task], **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: nn.Module = peft.get_peft_model(build(task, model_type), config)
    return model.train()


def _batch(task: str, length: int = 16) -> Callable[[torch.Generator, int], Batch]:
    def batch(generator: torch.Generator, rows: int) -> Batch:
        ids = torch.randint(32, 128, (rows, length), generator=generator)
        labels = torch.randint(2, (rows,), generator=generator) if task == "sequence-classification" else ids.clone()
        return {"input_ids": ids, "labels": labels}

    return batch


def _case(adapter: Callable[..., Any], task: str = "causal-lm", model_type: str = "llama", **settings: Any) -> Case:
    return Case(partial(_adapted, task, model_type, adapter, settings), _batch(task))


_ATTENTION = ["q_proj", "v_proj"]
_LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False}
CASES = {
    "LoRA": _case(peft.LoraConfig, target_modules=_ATTENTION, **_LORA),
    "LoRA, all linear layers": _case(peft.LoraConfig, target_modules="all-linear", **_LORA),
    "LoRA, modules_to_save": _case(
        peft.LoraConfig, target_modules=_ATTENTION, modules_to_save=["lm_head", "embed_tokens"], **_LORA
    ),
    "LoRA of embeddings": _case(peft.LoraConfig, target_modules=["embed_tokens", "q_proj"], **_LORA),
    "rsLoRA": _case(peft.LoraConfig, target_modules=_ATTENTION, use_rslora=True, **_LORA),
    "DoRA": _case(peft.LoraConfig, target_modules=_ATTENTION, use_dora=True, **_LORA),
    "LoRA of GPT-2": _case(peft.LoraConfig, model_type="gpt2", target_modules=["c_attn"], fan_in_fan_out=True, **_LORA),
    "LoRA of Mixtral": _case(peft.LoraConfig, model_type="mixtral", target_modules=_ATTENTION, **_LORA),
    "LoRA of Qwen3": _case(peft.LoraConfig, model_type="qwen3", target_modules=_ATTENTION, **_LORA),
    "LoRA of BERT": _case(peft.LoraConfig, "masked-lm", "bert", target_modules=["query", "value"], **_LORA),
    "LoRA of T5": _case(peft.LoraConfig, "seq2seq-lm", "t5", target_modules=["q", "v"], **_LORA),
    "LoRA of a classifier": _case(
        peft.LoraConfig, "sequence-classification", "roberta", target_modules=["query", "value"], **_LORA
    ),
    "IA3": _case(peft.IA3Config, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": _case(peft.LoHaConfig, r=4, target_modules=_ATTENTION, init_weights=False),
    "LoKr": _case(peft.LoKrConfig, r=4, target_modules=_ATTENTION, init_weights=False),
    "OFT": _case(peft.OFTConfig, r=0, oft_block_size=4, target_modules=_ATTENTION),
    "BOFT": _case(peft.BOFTConfig, boft_block_size=4, target_modules=_ATTENTION),
    "VeRA": _case(peft.VeraConfig, r=4, target_modules=_ATTENTION),
    "AdaLoRA": _case(peft.AdaLoraConfig, target_modules=_ATTENTION, total_step=10, tinit=2, tfinal=2),
    "FourierFT": _case(peft.FourierFTConfig, n_frequency=8, target_modules=_ATTENTION),
    "LayerNorm tuning": _case(peft.LNTuningConfig, target_modules=["input_layernorm"]),
    "prompt tuning": _case(peft.PromptTuningConfig, num_virtual_tokens=4),
    "prefix tuning": _case(peft.PrefixTuningConfig, num_virtual_tokens=4),
    "p-tuning": _case(peft.PromptEncoderConfig, num_virtual_tokens=4, encoder_hidden_size=16),
}
