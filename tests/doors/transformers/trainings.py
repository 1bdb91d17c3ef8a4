"""Trainings of tiny models that ``Trainer`` in one process and ``PipelineTrainer`` over ranks both run."""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

from tests.support.models import VOCABULARY, gpt2, llama, tied_llama
from tests.support.vision_language import IMAGE, SIDE, START, make_vision_language, pixels

LAYERS = 2


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens with labels; ``lengths`` of the rows may differ, and so do the numbers of labels."""

    def __init__(self, rows: int = 20, shortest: int = 12, longest: int = 12, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(shortest, longest + 1, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(3, VOCABULARY, (size,), generator=generator) for size in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.rows[index], "labels": labels}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of ``Rows`` in order, without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = Rows(rows)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows[index] for index in range(len(self.rows)))


class RandomRows(Rows):
    """Rows whose tokens are drawn anew each time, from each generator of the process."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        numbers = [random.randrange(9), int(np.random.randint(9)), int(torch.randint(9, ()))]
        return {"input_ids": (row["input_ids"] + sum(numbers)) % VOCABULARY, "labels": row["labels"]}


class Classes(Rows):
    """Rows of tokens with a class each."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": torch.tensor(index % 3)}


class SomeImages(Rows):
    """Rows for a vision-language model of equal lengths, of which two of five have an image."""

    def __init__(self, rows: int = 20, seed: int = 0, last: int | None = None) -> None:
        super().__init__(rows, 24, 24, seed)
        # From here on no row has an image.
        self.last = rows if last is None else last

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = 40 + self.rows[index] % 40
        has_image = index % 5 <= 1 and index < self.last
        if has_image:
            ids[1] = START
            ids[2:18] = IMAGE
        row = {"input_ids": ids, "labels": ids}
        return row | {"pixel_values": pixels(3, SIDE, SIDE) * (1 + index / 8)} if has_image else row


def with_images(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows (B, T), and the images of those that have one."""
    names = {name for row in rows for name in row}
    given = {name: [row[name] for row in rows if name in row] for name in sorted(names)}
    return {name: torch.stack(own) for name, own in given.items()}


def vision_language() -> nn.Module:
    return make_vision_language("llava")[0]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as long as the longest one of the batch (B, T), with a mask."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids = pad([row["input_ids"] for row in rows], padding_value=0)
    labels = pad([row["labels"] for row in rows], padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def classifier() -> nn.Module:
    config = llama(LAYERS).config
    config.num_labels = 3
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def small_llama() -> nn.Module:
    return llama(LAYERS)


def mean_of_batches() -> nn.Module:
    """A model whose loss is the mean of each batch, whatever the number of labels."""
    model = llama(LAYERS)
    vars(model)["accepts_loss_kwargs"] = False
    return model


def adapted() -> nn.Module:
    model: nn.Module = get_peft_model(
        llama(LAYERS), LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    )
    return model


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        args: fields of ``TrainingArguments`` that differ from those of all trainings.
        model: constructor of the model.
        given: other arguments of ``Trainer``, which may be functions without arguments.
        pipeline: arguments of ``PipelineTrainer`` alone.
        replicated: the field that one process multiplies by the number of replicas.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = small_llama
    given: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    replicated: str = "gradient_accumulation_steps"

    def trainer(self, cls: type[Trainer], folder: Path, replicas: int = 1, **pipeline: Any) -> Trainer:
        """Return the trainer; one process takes the batches of ``replicas``."""
        take_device_of_ranks()
        torch.manual_seed(0)
        model = self.model()
        args = {**_SHARED, **self.args, "output_dir": str(folder)}
        if cls is Trainer:
            args["per_device_eval_batch_size"] *= replicas
            args[self.replicated] *= replicas
        own = {**self.pipeline, **pipeline} if cls is not Trainer else {}
        given = {"train_dataset": Rows(20), **self.given}
        if "optimizers" in given:
            given["optimizers"] = given["optimizers"](model)
        return cls(model, TrainingArguments(**args), **given, **own)


def take_device_of_ranks() -> None:
    """Give accelerate the accelerator of a rank, and start a world with its backend.

    With ``use_cpu`` accelerate starts one of gloo, and it knows no type of a device but those in its code. Its barrier
    is for the device with the number of the rank on its host, and a rank of the tests sees one device.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.type}:{torch.accelerator.current_device_index()}"
    state: Any = PartialState
    state.wait_for_everyone = lambda _: dist.barrier()
    if not dist.is_initialized():
        dist.init_process_group(f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}")


_SHARED: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
}


def compute_metrics(predictions: Any) -> dict[str, float]:
    logits, labels = predictions.predictions, predictions.label_ids
    return {"rows": float(len(logits)), "mean": float(logits.mean()), "labels": float(labels.sum())}


class BatchMetrics:
    """Counts the rows of an evaluation, batch by batch."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, predictions: Any, compute_result: bool = False) -> dict[str, float]:
        self.rows += len(predictions.predictions)
        if not compute_result:
            return {}
        rows, self.rows = self.rows, 0
        return {"rows": float(rows)}


def followed_optimizers(model: nn.Module) -> tuple[Any, Any]:
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [each for name, each in named.items() if "layers" in name], "lr": 2e-3},
        {"params": [each for name, each in named.items() if "layers" not in name]},
    ]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def first_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[..., :3]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
TWO_EPOCHS = {"num_train_epochs": 2}
STAGES = {
    "evaluated": Training(
        {**EVALUATED, "logging_strategy": "epoch", "include_num_input_tokens_seen": "all"},
        model=partial(tied_llama, LAYERS),
        given={"eval_dataset": Rows(7, seed=1)},
    ),
    "bfloat16": Training({"bf16": True, "max_grad_norm": 0.0}),
    "split, given optimizer": Training(
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 3},
        model=llama,
        given={"optimizers": followed_optimizers},
        pipeline={"num_microbatches": 8, "schedule": "zb-v"},
    ),
    "plateau, metrics of batches": Training(
        {
            **TWO_EPOCHS,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
            "optim": "rmsprop",
            "batch_eval_metrics": True,
        },
        given={"eval_dataset": Rows(7, seed=1), "compute_metrics": BatchMetrics()},
    ),
}
"""Trainings of two stages."""
WITH_DROPOUT = Training(
    {
        **TWO_EPOCHS,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": 1,
        "dataloader_multiprocessing_context": "fork",
    },
    model=partial(gpt2, LAYERS, dropout=0.1),
    given={"data_collator": padded, "train_dataset": Rows(20, 5, 14)},
)
"""A training whose stages draw other numbers; rank 0 orders the rows of all."""


LONE = {
    "stream": Training({"max_steps": 3}, given={"train_dataset": Stream(20)}),
    "9 classes": Training(
        {**EVALUATED, "gradient_accumulation_steps": 2},
        model=classifier,
        given={"train_dataset": Classes(9), "eval_dataset": Classes(5, seed=1), "compute_metrics": compute_metrics},
        replicated="per_device_train_batch_size",
    ),
    "9 rows, mean of batches": Training(
        {"gradient_accumulation_steps": 3}, model=mean_of_batches, given={"train_dataset": Rows(9)}
    ),
    "19 rows, padded": Training(
        {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3},
        given={"data_collator": padded, "train_dataset": Rows(19, 5, 14)},
    ),
}
"""Trainings of two replicas of one stage; of 9 rows the second replica has none in the last batch."""
REPLICATED = {
    "metrics": Training(
        {**EVALUATED, "include_for_metrics": ["inputs", "loss"], "eval_on_start": True},
        model=partial(gpt2, LAYERS),
        given={
            "eval_dataset": Rows(11, seed=1),
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": first_logits,
        },
    ),
    "11 rows, clipped, cosine": Training(
        {
            **EVALUATED,
            **TWO_EPOCHS,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.3,
            "lr_scheduler_type": "cosine",
        },
        given={"train_dataset": Rows(11), "eval_dataset": Rows(7, seed=1)},
    ),
    "9 rows, split": Training(
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
        given={"train_dataset": Rows(9)},
        pipeline={"num_microbatches": 2},
        replicated="per_device_train_batch_size",
    ),
    "budget of tokens": Training(
        {**EVALUATED, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2},
        given={"data_collator": padded, "train_dataset": Rows(20, 5, 14), "eval_dataset": Rows(7, seed=1)},
        pipeline={"most_tokens": 30},
    ),
    "no images in the last rows": Training(
        {**TWO_EPOCHS, "remove_unused_columns": False, "train_sampling_strategy": "sequential"},
        model=vision_language,
        given={"train_dataset": SomeImages(21, last=16), "data_collator": with_images},
        replicated="per_device_train_batch_size",
    ),
}
"""Trainings of two replicas of two stages."""
ADAPTED = Training({"max_steps": 3, **EVALUATED}, model=adapted, given={"eval_dataset": Rows(7, seed=1)})
