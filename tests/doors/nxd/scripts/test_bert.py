"""Calls of NxD 2.29's BERT script with their arguments: TP + DP, with a loop of its own over a model of Hugging Face.

Losses and parameters equal a training in one process.
"""

import copy
import math
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    BertConfig,
    BertForPreTraining,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

import nxdpp.parallel_layers.utils as neuronx_dist_utils
from nxdpp.parallel_layers import (
    checkpointing,
    grads,
    layers,
    move_model_to_device,
    parallel_state,
)
from tests.doors.nxd.scripts.comparison import compare, groups_of
from tests.support.run_ranks import run_ranks

STEPS, BATCH, LENGTH, VOCABULARY, RATE, ACCUMULATED = 2, 4, 6, 48, 1e-2, 2
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Rows(Dataset[list[torch.Tensor]]):
    """Ids, segments, mask, labels of masked tokens, and whether one sentence follows the other."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
        self.next = torch.randint(2, (STEPS * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        row = self.ids[index]
        labels = torch.where(torch.arange(LENGTH) % 2 == 0, row, -100)
        return [row, torch.zeros_like(row), torch.ones_like(row), labels, self.next[index]]


def loader(size: int) -> DataLoader[list[torch.Tensor]]:
    rows = Rows()
    sampler: DistributedSampler[list[torch.Tensor]] = DistributedSampler(
        rows,
        num_replicas=parallel_state.get_data_parallel_size(),
        rank=parallel_state.get_data_parallel_rank(),
        shuffle=False,
    )
    return DataLoader(rows, sampler=sampler, batch_size=size, num_workers=0, drop_last=True)


def bert() -> BertForPreTraining:
    """The model of the script: attention over parallel layers put into a model of Hugging Face."""
    base = BertForPreTraining(BertConfig(**BERT))
    config = copy.deepcopy(base.config)
    model = BertForPreTraining(config)
    std = config.initializer_range / math.sqrt(parallel_state.get_tensor_model_parallel_size())

    class ParallelSelfAttention(BertSelfAttention):
        def __init__(self, config: Any) -> None:
            super().__init__(config)  # type: ignore[no-untyped-call]
            for name in ("query", "key", "value"):
                layer = layers.ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
                layer.weight.data.normal_(mean=0.0, std=std)
                nn.init.zeros_(cast(nn.Parameter, layer.bias))
                self.add_module(name, layer)
            self.num_attention_heads //= parallel_state.get_tensor_model_parallel_size()
            self.all_head_size //= parallel_state.get_tensor_model_parallel_size()

    class ParallelSelfOutput(BertSelfOutput):
        def __init__(self, config: Any) -> None:
            super().__init__(config)  # type: ignore[no-untyped-call]
            dense = layers.RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)
            dense.weight.data.normal_(mean=0.0, std=std)
            nn.init.zeros_(cast(nn.Parameter, dense.bias))
            self.add_module("dense", dense)

    for layer in model.bert.encoder.layer:
        attention: Any = layer.attention
        attention.self = ParallelSelfAttention(config)
        attention.output = ParallelSelfOutput(config)
    return model


def of_bert(model: nn.Module, row: list[torch.Tensor]) -> torch.Tensor:
    ids, segments, mask, labels, following = row
    loss: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, token_type_ids=segments, labels=labels, next_sentence_label=following
    ).loss
    return loss


def prepared() -> BertForPreTraining:
    """The model in training, on its device, with its ties."""
    set_seed(1)
    model = bert()
    move_model_to_device(model, parallel_state.local_device())
    model.train()
    model.tie_weights()
    model.cls.predictions.decoder.bias = model.cls.predictions.bias
    return model


def one_process() -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Initial weights, losses and weights of a plain loop in this process."""
    parallel_state.initialize_model_parallel()
    try:
        model = prepared()
        initial = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(groups_of(list(model.named_parameters())), RATE)
        schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
        losses = []
        for whole in loader(BATCH):
            parts = [list(row) for row in zip(*(each.chunk(BATCH) for each in whole), strict=True)]
            each = torch.stack([of_bert(model, part) for part in parts])
            each.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(each.mean().item())
        return initial, losses, copy.deepcopy(model.state_dict())
    finally:
        parallel_state.destroy_model_parallel()


def train(rank: int, run: tuple[Any, Any, Any], folder: Path) -> None:
    initial, losses, final = run
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert neuronx_dist_utils.get_local_world_size() == dist.get_world_size()
    replicas = parallel_state.get_data_parallel_size()
    model = prepared()
    if rank == 0:
        torch.save(initial, folder / "whole.pt")
    dist.barrier()
    # The scripts draw parts, which depend on the number of ranks.
    checkpointing.load(folder / "whole.pt", model, model_key=None, sharded=False)
    optimizer = torch.optim.AdamW(groups_of(list(model.named_parameters())), RATE)
    optimizer.zero_grad()
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=10, last_epoch=-1)
    running_loss = torch.zeros(1, dtype=torch.double).to(parallel_state.local_device())
    steps = 0
    for number, data in enumerate(loader(BATCH // replicas // ACCUMULATED), 1):
        loss = of_bert(model, data) / ACCUMULATED
        loss.backward()
        running_loss += loss.detach()
        if number % ACCUMULATED:
            continue
        running_loss_div = running_loss / replicas
        dist.all_reduce(running_loss_div, group=parallel_state.get_data_parallel_group())
        torch.testing.assert_close(running_loss_div.item(), losses[steps], rtol=1e-5, atol=1e-6)
        running_loss.zero_()
        grads.bucket_allreduce_gradients([p.grad for p in model.parameters() if p.grad is not None])
        grads.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
    assert steps == STEPS
    compare(model.named_parameters(), final)
    state = {"model": model.state_dict(), "global_step": steps, "epoch": 1, "scheduler": scheduler.state_dict()}
    checkpointing.save({**state, "optimizer": optimizer.state_dict()}, folder)
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    for each in optimizer.state.values():
        for value in each.values():
            value.zero_()
    found = checkpointing.load(folder, model)
    assert (found["global_step"], found["epoch"]) == (STEPS, 1)
    scheduler.load_state_dict(found["scheduler"])
    optimizer.load_state_dict(found["optimizer"])
    for index, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(values[name]), torch.as_tensor(kept[index][name])) for name in values)


def test_the_bert_script_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    run_ranks(4, train, one_process(), tmp_path)
