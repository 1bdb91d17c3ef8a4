"""Tensors that ``loss_fn`` reads beside its arguments: parameters of this rank, or an error that names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nxdpp import NxDPPModel, parallel_state
from nxdpp.tracing.models.loss_function import nodes_of, verify_leaves
from tests.support.models import gradient_differences
from tests.support.run_ranks import run_ranks

LABELS = torch.tensor([0, 2, 1, 0])
X = torch.linspace(-1, 1, 16).view(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Model(nn.Module):
    """Logits (B, 3), or with a temperature the loss that ``with_temperature`` would be."""

    def __init__(self, temperature: nn.Parameter | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.temperature = temperature

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x)
        if self.temperature is None:
            return output
        assert labels is not None
        return F.cross_entropy(output / self.temperature, labels)

    def penalised(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels) + self.head.weight.square().sum()


def in_place(output: Tensor, labels: Tensor) -> Tensor:
    output[:, 0].mul_(2)
    return F.cross_entropy(output.div_(3), labels)


def recomputed(output: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = checkpoint(F.cross_entropy, output, labels, use_reentrant=False)
    return found


CASES: dict[str, Callable[[Model], Any]] = {
    "a parameter of the model": lambda model: model.penalised,
    "the output changed in place": lambda model: in_place,
    "recomputation": lambda model: recomputed,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", CASES)
def test_what_one_process_trains_is_trained(name: str) -> None:
    whole, module = Model(), Model()
    (CASES[name](whole)(whole(X), LABELS)).backward()
    model = NxDPPModel(module, loss_fn=CASES[name](module))
    model.run_train(x=X, labels=LABELS)
    for key, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, module.get_parameter(key).grad), key  # type: ignore[arg-type]  # it has one


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_of_no_model_is_refused_before_a_gradient_is_made() -> None:
    temperature = nn.Parameter(torch.tensor(2.0))

    class Criterion:
        def with_temperature(self, output: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(output / temperature, labels)

    model = NxDPPModel(Model(), loss_fn=Criterion().with_temperature)
    message = r"loss_fn reads a tensor \(\) that requires a gradient.*Make it a part of the model.*or detach it"
    with pytest.raises(ValueError, match=message):
        model.run_train(x=X, labels=LABELS)
    assert all(parameter.grad is None for parameter in (temperature, *model.parameters()))
    assert model.run_eval(x=X, labels=LABELS) is not None
    # As the message says: a part of the model, and detached.
    inside = NxDPPModel(Model(temperature))
    loss = inside.run_train(x=X, labels=LABELS)
    assert temperature.grad is not None
    value = temperature.detach()
    detached = NxDPPModel(Model(), loss_fn=lambda output, labels: F.cross_entropy(output / value, labels))
    assert torch.equal(detached.run_train(x=X, labels=LABELS), loss)  # type: ignore[arg-type]  # one rank has them


@pytest.mark.usefixtures("one_rank")
def test_a_complex_loss_is_refused() -> None:
    # torch's backward refuses it too. With a gradient of ones it would train on the real part.
    model = NxDPPModel(Model(), loss_fn=lambda output, labels: F.cross_entropy(output, labels) * (1 + 1j))
    with pytest.raises(ValueError, match=r"complex64, which has no order: take its real part"):
        model.run_train(x=X, labels=LABELS)


def on_another_rank() -> Model:
    """A model on a rank without the first layer."""
    model = Model()
    model.layers[0].to("meta")
    return model


def test_a_parameter_of_another_rank_is_named() -> None:
    model = on_another_rank()
    elsewhere = model.layers[0].get_parameter("linear.weight")
    output = torch.ones(4, 3, requires_grad=True)
    before = nodes_of([output, LABELS])
    assert before is not None
    verify_leaves(F.cross_entropy(output, LABELS) + model.head.weight.sum(), before, model)
    with pytest.raises(ValueError, match=r"loss_fn reads layers\.0\.linear\.weight, which another rank holds"):
        verify_leaves(F.cross_entropy(output, LABELS) + elsewhere.sum(), before, model)
    with pytest.raises(ValueError, match="reads values of the model that another rank holds"):
        verify_leaves(F.cross_entropy(output, LABELS) + elsewhere.detach().sum(), before, model)


class WithWeight(Model):
    """Logits (B, 3), and a weight of the first layer (4, 4)."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        first: Any = self.layers[0]
        return super().forward(x), first.linear.weight


def of_both(output: Any, labels: Tensor) -> Tensor:
    logits, weight = output
    loss: Tensor = F.cross_entropy(logits, labels) + weight.square().sum()
    return loss


def penalty_of_the_first_layer(rank: int) -> None:
    """Take the weight from ``forward``; then use the one of the model before the wrapping."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole = WithWeight()
    of_both(whole(X), LABELS).backward()
    model = NxDPPModel(WithWeight(), loss_fn=of_both)
    model.run_train(x=X, labels=LABELS)
    # The gradient of the penalty is added to the other one in another order than in one process.
    assert all(apart is not None and apart < 1e-6 for apart in gradient_differences(model, whole).values())

    module = Model()
    weight = module.layers[0].get_parameter("linear.weight")
    model = NxDPPModel(module, loss_fn=lambda output, labels: of_both((output, weight), labels))
    model.run_train(x=X, labels=LABELS)


def test_a_weight_that_was_taken_from_the_model_before_the_wrapping_is_refused() -> None:
    message = r"(?s)ValueError: loss_fn reads a tensor \(4, 4\) that requires a gradient.*return it from forward beside"
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, penalty_of_the_first_layer)
