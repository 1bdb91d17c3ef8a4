"""Misuse is refused, and remedies are followed."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from nxdpp import GradScaler, NxDPPModel, apply_checkpoint, parallel_state
from nxdpp.pipeline.p2p.transport import Transport
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import make, padded_batch, reference, train_in_one_process


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def misuse(rank: int) -> None:
    start(2)
    batch = padded_batch(4)
    wrapped = NxDPPModel(make("llama"), num_microbatches=2, output_loss_value_spec=(True, False))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"evaluate there"):
        wrapped.run_train(**batch)
    with pytest.raises(TypeError, match=r"by name"):
        wrapped.run_train(batch["input_ids"])
    for step in (wrapped.run_train, wrapped.run_eval):
        # Each script of NeuronX Distributed has this line.
        with pytest.warns(UserWarning, match="Disabling"):
            block = torch.autocast(enabled=True, dtype=torch.bfloat16, device_type="cuda")
        with block, pytest.raises(RuntimeError, match=r"in torch.autocast\('cuda', torch.bfloat16\) and runs on cpu"):
            step(**batch)
    del block
    with torch.autocast(enabled=False, dtype=torch.bfloat16, device_type="cuda"):
        wrapped.run_eval(**batch)
    with torch.autocast(parallel_state.local_device().type, torch.bfloat16):
        wrapped.run_eval(**batch)
    with pytest.raises(TypeError, match=r"pipeline_cuts='model.layers.1' must be a list"):
        NxDPPModel(make("llama"), pipeline_cuts="model.layers.1")
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        NxDPPModel("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\['model.layers'\], which hold transformer layers"):
        apply_checkpoint(wrapped, ["model.layers"])
    output = wrapped.run_eval(input_ids=batch["input_ids"])
    assert (output is None) == (rank == 0)
    assert output is None or output.logits.shape == (4, 10, 61)
    wrapped.run_train(**batch)


def count_metadata_exchanges(rank: int) -> int:
    start(2)
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    with patch.object(Transport, "send_object", autospec=True, side_effect=Transport.send_object) as exchange:
        for tokens in range(10, 13):
            wrapped.run_train(**padded_batch(4), num_items_in_batch=tokens)
    count: int = exchange.call_count
    return count


def broadcast(rank: int) -> None:
    start(2)
    model = make("llama")
    whole = reference(model)
    torch.set_default_dtype(torch.bfloat16)
    wrapped = NxDPPModel(model, num_microbatches=2, broadcast_and_average_loss=True)
    batch = padded_batch(4)
    loss = wrapped.run_train(**batch)
    assert isinstance(loss, torch.Tensor)
    assert torch.equal(loss, torch.stack(train_in_one_process(whole, batch, 2)).mean().float())
    torch.set_default_dtype(torch.float32)


def test_trained_parameters_in_float16_are_refused_and_the_remedies_train(one_rank: None) -> None:
    batch = padded_batch(4)
    for scaler in (None, GradScaler(init_scale=4.0)):
        wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2, grad_scaler=scaler)
        wrapped.half()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"embed_tokens.weight is a parameter in float16 that is trained.*"):
                wrapped.run_train(**batch)
        assert all(parameter.grad is None for parameter in wrapped.local_parameters())
        wrapped.run_eval(**batch)
        # The remedies of the message.
        wrapped.float()
        with torch.autocast(torch.empty(0).device.type, torch.bfloat16 if scaler is None else torch.float16):
            losses = [wrapped.run_train(**batch)]
        wrapped.zero_grad()
        wrapped.bfloat16()
        losses.append(wrapped.run_train(**batch))
        assert all(isinstance(loss, torch.Tensor) and loss.isfinite() for loss in losses)
    frozen = NxDPPModel(make("llama", layers=2).half(), num_microbatches=2)
    for name, parameter in frozen.local_named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = parameter.data.float()
        else:
            parameter.requires_grad_(False)
    with torch.autocast(torch.empty(0).device.type, torch.bfloat16):
        frozen.run_train(**batch)


def clip_by_torch(rank: int) -> float:
    start(2)
    clip = torch.nn.utils.clip_grad_norm_
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    wrapped.run_train(**padded_batch(4))
    gradients = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    (group,) = torch.optim.SGD(trained).param_groups
    refused = pytest.raises(RuntimeError, match=r"over 2 ranks, and each .* Call model.clip_grad_norm_\(max_norm\) on")
    for given in (wrapped.parameters(), wrapped.local_parameters(), iter(trained), trained, group["params"]):
        with refused:
            clip(given, 0.5)
    with refused:
        get_total_norm([p.grad for p in trained if p.grad is not None])
    others = nn.Linear(4, 4)
    others(torch.ones(4)).sum().backward()
    assert clip(others.parameters(), 0.5) == get_total_norm([torch.ones(4, 4), torch.ones(4)])
    assert all(map(torch.equal, gradients, (p.grad for p in wrapped.parameters() if p.grad is not None)))
    nn.utils.clip_grad_value_(wrapped.parameters(), 1e9)
    return wrapped.clip_grad_norm_(0.5).item()


def test_misuse_is_refused_and_changes_nothing() -> None:
    whole = reference(make("llama"))
    train_in_one_process(whole, padded_batch(4), 2)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
    for _, exchanges, _, norm in run_in_turn(2, misuse, count_metadata_exchanges, broadcast, clip_by_torch):
        assert exchanges == 1
        assert norm == pytest.approx(expected, rel=1e-6)
