"""Sentences for what a pipeline cannot do: the place on every rank, and a remedy that is followed."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nxdpp import parallel_state
from tests.pipeline.after_wrapping.scripts import WIDTH, PipelinedTraining, Plain, Training, batch, compare
from tests.support.run_ranks import run_ranks


class Tripled(TorchFunctionMode):
    """Multiplies three times what ``torch.mul`` does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.mul else result


class UsesMode(Plain):
    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().after_layers(hidden)
        with Tripled():
            result: torch.Tensor = self.norm(hidden)
        return result


def penalty(loss: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, [hidden], create_graph=True)
    return gradient.pow(2).sum()


class Penalised(Plain):
    """Its penalty goes back through all layers."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = self.before_layers(ids)
        loss = self.loss_of(self.after_layers(first), labels)
        return loss + penalty(loss, first)


class Prompted(Plain):
    """A value that a script computes outside the model, computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Linear(WIDTH, WIDTH)

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.prompt(super().before_layers(ids))
        return result


class FromHidden(Plain):
    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.after_layers(hidden), labels)


def follow(ours: nn.Module, theirs: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.lerp_(other, 0.1)


class Follows(Plain):
    """Each layer follows the one before."""

    def update(self) -> None:
        for ours, theirs in itertools.pairwise(self.layers):
            follow(ours, theirs)


class FollowsInForward(Follows):
    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        self.update()
        return super().before_layers(ids)


HIDDEN = torch.ones(4, 6, WIDTH)


def train(model: Plain) -> Any:
    return PipelinedTraining(model).wrapped.run_train(**batch())


def give(hidden: torch.Tensor) -> Any:
    return PipelinedTraining(FromHidden()).wrapped.run_train(hidden=hidden, labels=batch()["labels"])


def follow_by_data(model: Plain) -> None:
    """Torch adds nothing, and raises nothing, where the other layer is on the meta device."""
    for ours, theirs in itertools.pairwise(model.layers):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.data.mul_(0.9).add_(0.1 * other.data)


def called(call: Callable[[Any, Any], Any], model: Plain | None = None) -> None:
    training = PipelinedTraining(model or Plain())
    training.loss()
    call(training.model, training.wrapped)


LINE = r"\n  at .*test_sentences.py:\d+, in"
IS_CALLED = (
    r"(layers.\d \(Layer\)|embed \(Embedding\)) is called .* the Plain holds .* "
    r"is on pipeline rank \d\..*run_train\("
)
OUTSIDE = "outside the model: .* set the parameter or module as an attribute, and use it in forward"
MIXED = rf"layers.\d.linear.weight, and this rank computes with it .*{LINE} [\s\S]*one rank has both"
NEXT_TO_LAYERS = "inside a module next to the layers"
CASES: list[tuple[str, Callable[[], Any], str]] = [
    ("the user's model", lambda: called(lambda model, _: model(**batch())), IS_CALLED),
    ("local module", lambda: called(lambda _, w: w.local_module(**batch())), r"not run as a whole: .*run_eval"),
    ("computed input", lambda: give(nn.Linear(WIDTH, WIDTH)(HIDDEN)), rf"computed with gradients \(\w+\) {OUTSIDE}"),
    ("derivative", lambda: train(Penalised()), rf"through layers.0{LINE} penalty.*\n.*{NEXT_TO_LAYERS}"),
    ("mode of functions", lambda: train(UsesMode()), rf"a TorchFunctionMode is .* next to the layers.{LINE}"),
    ("mixed parameters", lambda: PipelinedTraining(Follows()).wrapped.update(), MIXED),
    ("mixed by data", lambda: called(lambda model, _: follow_by_data(model)), MIXED),
    ("changed in forward", lambda: train(FollowsInForward()), rf"one rank has both parameters.{LINE} follow"),
]  # fmt: skip


def trained(training: Training) -> None:
    training.steps(3)


REMEDIES: dict[str, Any] = {
    "computed input": (Prompted, trained),
}


def all_in_one_start(rank: int) -> tuple[dict[str, str], dict[str, Any]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    told = {}
    for name, run, _ in CASES:
        try:
            run()
            told[name] = "nothing"
        except (RuntimeError, ValueError, TypeError) as error:
            told[name] = str(error)
    return told, compare(rank, 2, REMEDIES)


def test_a_sentence_on_every_rank_and_its_remedy() -> None:
    for told, numbers in run_ranks(2, all_in_one_start):
        for name, _, message in CASES:
            assert re.search(message, told[name]), (name, told[name])
        for name, (alone, pipelined) in numbers.items():
            assert pipelined == alone, name
