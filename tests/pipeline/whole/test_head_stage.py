"""Cut after the last layer: the last stage has the norm, the head and the loss, without a layer."""

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

HEADS = {"llama": {"model.norm.weight", "lm_head.weight"}, "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias"}}


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(rank: int, name: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    model, batch = make(name, layers=2), padded_batch(4)
    whole = reference(model)
    prefix = "transformer.h" if name == "gpt2" else "model.layers"
    cuts = [f"{prefix}.0", f"{prefix}.1"]
    wrapped = NxDPPModel(model, num_microbatches=2, pipeline_cuts=cuts, broadcast_and_average_loss=True)
    assert wrapped.stage_layers == [[cuts[0]], [cuts[1]], []][rank]
    if rank == 2:
        held = {name for name, _ in wrapped.local_named_parameters()}
        # The head of GPT-2 is tied to its embedding, whose name comes first.
        assert held == HEADS[name] | ({"transformer.wte.weight"} if name == "gpt2" else set())
    apply_checkpoint(wrapped)
    loss = wrapped.run_train(**batch)
    losses = train_in_one_process(whole, batch, 2)
    assert isinstance(loss, torch.Tensor)
    assert torch.equal(loss, torch.stack(losses).mean())
    differences = gradient_differences(wrapped, whole)
    tied = differences.pop("transformer.wte.weight", None) or differences.pop("lm_head.weight", None)
    assert tied is None or tied < 1e-6
    assert differences == {}
    with pytest.raises(ValueError, match=r"no parameters: .* after layers\.1, the last"):
        NxDPPModel(Headless(), transformer_layer_cls=nn.Linear, pipeline_cuts=["layers.0", "layers.1"])


@pytest.mark.parametrize("name", HEADS)
def test_the_head_alone_trains_exactly(name: str) -> None:
    run_ranks(3, train, name)
