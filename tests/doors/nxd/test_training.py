"""Training by the trainer API: losses, norms and parameters of one process."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import nxdpp
from nxdpp import parallel_state
from nxdpp.trainer import NxDModel, initialize_parallel_model, initialize_parallel_optimizer
from tests.pipeline.runtime.scheduled_models import Chain, Tied, make, rows
from tests.support.plain_models import Block
from tests.support.run_ranks import run_ranks

LAYERS, STEPS, RATE, MAX_NORM = 4, 2, 0.01, 0.02
PIPELINE = {"transformer_layer_cls": Block, "num_microbatches": 2, "broadcast_and_average_loss": True}


class Configured(Chain):
    """As a transformers model it has a configuration and a dtype."""

    config = {"layers": LAYERS}

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


def factor(step: int) -> float:
    return 1 / (1 + step)


class OneProcess:
    """The same training without nxdpp."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        self.schedule = LambdaLR(self.optimizer, factor)

    def step(self, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the norm before clipping."""
        losses = [self.model(part) for part in x.chunk(parts)]
        for loss in losses:
            (loss / parts).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return torch.stack(losses).mean().detach(), norm


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Groups by weight decay, as scripts of NxD make them."""
    named = list(model.local_named_parameters())
    return [
        {"params": [parameter for name, parameter in named if "bias" not in name], "weight_decay": 0.01},
        {"params": [parameter for name, parameter in named if "bias" in name], "weight_decay": 0.01},
    ]


def check(
    kind: Callable[[int], nn.Module],
    run: Callable[[NxDModel, torch.Tensor], torch.Tensor],
    averages_loss: bool = True,
    is_sharded: bool = False,
    **options: Any,
) -> tuple[NxDModel, Any]:
    """Train both and compare; the replicas share the parameters with ``is_sharded``."""
    config = nxdpp.neuronx_distributed_config(
        1,
        parallel_state.get_pipeline_model_parallel_size(),
        **{"optimizer_config": {"max_grad_norm": MAX_NORM}, **options},
    )
    model = initialize_parallel_model(config, make, False, kind, LAYERS)
    if is_sharded:
        nxdpp.fully_shard(model)
    whole = OneProcess(make(kind, LAYERS))
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, groups_of(model), lr=RATE)
    schedule = LambdaLR(optimizer, factor)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    for step in range(STEPS):
        x = rows(4 * replicas, seed=step)
        expected, norm = whole.step(x, 2 * replicas)
        loss = run(model, x.chunk(replicas)[replica])
        if averages_loss:
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        optimizer.zero_grad()
        schedule.step()
        assert optimizer.param_groups[1]["lr"] == whole.optimizer.param_groups[0]["lr"]
    named = dict(whole.model.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        assert isinstance(parameter, DTensor) == is_sharded
        values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(values, named[name], rtol=1e-5, atol=1e-6)
    return model, optimizer


def recomputed(model: NxDModel) -> set[type[nn.Module]]:
    """Classes of this rank's modules whose forward runs again in the backward."""
    return {type(module) for _, module in model.local_named_modules() if "forward" in vars(module)}


def run_train(model: NxDModel, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model.run_train(x=x)
    return loss


def forward_and_backward(model: NxDModel, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    return loss.detach()


def pipeline_of_two() -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, _ = check(Configured, run_train, pipeline_config=PIPELINE)
    assert model.pp_enabled
    assert model.config == {"layers": LAYERS}
    assert model.dtype == torch.float32
    assert set(dict(model.named_parameters())) == set(dict(model.local_module().named_parameters()))
    assert set(model.local_state_dict()) == set(model.state_dict())
    with pytest.raises(RuntimeError, match="run_train"):
        model(rows(4))
    zero = {"zero_one_enabled": True, "max_grad_norm": MAX_NORM}
    assert not recomputed(model)
    model, _ = check(
        Tied, run_train, pipeline_config=PIPELINE, optimizer_config=zero, activation_checkpoint_config="full"
    )
    assert recomputed(model) == {Block}
    check(Tied, run_train, is_sharded=True, pipeline_config=PIPELINE, activation_checkpoint_config="full")
    numbers_of_first_rank()


def replicas() -> None:
    parallel_state.initialize_model_parallel()
    alone = {"averages_loss": False}
    model, _ = check(Configured, forward_and_backward, **alone)
    assert not model.pp_enabled
    assert list(model.local_parameters()) == list(model.parameters()) == list(model.module.parameters())
    assert model.config == {"layers": LAYERS}
    with pytest.raises(RuntimeError, match="averages the gradients of the replicas in its step"):
        model.clip_grad_norm_(1.0)
    zero = {"zero_one_enabled": True, "max_grad_norm": MAX_NORM}
    classes = Block, nn.Linear
    model, _ = check(Tied, forward_and_backward, optimizer_config=zero, activation_checkpoint_config=classes, **alone)
    assert recomputed(model) == set(classes)
    # run_train accumulates the microbatches of pipeline_config on one rank.
    check(Chain, run_train, pipeline_config=PIPELINE)
    parallel_state.destroy_model_parallel()


def numbers_of_first_rank() -> None:
    """Weights from any generator, with seeds as in the scripts; each generator that differs continues as it was."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    numpy.random.seed(rank)
    random.seed(rank)
    torch.manual_seed(7)

    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]

    def drawn() -> nn.Module:
        model = make(Tied, LAYERS)
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.full_like(parameter, sum(draw())))
        return model

    config = nxdpp.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=PIPELINE)
    model = initialize_parallel_model(config, drawn)
    after = draw()
    model.run_train(x=rows(4))
    numpy.random.seed(rank)
    random.seed(rank)
    of_rank = draw()
    numpy.random.seed(0)
    random.seed(0)
    whole = dict(drawn().named_parameters(remove_duplicate=False))
    of_model = draw()
    assert after == (of_rank[:2] + of_model[2:] if rank else of_model)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, whole[name]), name


def train(rank: int) -> None:
    pipeline_of_two()
    parallel_state.destroy_model_parallel()
    replicas()


def test_training_is_that_of_one_process_on_four_ranks() -> None:
    run_ranks(4, train)


@pytest.fixture
def alone() -> Any:
    yield nxdpp.neuronx_distributed_config(optimizer_config={"grad_clipping": False})
    parallel_state.destroy_model_parallel()


def test_one_process_without_clipping(alone: dict[str, Any]) -> None:
    model = initialize_parallel_model(alone, lambda: make(Chain, LAYERS).eval())
    assert model.training is model.module.training is True
    optimizer = initialize_parallel_optimizer(alone, torch.optim.SGD, model.parameters(), lr=1.0)
    x = rows(4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert model.run_train(x) == model.run_eval(x)
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    assert optimizer.grad_norm is None
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter, old - gradient)
    assert model.eval().training is model.module.training is False
    assert "NxDOptimizer" in repr(optimizer)


def test_shards_next_to_zero1_and_without_a_pipeline_are_refused(alone: dict[str, Any]) -> None:
    model = initialize_parallel_model(alone, make, False, Chain, LAYERS)
    with pytest.raises(TypeError, match=r"takes a wrapped model, not a NxDModel: call it after NxDPPModel"):
        nxdpp.fully_shard(model)
    zero = nxdpp.neuronx_distributed_config(pipeline_config=PIPELINE, optimizer_config={"zero_one_enabled": True})
    model = initialize_parallel_model(zero, make, False, Chain, LAYERS)
    with pytest.raises(ValueError, match=r"does not go with use_zero1_optimizer=True \(zero_one_enabled of NxD's"):
        nxdpp.fully_shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_gradients_of_a_scaled_loss_are_unscaled(alone: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    for optimizer in (
        initialize_parallel_optimizer(alone, torch.optim.SGD, [parameter], lr=0.25, fused=True),
        torch.optim.SGD([parameter], lr=0.25, fused=True),
    ):
        parameter.data.fill_(1.0)
        scaler = nxdpp.GradScaler(init_scale=4.0)
        scaler.begin_step(torch.device("cpu"))
        parameter.grad = torch.full((3,), 4.0)
        scaler.step(optimizer)
        assert parameter.tolist() == [0.75] * 3
