"""``loss_over="batch"``: losses over all rows of a step, as a script of one process computes them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks

ROWS, WIDTH, MICROBATCHES = 12, 8, 3

# All forwards, then backwards in two parts.
SPLIT = [
    [f"{rank}F{m}" for m in range(MICROBATCHES)]
    + [f"{rank}{kind}{m}" for m in range(MICROBATCHES) for kind in ("I", "W")]
    for rank in range(2)
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.linear(hidden).tanh()
        return result


class Towers(nn.Module):
    """Embeddings (B, H) of rows and of their pairs, and a temperature for each head, as many as a microbatch's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor([0.7, 0.8, 0.6, 0.9]))

    def forward(self, x: torch.Tensor, pairs: torch.Tensor) -> Any:
        hidden = torch.stack((x, pairs), 1)
        for layer in self.layers:
            hidden = layer(hidden)
        one, other = self.norm(hidden).unbind(1)
        return {"one": one, "other": other, "scale": self.scale.exp()}


def contrastive(output: Any, weight: torch.Tensor) -> torch.Tensor:
    """Each row finds its pair among those of all rows."""
    similar = output["scale"].repeat_interleave(WIDTH // 4) * output["one"] @ output["other"].T
    losses = nn.functional.cross_entropy(similar, torch.arange(len(similar)), reduction="none")
    return (losses * weight).sum() / weight.sum()


def batch(replica: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(replica + 1)
    shape = ROWS, WIDTH
    return {
        "x": torch.randn(shape, generator=generator).double(),
        "pairs": torch.randn(shape, generator=generator).double(),
        "weight": torch.rand(ROWS, generator=generator).double(),
    }


def module() -> Towers:
    torch.manual_seed(0)
    return Towers().double()


def loss_of_one_process(whole: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return contrastive(whole(inputs["x"], inputs["pairs"]), inputs["weight"])


def train(schedule: Any) -> None:
    replicas = parallel_state.get_data_parallel_size()
    inputs = batch(parallel_state.get_data_parallel_rank())
    model = NxDPPModel(
        module(),
        num_microbatches=MICROBATCHES,
        transformer_layer_cls=Layer,
        schedule=schedule,
        loss_fn=contrastive,
        loss_over="batch",
        broadcast_and_average_loss=True,
        check_against_module="first",
    )
    whole = module()
    ours = torch.optim.SGD(model.parameters(), lr=0.5)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(3):
        loss = model.run_train(**inputs)
        expected = torch.stack([loss_of_one_process(whole, batch(each)) for each in range(replicas)]).mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        own = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(model.run_eval(**inputs), expected.detach(), rtol=1e-12, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    output = model.run_eval(x=inputs["x"], pairs=inputs["pairs"])
    if model.holds_last_stage:
        torch.testing.assert_close(output["one"], whole(inputs["x"], inputs["pairs"])["one"].detach())
    # Microbatches of their own have other losses.
    parts = [loss_of_one_process(whole, each) for each in _parts(inputs)]
    assert abs(float(torch.stack(parts).mean() - loss_of_one_process(whole, inputs))) > 0.1


def _parts(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    columns = [value.chunk(MICROBATCHES) for value in inputs.values()]
    return [dict(zip(inputs, row, strict=True)) for row in zip(*columns, strict=True)]


def _sharded() -> None:
    model = NxDPPModel(
        module().float(),
        num_microbatches=MICROBATCHES,
        transformer_layer_cls=Layer,
        schedule="gpipe",
        loss_fn=contrastive,
        loss_over="batch",
        broadcast_and_average_loss=True,
    )
    nxdpp.fully_shard(model)
    nxdpp.apply_checkpoint(model)
    whole = module().float()

    def of(replica: int) -> dict[str, torch.Tensor]:
        return {name: value.float() for name, value in batch(replica).items()}

    with torch.autocast(torch.empty(0).device.type, torch.bfloat16):
        loss = model.run_train(**of(parallel_state.get_data_parallel_rank()))
        expected = torch.stack([loss_of_one_process(whole, of(each)) for each in range(2)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-3, atol=0)
    own = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.grad, own[name].grad
        assert ours is not None
        assert theirs is not None
        # Few values are not divided.
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert (ours - theirs).norm() <= 0.02 * theirs.norm(), name
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refused() -> list[str]:
    common: dict[str, Any] = {"num_microbatches": MICROBATCHES, "transformer_layer_cls": Layer}
    batched: dict[str, Any] = {"loss_fn": contrastive, "loss_over": "batch"}
    messages = []
    for wrong in (
        batched,
        batched | {"schedule": "gpipe", "return_mb_loss": True},
        batched | {"schedule": "gpipe", "loss_normalization": "tokens", "count_items_fn": len},
    ):
        own = module()
        with pytest.raises(ValueError, match="loss_over") as caught:
            NxDPPModel(own, **common, **wrong)
        assert not any(parameter.is_meta for parameter in own.parameters())
        messages.append(str(caught.value))
    pipeline = NxDPPModel(module(), **common, **batched, schedule="gpipe")
    with pytest.raises(ValueError, match="loss_over") as caught:
        pipeline.steps.train_microbatches(_parts(batch()))
    return [*messages, str(caught.value)]


def _two_ranks(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    train("gpipe")
    train(SPLIT)
    return _refused()


def _four_ranks(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    train("looped-bfs")
    _sharded()


def test_a_contrastive_loss_of_two_replicas_is_that_of_one_process_with_shards_recomputation_and_autocast() -> None:
    run_ranks(4, _four_ranks)


def test_a_contrastive_loss_is_that_of_one_process_or_refused() -> None:
    first = run_ranks(2, _two_ranks)[0]

    assert "schedule='1f1b' has a backward there before" in first[0]
    assert "Schedules with all forwards first: 'gpipe', 'looped-bfs'. They keep" in first[0]
    assert "there is one loss of all rows" in first[1]
    assert "exclude each other: loss_fn sees all rows" in first[2]
    assert "Use run_train and run_eval" in first[3]
