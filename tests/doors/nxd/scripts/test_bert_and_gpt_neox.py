"""Calls of NxD 2.29's BERT and GPT-NeoX scripts with their arguments: TP + DP, and TP + DP with ZeRO-1.

Each has a loop of its own over layers of Hugging Face. Losses and parameters equal a training in one process.
"""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPTNeoXConfig,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

import nxdpp.parallel_layers.utils as neuronx_dist_utils
from nxdpp.optimizer import NeuronZero1Optimizer
from nxdpp.parallel_layers import (
    checkpointing,
    grads,
    layer_norm,
    layers,
    mappings,
    move_model_to_device,
    parallel_state,
)
from nxdpp.parallel_layers.loss_functions import parallel_cross_entropy
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients
from nxdpp.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.support.local_slice import local_slice
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
GPT_NEOX: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
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


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    no_decay = ["bias", "norm"]
    return [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]


def bert() -> nn.Module:
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


class _Scatter(torch.autograd.Function):
    """Of ``utils.py`` of the GPT-NeoX scripts."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = vars(mappings)["_split_along_first_dim"](input_)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = vars(mappings)["_gather_along_first_dim"](gradients[0])
        return whole


def gpt_neox() -> nn.Module:
    """A model over parallel layers, as those scripts have one."""
    config = GPTNeoXConfig(**GPT_NEOX)
    config.use_cache = False
    size, heads = config.hidden_size, config.num_attention_heads
    init_method = partial(nn.init.normal_, mean=0.0, std=config.initializer_range)
    device = parallel_state.local_device()
    more: dict[str, Any] = {"init_method": init_method, "sequence_parallel_enabled": True}

    def norm() -> nn.Module:
        made = layer_norm.LayerNorm(size, eps=config.layer_norm_eps, sequence_parallel_enabled=True)
        made.bias.data.zero_()
        made.weight.data.fill_(1.0)
        return made

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = layers.ColumnParallelLinear(size, config.intermediate_size, gather_output=False, **more)
            self.down = layers.RowParallelLinear(config.intermediate_size, size, input_is_parallel=True, **more)
            for layer in (self.up, self.down):
                nn.init.zeros_(cast(nn.Parameter, layer.bias))
            move_model_to_device(self, device)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            down: torch.Tensor = self.down(nn.functional.gelu(self.up(states)))
            return down

    class ParallelNeoXAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = neuronx_dist_utils.divide(heads, parallel_state.get_tensor_model_parallel_size())
            self.query_key_value = layers.ColumnParallelLinear(size, 3 * size, stride=3, gather_output=False, **more)
            self.dense = layers.RowParallelLinear(size, size, input_is_parallel=True, **more)
            move_model_to_device(self, device)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            # The sequence comes first.
            qkv = self.query_key_value(states)
            query, key, value = (each.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for each in qkv.chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            dense: torch.Tensor = self.dense(attended.permute(2, 0, 1, 3).flatten(2))
            return dense

    class NeoXBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = norm(), norm()
            self.attention, self.mlp = ParallelNeoXAttention(), Mlp()

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            attended = self.attention(self.input_layernorm(states))
            added: torch.Tensor = self.mlp(self.post_attention_layernorm(states)) + attended + states
            return added

    class NeoXForCausalLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.embed_in = layers.ParallelEmbedding(config.vocab_size, size, init_method=init_method)
            self.layers = nn.ModuleList([NeoXBlock() for _ in range(config.num_hidden_layers)])
            self.final_layer_norm = norm()
            self.embed_out = layers.ColumnParallelLinear(
                size, config.vocab_size, bias=False, gather_output=False, init_method=init_method
            )

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            states = self.embed_in(input_ids).transpose(0, 1).contiguous()
            states = _Scatter.apply(states)  # type: ignore[no-untyped-call]
            for layer in self.layers:
                states = torch.utils.checkpoint.checkpoint(layer, states, use_reentrant=True)
            states = self.final_layer_norm(states)
            states = mappings.gather_from_sequence_parallel_region(states, to_model_parallel=False)
            logits = self.embed_out(states.transpose(0, 1).contiguous())[:, :-1].contiguous()
            return parallel_cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).mean()

    return NeoXForCausalLM()


def of_bert(model: nn.Module, row: list[torch.Tensor]) -> torch.Tensor:
    ids, segments, mask, labels, following = row
    loss: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, token_type_ids=segments, labels=labels, next_sentence_label=following
    ).loss
    return loss


def of_gpt_neox(model: nn.Module, row: list[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=row[0], labels=row[0])
    return loss


KINDS: dict[str, tuple[Any, Any]] = {
    "bert": (bert, of_bert),
    "20b": (gpt_neox, of_gpt_neox),
}
Run = tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]


def prepared(kind: str) -> nn.Module:
    """The model in training, on its device, with its ties."""
    set_seed(1)
    model: nn.Module = KINDS[kind][0]()
    move_model_to_device(model, parallel_state.local_device())
    model.train()
    if isinstance(model, BertForPreTraining):
        model.tie_weights()
        model.cls.predictions.decoder.bias = model.cls.predictions.bias
    return model


def one_process(kind: str) -> Run:
    """Initial weights, losses and weights of a plain loop in this process."""
    parallel_state.initialize_model_parallel()
    try:
        model = prepared(kind)
        initial = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(groups_of(model), RATE)
        schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
        losses = []
        for whole in loader(BATCH):
            parts = [list(row) for row in zip(*(each.chunk(BATCH) for each in whole), strict=True)]
            each = torch.stack([KINDS[kind][1](model, part) for part in parts])
            each.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(each.mean().item())
        return initial, losses, copy.deepcopy(model.state_dict())
    finally:
        parallel_state.destroy_model_parallel()


def compare(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    for name, parameter in model.named_parameters():
        dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
        theirs = whole[name] if dim < 0 else local_slice(whole[name], dim, rank, size, stride)
        torch.testing.assert_close(parameter, theirs, rtol=1e-4, atol=1e-5, msg=name)


def scripts(rank: int, runs: dict[str, Run], folder: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert neuronx_dist_utils.get_local_world_size() == dist.get_world_size()
    for kind, (initial, losses, final) in runs.items():
        train(kind, initial, losses, final, folder / kind)


def train(
    kind: str, initial: dict[str, torch.Tensor], losses: list[float], final: dict[str, torch.Tensor], folder: Path
) -> None:
    replicas, is_bert = parallel_state.get_data_parallel_size(), kind == "bert"
    model = prepared(kind)
    if dist.get_rank() == 0:
        folder.mkdir()
        torch.save(initial, folder / "whole.pt")
    dist.barrier()
    # The scripts draw parts, which depend on the number of ranks.
    checkpointing.load(folder / "whole.pt", model, model_key=None, sharded=False)
    optimizer: Any
    if is_bert:
        optimizer = torch.optim.AdamW(groups_of(model), RATE)
    else:
        optimizer = NeuronZero1Optimizer(
            groups_of(model),
            AdamW_FP32OptimParams,
            lr=RATE,
            pin_layout=False,
            sharding_groups=parallel_state.get_data_parallel_replica_groups(),
            grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
        )
    optimizer.zero_grad()
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=10, last_epoch=-1)
    running_loss = torch.zeros(1, dtype=torch.double).to(parallel_state.local_device())
    steps = 0
    for number, data in enumerate(loader(BATCH // replicas // ACCUMULATED), 1):
        loss = KINDS[kind][1](model, data) / ACCUMULATED
        loss.backward()
        running_loss += loss.detach()
        if number % ACCUMULATED:
            continue
        running_loss_div = running_loss / replicas
        dist.all_reduce(running_loss_div, group=parallel_state.get_data_parallel_group())
        torch.testing.assert_close(running_loss_div.item(), losses[steps], rtol=1e-5, atol=1e-6)
        running_loss.zero_()
        if not is_bert:
            # Missing in the script, whose copies of the norms drift apart.
            allreduce_sequence_parallel_gradients(optimizer)
        else:
            grads.bucket_allreduce_gradients([p.grad for p in model.parameters() if p.grad is not None])
            grads.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
    assert steps == STEPS
    compare(model, final)
    state = {"model": model.state_dict(), "global_step": steps, "epoch": 1, "scheduler": scheduler.state_dict()}
    if is_bert:
        state["optimizer"] = optimizer.state_dict()
        checkpointing.save(state, folder)
    else:
        checkpointing.save(state, folder, down_cast_bf16=True)
        optimizer.save_sharded_state_dict(folder)
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    for each in optimizer.state.values():
        for value in each.values():
            value.zero_()
    found = checkpointing.load(folder, model)
    assert (found["global_step"], found["epoch"]) == (STEPS, 1)
    scheduler.load_state_dict(found["scheduler"])
    if is_bert:
        optimizer.load_state_dict(found["optimizer"])
    else:
        optimizer.load_sharded_state_dict(folder)
    for index, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(values[name]), torch.as_tensor(kept[index][name])) for name in values)


def test_bert_and_gpt_neox_scripts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    run_ranks(4, scripts, {kind: one_process(kind) for kind in KINDS}, tmp_path)
