"""``MixedPrecisionAdam`` and ``MixedPrecisionAdamW``: the steps of torch's classes on float32 copies."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import load_checkpoint, parallel_state, save_checkpoint
from nxdpp.nnscaler import ComputeConfig, ParallelModule, build_optimizer
from nxdpp.nnscaler.runtime.f16_optimizer import MixedPrecisionAdam, MixedPrecisionAdamW
from tests.doors.nnscaler.own_folders import parallelize
from tests.doors.nnscaler.trained_modules import WIDTH, Net

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


@pytest.mark.parametrize(
    ("kind", "torchs", "use_zero"),
    [(MixedPrecisionAdam, torch.optim.Adam, False), (MixedPrecisionAdamW, torch.optim.AdamW, True)],
)
def test_float32_copies_are_stepped(kind: Any, torchs: Any, use_zero: bool) -> None:
    torch.manual_seed(0)
    net = Net().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in net.parameters()]
    theirs = torchs(masters, **OPTIONS)
    parallel_state.initialize_model_parallel()
    try:
        model = parallelize(net, {"x": _inputs(0)}, "dp", ComputeConfig(1, 1, use_zero=use_zero))
        assert isinstance(model, ParallelModule)
        ours = build_optimizer(model, kind, **OPTIONS)
        for step in range(3):
            model(_inputs(step)).square().mean().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            ours.step()
            ours.zero_grad()
            # A load keeps the kind of decay.
            ours.load_state_dict(ours.state_dict())
            theirs.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert torch.equal(parameter, master.bfloat16())
    finally:
        parallel_state.destroy_model_parallel()


def test_a_checkpoint_is_of_the_same_decay(tmp_path: Path) -> None:
    net = Net().bfloat16()
    optimizer = MixedPrecisionAdam(net.parameters())
    net(_inputs(0)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, "saved", net, optimizer)
    load_checkpoint(tmp_path, "saved", net, MixedPrecisionAdam(net.parameters()))
    with pytest.raises(ValueError, match="has the state of Adam, and the optimizer is AdamW"):
        load_checkpoint(tmp_path, "saved", net, MixedPrecisionAdamW(net.parameters()))
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["decoupled_weight_decay"] is False
