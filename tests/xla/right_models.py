"""Small language models whose numbers on XLA devices are compared, and their training in one process."""

from typing import Any, NamedTuple

import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.support.models import VOCABULARY, make, microbatches, padded_batch
from tests.support.xla_process import on_device, placed, run_recorded

MODELS = ("llama", "tied_llama", "gpt2", "t5", "mixtral")
STEPS = 16
MICROBATCHES = 4
# AdamW divides a gradient by its own size plus eps. With the default of 1e-8 a gradient of rounding alone, as that of
# an attention's key bias, becomes a step of a whole learning rate. With 1e-3 it stays rounding, and others still train.
RATE, EPS = 1e-3, 1e-3


class Trained(NamedTuple):
    """Numbers of a training on the host: by original name the first gradients, and the parameters after all steps."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def build(name: str) -> Any:
    """The model of this name, with the same weights at each call, on the CPU, without dropout."""
    if name != "t5":
        model = make(name)
        if name == "mixtral":
            # The others, grouped_mm and eager, do not run on XLA devices, or compile anew for each routing.
            model.set_experts_implementation("batched_mm")
        return model
    torch.manual_seed(1234)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Eight rows of ten tokens, some of them padded, with labels: int64 (8, 10) each, on the CPU."""
    return padded_batch(8, seed=step)


def optimizer_of(parameters: Any) -> torch.optim.AdamW:
    """AdamW for a comparison of parameters after some steps."""
    return torch.optim.AdamW(list(parameters), lr=RATE, eps=EPS)


def train_unwrapped(name: str, device: torch.device) -> Trained:
    """Train the model of this name in this process alone, without nxdpp; it accumulates microbatches one by one."""
    model = placed(build(name), device)
    model.config.use_cache = False
    optimizer = optimizer_of(model.parameters())
    losses: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        for microbatch in microbatches(batch(step), MICROBATCHES):
            loss = model(**on_device(microbatch, device)).loss
            (loss / MICROBATCHES).backward()
            run_recorded(device)
            losses.append(loss.detach().cpu())
        gradients = gradients or gradients_of(model.named_parameters(remove_duplicate=False))
        optimizer.step()
        optimizer.zero_grad()
        run_recorded(device)
    first = torch.stack(losses[:MICROBATCHES]).mean()
    return Trained(first, gradients, values_of(model.named_parameters(remove_duplicate=False)))


def gradients_of(named: Any) -> dict[str, torch.Tensor]:
    """Copies in host memory of the gradients, by name."""
    return {name: parameter.grad.detach().cpu().clone() for name, parameter in named}


def values_of(named: Any) -> dict[str, torch.Tensor]:
    """Copies in host memory of the parameters, by name."""
    return {name: parameter.detach().cpu().clone() for name, parameter in named}
