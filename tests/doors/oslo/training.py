"""Training of a tiny model by the loop of OSLO's tutorial, and the same training of the whole model by one process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, ROWS, LENGTH = 32, 4, 8


def gpt2(**changes: Any) -> Any:
    """A GPT-2 of four layers by default, without dropout; its head is tied to its embedding."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes | rates | changes, bos_token_id=1, eos_token_id=2))


def qwen3() -> Any:
    """A Qwen3 of two layers, whose norms see the heads of one rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))


def batch(step: int, replica: int) -> dict[str, torch.Tensor]:
    """Inputs of a step for one replica; the last row is padded."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def parallel_losses(engine: DistributedDataParallel, optimizer: Any, steps: range, replica: int) -> list[float]:
    """Losses of this replica in the tutorial's loop."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = engine(**batch(step, replica)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole_losses(model: nn.Module, optimizer: Any, steps: range, replicas: int) -> list[list[float]]:
    """Losses by replica of the whole model, whose gradients are averaged over the batches of the replicas."""
    losses: list[list[float]] = [[] for _ in range(replicas)]
    for step in steps:
        optimizer.zero_grad()
        for replica in range(replicas):
            loss = model(**batch(step, replica)).loss
            (loss / replicas).backward()
            losses[replica].append(float(loss.detach()))
        optimizer.step()
    return losses


def engine_of(model: Any) -> DistributedDataParallel:
    """The tutorial's engine on the CPU."""
    return DistributedDataParallel(module=model, process_group=model.mpu.get_data_parallel_group())


def distances(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Give each name with the largest difference of its elements."""
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        yield name, float((tensor.cpu() - expected[name].cpu()).abs().max())
