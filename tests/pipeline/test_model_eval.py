"""``run_eval``: the loss if the model returns one, its outputs otherwise."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import (
    gradient_differences,
    make,
    microbatches,
    padded_batch,
    reference,
    train_in_one_process,
)


def evaluate(rank: int, name: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make(name, layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=4)
    wrapped.move_model_to_device()
    for module in (wrapped, whole):
        module.eval()
    for size, length in ((8, 10), (4, 6)):
        batch = padded_batch(size, length)
        tokens = {key: batch[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            losses = [whole(**part).loss for part in microbatches(batch, 4)]
            logits = torch.cat([whole(**part).logits for part in microbatches(tokens, 4)])
        loss, output = wrapped.run_eval(**batch), wrapped.run_eval(**tokens)
        if rank == 0:
            assert loss is None
            assert output is None
            continue
        assert torch.equal(loss, torch.stack(losses).mean())
        assert torch.equal(output.logits, logits)
        assert not loss.requires_grad
        assert not output.logits.requires_grad
        if name == "llama":
            assert isinstance(output, CausalLMOutputWithPast)
    assert all(parameter.grad is None for parameter in wrapped.local_parameters())


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        first = self.blocks[0](x)
        return {"early": first, "late": (self.blocks[1](first) * scale, "name"), "sum": first.sum()}


def evaluate_plain(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    model = TwoOutputs()
    whole = reference(model)
    wrapped = NxDPPModel(model, transformer_layer_cls=nn.Linear, num_microbatches=2)
    x = torch.randn(6, 4)
    output = wrapped.run_eval(x=x, scale=3.0)
    parts = [whole(part, 3.0) for part in x.chunk(2)]
    if rank == 0:
        assert output is None
        return
    assert torch.equal(output["early"], torch.cat([part["early"] for part in parts]))
    assert torch.equal(output["late"][0], torch.cat([part["late"][0] for part in parts]))
    assert output["late"][1] == "name"
    assert torch.equal(output["sum"], torch.stack([part["sum"] for part in parts]))


def evaluate_in_inference_mode(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make("llama", layers=2)
    whole = reference(model)
    wrapped = NxDPPModel(model, num_microbatches=2)
    batch = padded_batch(4)
    with torch.inference_mode():
        wrapped.run_eval(**batch)
    wrapped.run_train(**batch)
    train_in_one_process(whole, batch, 2)
    assert gradient_differences(wrapped, whole) == {}


def test_losses_and_outputs_are_those_of_one_process() -> None:
    run_in_turn(2, (evaluate, "llama"), (evaluate, "bert"), evaluate_plain, evaluate_in_inference_mode)
