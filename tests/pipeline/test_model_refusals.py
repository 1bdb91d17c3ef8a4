"""Situations that could cause wrong numbers or a deadlock, and misuse."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from nxdpp import GradScaler, NxDPPModel, apply_checkpoint, parallel_state
from nxdpp.pipeline.p2p.transport import Direction, Transport
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def record_order(rank: int) -> tuple[dict[Any, list[int]], dict[Any, list[int]]]:
    """Tags sent to and received from each neighbour, in order, over two steps."""
    start(3)
    wrapped = NxDPPModel(make("llama"), num_microbatches=6)
    sent, received = defaultdict(list), defaultdict(list)
    send, post = Transport.send, Transport.post_receive

    def recording_send(self: Transport, tensor: Any, peer: int, direction: Direction, tag: int) -> Any:
        sent[rank, peer, direction.name].append(tag)
        return send(self, tensor, peer, direction, tag)

    def recording_post(self: Transport, layout: Any, peer: int, direction: Direction, tag: int) -> Any:
        received[peer, rank, direction.name].append(tag)
        return post(self, layout, peer, direction, tag)

    Transport.send, Transport.post_receive = recording_send, recording_post  # type: ignore[method-assign, assignment]
    for _ in range(2):
        wrapped.run_train(**padded_batch(12))
    return dict(sent), dict(received)


def test_messages_are_received_in_the_order_of_sending() -> None:
    """Same order on both sides, also in the first step. NCCL has no tags: only the order identifies a message."""
    ranks = run_ranks(3, record_order)
    sent = {key: tags for rank in ranks for key, tags in rank[0].items()}
    received = {key: tags for rank in ranks for key, tags in rank[1].items()}
    assert len(sent) == 4
    assert sent == received


class Noise(nn.Module):
    """A module without parameters and with another result at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        noisy = self.noise(x)
        return {"out": self.blocks[1](self.blocks[0](noisy)), "noise": noisy}


def draw(rank: int) -> bool:
    start(2)
    torch.manual_seed(0)
    model = Noisy()
    whole = reference(model)
    torch.manual_seed(rank)
    output = NxDPPModel(model, transformer_layer_cls=nn.Linear).run_eval(x=torch.zeros(3, 4))
    return output is None or torch.equal(whole.blocks[1](whole.blocks[0](output["noise"])), output["out"])


def test_noise_is_drawn_once() -> None:
    assert run_ranks(2, draw) == [True, True]


class InPlaceLayer(nn.Sequential):
    """A layer that changes its input in place."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(4, 4))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(InPlaceLayer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](self.first(x))).square().mean()  # type: ignore[no-any-return]


def change_in_place(rank: int) -> None:
    start(2)
    torch.manual_seed(0)
    model = Stack()
    whole = reference(model)
    wrapped = NxDPPModel(model, transformer_layer_cls=InPlaceLayer, num_microbatches=2)
    x = torch.randn(4, 4)
    wrapped.run_train(x=x)
    for part in x.chunk(2):
        (whole(part) / 2).backward()
    assert gradient_differences(wrapped, whole) == {}


def test_a_layer_may_change_its_input_in_place() -> None:
    run_ranks(2, change_in_place)


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


def test_misuse_is_refused_and_changes_nothing() -> None:
    run_ranks(2, misuse)


def count_metadata_exchanges(rank: int) -> int:
    start(2)
    wrapped = NxDPPModel(make("llama"), num_microbatches=2)
    exchanges = 0
    original = Transport.send_object

    def counting(self: Transport, value: Any, destination: int, tag: int, direction: Any) -> None:
        nonlocal exchanges
        exchanges += 1
        original(self, value, destination, tag, direction)

    Transport.send_object = counting  # type: ignore[method-assign]
    for tokens in range(10, 15):
        wrapped.run_train(**padded_batch(4), num_items_in_batch=tokens)
    return exchanges


def test_a_number_that_changes_each_step_needs_no_metadata_exchange() -> None:
    assert run_ranks(2, count_metadata_exchanges) == [1, 1]


def broadcast(rank: int, default: torch.dtype) -> torch.Tensor:
    start(2)
    model = make("llama")
    whole = reference(model)
    torch.set_default_dtype(default)
    wrapped = NxDPPModel(model, num_microbatches=2, broadcast_and_average_loss=True)
    batch = padded_batch(4)
    loss = wrapped.run_train(**batch)
    assert isinstance(loss, torch.Tensor)
    assert torch.equal(loss, torch.stack(train_in_one_process(whole, batch, 2)).mean().float())
    return loss


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_loss_is_broadcast_whatever_the_default_dtype(default: torch.dtype) -> None:
    run_ranks(2, broadcast, default)


def test_trained_parameters_in_float16_are_refused_and_the_remedies_train() -> None:
    parallel_state.initialize_model_parallel()
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
    parallel_state.destroy_model_parallel()


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


def test_clipping_by_torch_is_refused() -> None:
    whole = reference(make("llama"))
    train_in_one_process(whole, padded_batch(4), 2)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
    assert run_ranks(2, clip_by_torch) == [pytest.approx(expected, rel=1e-6)] * 2
