"""User-written models over several processes, compared with the same model in one process."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.stages.loss import pick_loss
from tests.support import plain_models as models
from tests.support.in_process import InProcessPipeline
from tests.support.plain_models import WIDTH, Block
from tests.support.run_ranks import run_ranks

MICROBATCHES = 4


def rows(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(8, width)


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the parameters whose gradients are summed in another order than in one process."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: {"x": rows})
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reordered: tuple[str, ...] = ()

    def batch(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {name: make() for name, make in self.inputs.items()}


SEVERAL = {"x": rows, "late": rows, "target": lambda: rows(1)}
FIRST_OF_TWO = {"output_loss_value_spec": (True, False)}
CASES = {
    "skips": Case(models.Skips, reordered=("embedding", "blocks.0", "blocks.1")),
    "several inputs": Case(models.SeveralInputs, {**SEVERAL, "scale": lambda: 3.0}),
    "keyword inputs": Case(
        models.SeveralInputs,
        {**SEVERAL, "extra": lambda: rows(1)},
        {"input_names": ["x", "late", "target", "extra"]},
    ),
    "dataclasses": Case(models.Dataclasses),
    "named tuples": Case(models.NamedTuples),
    "dicts": Case(models.Dicts),
    "batch norms": Case(models.BatchNorms),
    "weight and spectral norm": Case(models.Normalised),
    "modules used twice": Case(models.UsedTwice, reordered=("projection", "norm")),
    "a shared submodule": Case(models.TiedBlocks, reordered=("blocks",)),
    "a sequential with a loss": Case(
        models.WithLoss,
        {"x": rows, "labels": lambda: torch.randint(0, WIDTH, (8,))},
        {**FIRST_OF_TWO, "input_names": ["x", "labels"]},
    ),
    "containers of layers": Case(models.Containers),
    "constants": Case(models.Constants, reordered=("scale",)),
    "parameters as outputs": Case(
        models.OutputsParameters, arguments=FIRST_OF_TWO, reordered=("embedding.weight", "scale")
    ),
    "a dataclass as output": Case(models.DataclassOutput),
    "activations in place": Case(models.InPlaceActivations),
    "weights that are shared one by one": Case(models.SharedWeights, reordered=("blocks",)),
}


def wrap(case: Case) -> tuple[NxDPPModel, nn.Module]:
    torch.manual_seed(1)
    model = case.make()
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(model, transformer_layer_cls=Block, num_microbatches=MICROBATCHES, **case.arguments)
    wrapped.move_model_to_device()
    return wrapped, whole


def parts_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {
        n: v.chunk(MICROBATCHES) if isinstance(v, torch.Tensor) else (v,) * MICROBATCHES for n, v in batch.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(MICROBATCHES)]


def train_whole(whole: nn.Module, case: Case, batch: Mapping[str, Any]) -> torch.Tensor:
    losses = []
    for part in parts_of(batch):
        loss = pick_loss(whole(**part), case.arguments.get("output_loss_value_spec"))
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def check_gradients(wrapped: NxDPPModel, whole: nn.Module, reordered: tuple[str, ...]) -> None:
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in wrapped.local_named_parameters(remove_duplicate=False):
        ours, theirs = parameter.grad, expected[name].grad
        if theirs is None or ours is None:
            assert ours is theirs, name
        elif name.startswith(reordered) and reordered:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item(), msg=name)
        else:
            assert torch.equal(ours, theirs), name


def train(name: str, case: Case) -> dict[str, Any]:
    wrapped, whole = wrap(case)
    for seed in (2, 3):
        batch = case.batch(seed)
        loss = wrapped.run_train(**batch)
        expected = train_whole(whole, case, batch)
        assert (loss is not None) == wrapped.holds_last_stage
        assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, expected))
    check_gradients(wrapped, whole, case.reordered)
    buffers = dict(whole.named_buffers())
    for buffer_name, buffer in wrapped.local_named_buffers():
        assert torch.equal(buffer, buffers[buffer_name]), buffer_name
    for module in (wrapped, whole):
        module.eval()
    loss = wrapped.run_eval(**batch)
    with torch.no_grad():
        outputs = [whole(**part) for part in parts_of(batch)]
    losses = torch.stack([pick_loss(output, case.arguments.get("output_loss_value_spec")) for output in outputs])
    assert loss is None or torch.equal(loss, losses.mean())
    return wrapped.local_state_dict()


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    states = {}
    for name, case in CASES.items():
        try:
            states[name] = train(name, case)
        except Exception as error:
            error.add_note(name)
            raise
    return states


def test_losses_gradients_and_buffers_are_those_of_one_process() -> None:
    ranks = run_ranks(3, train_all)

    for name, case in CASES.items():
        states, expected = [rank[name] for rank in ranks], case.make().state_dict()
        assert {key for state in states for key in state} == expected.keys(), name
        changing = [k for k in expected if k.rpartition(".")[2] in ("running_mean", "num_batches_tracked", "steps")]
        assert all(sum(key in state for state in states) == 1 for key in changing), name
        assert bool(changing) == (name == "batch norms")


REFUSED = {
    "an input that is changed and used further on": (
        models.ChangesInput,
        r"the value x, .* by blocks\.0, at .*plain_models\.py:\d+",
    ),
    "two values of one memory": (models.Aliases, r"the value \w+, .* is changed in place"),
    "a counter on several stages": (models.SharedCounter, r"counter\.forward changes its buffer steps"),
    "a batch norm on several stages": (models.SharedBatchNorm, r"norm, a BatchNorm1d, .* runs on the stages \[1, 2\]"),
    "statistics that are read elsewhere": (
        models.ReadsStatistics,
        r"buffer norm\.running_mean outside .*plain_models\.py:\d+",
    ),
    "a buffer that is added to": (models.in_place_operator, r"CountsInForward\.steps"),
    "a layer that runs twice": (models.Repeats, r"Run several times: \['blocks\.0'\]; .* share the weights"),
    "an object of its own between layers": (models.Objects, r"a Holder cannot be sent to another stage: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name: str) -> None:
    make, message = REFUSED[name]
    batch = Case(make).batch(2)
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        InProcessPipeline(make(), 3, parts_of(batch)[0], transformer_layer_cls=Block).train(batch, MICROBATCHES)
