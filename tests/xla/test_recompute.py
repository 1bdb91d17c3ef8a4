"""Recomputation of layers on XLA ranks: the gradients without it, the same dropout, and fewer bytes kept."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from tests.support.xla_ranks import compilations, recorded_bytes, run_xla_ranks
from tests.xla.models import MICROBATCHES, tiny_llama, tokens

_SCHEDULES = ["1f1b", "zb1p"]


class _Layer(nn.Module):
    """A layer with dropout, whose second tensor is a keyword, beside a keyword that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor, rate: float) -> torch.Tensor:
        """Return a tensor (B, 16)."""
        return x + nn.functional.dropout(self.linear(x).tanh() + bias, rate, self.training)


class _Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x, bias=bias, rate=0.5)
        return x.square().mean()


def _recompute(rank: int, world: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world, device="xla")
    return {
        "llama": {(name, way): _llama(name, way) for name in _SCHEDULES for way in ("kept", "nxdpp", "transformers")},
        "dropout": {way: _dropout(way) for way in ("kept", "nxdpp")},
    }


def _llama(schedule: str, way: str) -> dict[str, Any]:
    gc.collect()
    module = tiny_llama(4)
    if way == "transformers":
        module.gradient_checkpointing_enable()
    model = NxDPPModel(
        module,
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
    )
    if way == "nxdpp":
        apply_checkpoint(model)
    model.move_model_to_device()
    held: list[int] = []
    compiled: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = StageRunner.forward

        def note(runner: StageRunner, *arguments: Any) -> None:
            forward(runner, *arguments)
            # Its operations are submitted by the next action.
            held.append(recorded_bytes())

        patch.setattr(StageRunner, "forward", note)
        for _ in range(2):
            model.zero_grad()
            with compilations(compiled):
                model.run_train(input_ids=tokens(0), labels=tokens(0))
    return {"gradients": _gradients(model), "held": max(held), "compiled": compiled}


def _dropout(way: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = NxDPPModel(_Dropout(), transformer_layer_cls=_Layer, num_microbatches=1, input_names=["x", "bias"])
    if way == "nxdpp":
        apply_checkpoint(model)
    model.move_model_to_device()
    device_of(parallel_state.local_device()).set_random_state(bytes(7) + b"\1")
    model.run_train(x=torch.ones(8, 16), bias=torch.ones(8, 16))
    return _gradients(model)


def _gradients(model: NxDPPModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.local_named_parameters() if p.grad is not None}


def test_recomputation_gives_the_same_gradients_and_keeps_fewer_bytes() -> None:
    for rank, found in enumerate(run_xla_ranks(2, _recompute, 2, timeout=400)):
        for schedule in _SCHEDULES:
            kept = found["llama"][schedule, "kept"]
            for way in ("nxdpp", "transformers"):
                recomputed = found["llama"][schedule, way]
                torch.testing.assert_close(recomputed["gradients"], kept["gradients"], rtol=0, atol=0)
                assert recomputed["held"] < 0.6 * kept["held"], (rank, schedule, way, recomputed["held"], kept["held"])
                assert recomputed["compiled"][1] == 0
        dropout = found["dropout"]
        torch.testing.assert_close(dropout["nxdpp"], dropout["kept"], rtol=0, atol=0)
