"""Rates by layer and optimizers by part of a model: saved by 2 or 4 stages, and resumed in any other layout.

The oracle is a script of one process that never stops.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim import lr_scheduler as rates

from nxdpp import NxDPPModel, parallel_state
from nxdpp.checkpoint.distributed.parameter_groups import SavedGroup, joined_groups
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.support.run_ranks import run_ranks

STEPS, LAYERS, MICROBATCHES = 3, 8, 4
INTERLEAVED = {"virtual_pipeline_size": 2, "schedule": "interleaved"}
Made = tuple[Any, Any]


class Block(nn.Module):
    """A residual layer with a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states ``(b, 8)`` for ``x`` ``(b, 8)``."""
        return x + torch.tanh(self.linear(self.norm(x)))


def build(seed: int) -> nn.Sequential:
    """Eight blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _by_layer(model: nn.Module, is_resumed: bool) -> list[dict[str, Any]]:
    """A group for each layer and kind of parameter that this process has; in another order after a stop."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        layer, is_matrix = int(name.split(".")[0]), parameter.ndim > 1
        new: dict[str, Any] = {
            "params": [],
            "lr": 0.01 * 0.8**layer,
            "weight_decay": 0.1 / (1 + layer) if is_matrix else 0.0,
        }
        groups.setdefault((layer, is_matrix), {**new, "layer": layer})["params"].append(parameter)
    return [*groups.values()][:: -1 if is_resumed else 1]


def _falling(optimizer: Optimizer) -> rates.LambdaLR:
    falls: list[Any] = [
        lambda step, layer=group["layer"]: 1 / (1 + step * (1 + layer)) for group in optimizer.param_groups
    ]
    return rates.LambdaLR(optimizer, falls)


def _rates_by_layer(model: nn.Module, is_resumed: bool) -> Made:
    optimizer = AdamW(_by_layer(model, is_resumed))
    return optimizer, _falling(optimizer)


def _nested_scheduler(model: nn.Module, is_resumed: bool) -> Made:
    optimizer = SGD(_by_layer(model, is_resumed), momentum=0.9)
    # Its rates of some layers meet at the end.
    parts = [rates.LinearLR(optimizer, total_iters=2), rates.CyclicLR(optimizer, 1e-3, 2e-3, cycle_momentum=False)]
    return optimizer, rates.SequentialLR(optimizer, parts, [2])


def _matrices_and_vectors(model: nn.Module, is_resumed: bool) -> Made:
    parameters = list(model.parameters())
    muon = Muon([{"params": [each for each in parameters if each.ndim > 1]}], lr=0.01)
    rest = AdamW([{"params": [each for each in parameters if each.ndim < 2]}], lr=0.02)
    return {"muon": muon, "rest": rest}, {"rest": rates.StepLR(rest, 2, 0.5), "muon": rates.StepLR(muon, 1, 0.9)}


def _first_and_last_layers(model: nn.Module, is_resumed: bool) -> Made:
    """An optimizer has no parameter on some ranks."""
    named = list(model.named_parameters())
    low = SGD([{"params": [each for name, each in named if int(name.split(".")[0]) < 3]}], lr=0.1, momentum=0.9)
    high = [group for group in _by_layer(model, is_resumed) if group["layer"] >= 3] or [{"params": [], "layer": 0}]
    optimizers = [low, AdamW(high, lr=1.0)]
    return optimizers, [rates.ExponentialLR(low, 0.9), _falling(optimizers[1])]


CASES: dict[str, Callable[[nn.Module, bool], Made]] = {
    "nested scheduler": _nested_scheduler,
    "first and last layers": _first_and_last_layers,
}


def _each(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]


def _train(
    model: nn.Module, made: Made, first: int, last: int, step: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    for number in range(first, last):
        step(*_batch(number))
        for optimizer in _each(made[0]):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in _each(made[1]):
            scheduler.step()


def _options(model: nn.Module, made: Made) -> dict[str, dict[str, Any]]:
    """The values and the options of each parameter by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(each)]: {"values": each.detach().clone(), **{key: group[key] for key in group if key != "params"}}
        for optimizer in _each(made[0])
        for group in optimizer.param_groups
        for each in group["params"]
    }


def _in_one_process(case: str, path: Path | None = None, tag: str = "") -> dict[str, dict[str, Any]]:
    """Train all steps, or go on from ``tag``, as a script of one process does."""
    model = build(0 if path is None else 1)
    made = CASES[case](model, path is not None)
    first = 0 if path is None else load_checkpoint(path, tag, model, *made)

    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(model(rows), wanted) / MICROBATCHES).backward()

    _train(model, made, first, 3 * STEPS, step)
    return _options(model, made)


def _train_step(wrapped: NxDPPModel, x: torch.Tensor, target: torch.Tensor) -> None:
    wrapped.run_train(input=x, target=target)


def _on_ranks(rank: int, path: Path, pipeline: int, arguments: dict[str, Any], source: str, tag: str) -> dict[str, Any]:
    """Go on from ``source`` for some steps and save ``tag``; return the options of this rank."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline)
    found = {}
    for case, make in CASES.items():
        wrapped = NxDPPModel(
            build(1 if source else 0),
            transformer_layer_cls=Block,
            num_microbatches=MICROBATCHES,
            loss_fn=nn.MSELoss(),
            **arguments,
        )
        made = make(wrapped, bool(source))
        first = load_checkpoint(path / case, source, wrapped, *made) if source else 0
        _train(wrapped, made, first, first + STEPS, partial(_train_step, wrapped))
        save_checkpoint(path / case, tag, wrapped, *made, first + STEPS)
        found[case] = _options(wrapped, made)
    parallel_state.destroy_model_parallel()
    return found


def _four_ranks(rank: int, path: Path) -> list[dict[str, Any]]:
    """The next steps of what two ranks have saved, in four stages; the last ones from there, and with replicas."""
    _on_ranks(rank, path, 4, {}, "two", "four")
    _on_ranks(rank, path, 2, {}, "two", "replicas")
    return [
        _on_ranks(rank, path, 4, INTERLEAVED, "four", "end"),
        _on_ranks(rank, path, 2, INTERLEAVED, "replicas", "last"),
    ]


def test_a_training_resumes_in_another_layout(tmp_path: Path) -> None:
    """Trainings of 9 steps over two stops."""
    run_ranks(2, _on_ranks, tmp_path, 2, {}, "", "two")
    of_ranks = run_ranks(4, _four_ranks, tmp_path)
    for case in CASES:
        expected = _in_one_process(case)
        found = {
            "2, 4, interleaved": [each[0][case] for each in of_ranks],
            "2, replicas, interleaved": [each[1][case] for each in of_ranks],
            "2, 4, one process": [_in_one_process(case, tmp_path / case, "four")],
        }
        for layouts, ranks in found.items():
            joined = {name: options for rank in ranks for name, options in rank.items()}
            assert joined.keys() == expected.keys()
            is_exact = "replicas" not in layouts
            for name, options in expected.items():
                values, wanted = joined[name].pop("values"), options["values"]
                assert torch.equal(values, wanted) if is_exact else torch.allclose(values, wanted), (layouts, name)
                assert joined[name] == {key: each for key, each in options.items() if key != "values"}, (layouts, name)


def _refuse_apart(rank: int, path: Path) -> list[str]:
    """Save and load what does not go together; return the errors."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(build(0), transformer_layer_cls=Block, num_microbatches=2, loss_fn=nn.MSELoss())
    several, schedulers = _matrices_and_vectors(wrapped, False)
    whole = AdamW(wrapped.parameters(), lr=0.1)
    by_layer, falling = _rates_by_layer(wrapped, False)
    save_checkpoint(path, "several", wrapped, several, schedulers)
    other = {"muon": several["rest"], "rest": several["muon"]}
    acts: list[Callable[[], Any]] = [
        lambda: load_checkpoint(path, "several", wrapped, whole, schedulers),
        lambda: load_checkpoint(path, "several", wrapped, other, schedulers),
        lambda: save_checkpoint(path, "shared", wrapped, [whole, several["rest"]]),
        lambda: save_checkpoint(path, "named", wrapped, [whole] if rank else {"a": whole}),
        lambda: save_checkpoint(path, "stepped", wrapped, by_layer, falling),
    ]
    errors = []
    for number, act in enumerate(acts):
        if rank == 0 and number == len(acts) - 1:
            falling.step()
        before = [each.detach().clone() for each in wrapped.parameters()]
        try:
            act()
            errors.append("")
        except (ValueError, TypeError) as error:
            errors.append(str(error))
        assert all(map(torch.equal, before, wrapped.parameters()))
    return errors


SENTENCES = [
    "has the state of a dict, {'muon': Muon, 'rest': AdamW}, and optimizer= is one optimizer, AdamW: give it as in",
    "has the state of Muon, and the optimizer 'muon' is AdamW: make the optimizer that was saved",
    "the optimizers '0' and '1' both have 0.norm.weight: give each parameter to one of them",
    "make the same call on every rank",
    "schedulers are in different states on ranks 0 and 1",
]


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for errors in run_ranks(2, _refuse_apart, tmp_path):
        for error, sentence in zip(errors, SENTENCES, strict=True):
            assert sentence in error


def test_options_of_one_parameter_that_contradict_each_other_are_refused() -> None:
    one, other = SavedGroup({"lr": 1, "eps": 0}, ["a"]), SavedGroup({"lr": 3, "eps": 0}, ["a"])
    with pytest.raises(ValueError, match="group of a has lr=1 on rank 0 and 3 on rank 2: set the same options"):
        joined_groups([[one], [one], [other]])
    with pytest.raises(ValueError, match=r"group of a has more=None on rank 0 and 1 on rank 1"):
        joined_groups([[one], [SavedGroup({"lr": 1, "eps": 0, "more": 1}, ["a"])]])
    with pytest.raises(ValueError, match=r"group of a has base_lrs=1 on rank 0 and 2 on rank 1"):
        joined_groups([[one._replace(scheduled={"base_lrs": 1})], [one._replace(scheduled={"base_lrs": 2}), other]])
