"""The balance of experts over ranks, and routing that is recorded and replayed, against one process."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxdpp
from nxdpp import MetricsFile, NxDPPModel, apply_checkpoint, expert_parallelize, parallel_state
from nxdpp.initialization.parts import own_part
from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of
from tests.experts.test_layer import PLAN, Layer, Model, _inputs, _made, _message
from tests.support.expert_models import batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 4


class _Gate:
    """The router of one process, which keeps its choices or is given choices, call after call."""

    def __init__(self, gate: Any) -> None:
        self._gate, self._own = gate, gate.forward
        self.chosen: list[Tensor] = []
        self.given: list[Tensor] = []
        gate.forward = self

    def __call__(self, hidden: Tensor) -> Any:
        if not self.given:
            self.chosen.append(self._own(hidden)[2])
            return self._own(hidden)
        chosen, rows = self.given.pop(0), hidden.reshape(-1, hidden.shape[-1])
        if hasattr(self._gate, "routed_scaling_factor"):
            logits = nn.functional.linear(rows.float(), self._gate.weight.float())
            weights = logits.sigmoid().gather(1, chosen)
            return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self._gate.routed_scaling_factor, chosen
        logits = nn.functional.linear(rows, self._gate.weight)
        weights = logits.float().softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def _gates(model: nn.Module) -> dict[str, _Gate]:
    named = list(model.named_modules())
    return {
        name.replace("gate", "experts"): _Gate(each)
        for name, each in named
        if name.endswith("gate") and hasattr(each, "top_k")
    }


def _turn_routers(model: Any) -> None:
    """Change the routers so that they choose other experts."""
    with torch.no_grad():
        for name, parameter in getattr(model, "local_named_parameters", model.named_parameters)():
            if "gate.weight" in name or "router" in name:
                parameter.neg_()


def _compared(wrapped: Any, whole: nn.Module) -> dict[str, float]:
    """The largest difference of the gradients of each parameter, where it is above rounding."""
    found = {}
    for key, parameter in wrapped.local_named_parameters():
        gradient = whole.get_parameter(key).grad
        assert gradient is not None, key
        found[key] = float((parameter.grad - own_part(gradient, parameter)).abs().max())
    return {key: value for key, value in found.items() if not value <= 1e-12}


def _replay(rank: int, pipeline: int, cases: list[tuple[str, str, int, bool]]) -> dict[Any, Any]:
    parallel_state.initialize_model_parallel(1, pipeline, expert_model_parallel_size=2)
    found: dict[Any, Any] = {}
    for name, schedule, layers, checkpointed in cases:
        model = make(name, layers)
        whole = copy.deepcopy(model)
        wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES, schedule=schedule)
        if checkpointed:
            apply_checkpoint(wrapped)
        replica, gates = parallel_state.get_data_parallel_rank(), _gates(whole)
        batches = [batch_of(each, 2 * MICROBATCHES) for each in range(2)]
        # Record an evaluation and a training step; both choose as one process does.
        with nxdpp.recorded_routing(wrapped) as routing:
            wrapped.run_eval(**batches[replica])
            wrapped.run_train(**batches[replica])
        step_of_one_process(whole, batches, MICROBATCHES)
        assert len(routing) == 2
        for step in routing:
            assert step
            for key, choices in step.items():
                own = gates[key].chosen[MICROBATCHES * replica :]
                assert all(torch.equal(choices[at], own[at]) for at in range(MICROBATCHES)), key
        # Replay them with other routers.
        for each in (wrapped, whole):
            _turn_routers(each)
            each.zero_grad()
        with nxdpp.recorded_routing(wrapped) as others:
            wrapped.run_eval(**batches[replica])
        assert any(not torch.equal(others[0][key][0], routing[0][key][0]) for key in routing[0])
        file = io.BytesIO()
        torch.save(routing, file)
        file.seek(0)
        given = torch.load(file)
        with nxdpp.replayed_routing(wrapped, given), nxdpp.recorded_routing(wrapped) as again:
            evaluated, loss = wrapped.run_eval(**batches[replica]), wrapped.run_train(**batches[replica])
        assert all(torch.equal(again[1][key][0], routing[1][key][0]) for key in routing[1])
        for gate in gates.values():
            gate.given = list(gate.chosen)
        expected = step_of_one_process(whole, batches, MICROBATCHES)[replica]
        differences = _compared(wrapped, whole)
        if loss is not None and not max(abs(loss - expected), abs(evaluated - expected)) <= 1e-12:
            differences["loss"] = float(loss - expected)
        # Afterwards the routers choose.
        with nxdpp.recorded_routing(wrapped) as after:
            wrapped.run_eval(**batches[replica])
        assert all(torch.equal(after[0][key][0], others[0][key][0]) for key in others[0])
        if differences:
            found[name, schedule] = differences
    return found


def test_replayed_routing_is_exact() -> None:
    assert run_ranks(2, _replay, 1, [("mixtral", "1f1b", 2, True)]) == [{}, {}]


def test_replayed_routing_is_exact_over_two_stages() -> None:
    cases = [("deepseek_v3", "zb-v", 4, True), ("mixtral", "zb-h1", 2, False)]
    assert run_ranks(4, _replay, 2, cases) == [{}] * 4


def _replay_own(rank: int) -> dict[str, float]:
    """Replay in layers that are the modules around their experts, and are checkpointed, of frozen inputs."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = _made(0.0)
    whole: Any = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model, PLAN), transformer_layer_cls=Layer, num_microbatches=2)
    apply_checkpoint(wrapped)
    with nxdpp.recorded_routing(wrapped) as routing:
        wrapped.run_train(x=_inputs(parallel_state.get_data_parallel_rank()))
    for each in (wrapped, whole):
        _turn_routers(each)
        each.zero_grad()
    with nxdpp.replayed_routing(wrapped, routing):
        wrapped.run_train(x=_inputs(parallel_state.get_data_parallel_rank()))
    # The gradient of one process, with the choices of the old routers.
    old = copy.deepcopy(whole)
    _turn_routers(old)
    for replica in range(2):
        for part in _inputs(replica).chunk(2):
            x, seen = part, part
            for layer, before in zip(whole.layers, old.layers, strict=True):
                chosen = before.router(seen).softmax(-1).topk(2)[1]
                seen = before(seen)
                x = x + layer.experts(x, layer.router(x).softmax(-1).gather(1, chosen), chosen)
            (x.square().mean() / 4).backward()
    return _compared(wrapped, whole)


def test_replayed_routing_of_checkpointed_layers_of_ones_own_is_exact() -> None:
    assert run_ranks(2, _replay_own) == [{}, {}]


def _balance(rank: int, folder: Path, name: str, schedule: str, layers: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(1, 2, expert_model_parallel_size=2)
    model = make(name, layers)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(
        expert_parallelize(model),
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        trace_file_path=str(folder / "timeline.json"),
    )
    apply_checkpoint(wrapped)
    replica, gates = parallel_state.get_data_parallel_rank(), _gates(whole)
    batches = [batch_of(each, 2 * MICROBATCHES) for each in range(2)]
    with MetricsFile(folder, wrapped) as metrics, nxdpp.recorded_routing(wrapped) as routing:
        for _ in range(2):
            loss = wrapped.run_train(**batches[replica])
            wrapped.run_eval(**batches[replica])
            metrics.write(loss)
    step_of_one_process(whole, batches, MICROBATCHES)
    tokens = {key: torch.cat(gates[key].chosen).flatten().bincount(minlength=4) for key in routing[0]}
    own = [2 * replica, 2 * replica + 1]
    most = {(key, expert): float(4 * each[expert] / each.sum()) for key, each in tokens.items() for expert in own}
    if not most:
        # The first layer is dense.
        assert wrapped.last_expert_balance == {}
        return {}
    name, expert = max(most, key=lambda at: most[at])
    total = torch.stack(list(tokens.values())).sum(0)
    assert wrapped.last_expert_balance == {
        "experts": [int(total[each]) if each in own else 0 for each in range(4)],
        "routing": {
            "largest_over_mean": round(most[name, expert], 4),
            "largest": f"{name}, expert {expert}",
            "share": round(float(total[own].sum() / total.sum()), 4),
        },
    }
    return wrapped.last_expert_balance


@pytest.mark.parametrize(
    ("name", "schedule", "layers"), [("deepseek_v3", "1f1b", 3), ("mixtral", "1f1b", 2), ("qwen3_moe", "zb-v", 4)]
)
def test_the_balance_of_experts_is_seen(tmp_path: Path, name: str, schedule: str, layers: int) -> None:
    told = run_ranks(4, _balance, tmp_path, name, schedule, layers)
    run = RunMetrics(tmp_path)
    both = ("experts", "routing")
    assert [{key: rank.last[key] for key in both if key in rank.last} for rank in run.ranks.values()] == told
    summary = summary_of(run, 0.0)
    with_experts = [rank["experts"] for rank in told if rank]
    assert summary["experts"] == [sum(each) for each in zip(*with_experts, strict=True)]
    of_ranks = {number: rank["routing"] for number, rank in enumerate(told) if rank}
    assert summary["routing"] == {
        "largest_over_mean": max(each["largest_over_mean"] for each in of_ranks.values()),
        "largest": max(of_ranks.values(), key=lambda each: each["largest_over_mean"])["largest"],
        "shares_of_ranks": {number: each["share"] for number, each in of_ranks.items()},
    }
    # Ranks of a pipeline are in its timeline: evaluations have no balance.
    events = json.loads((tmp_path / "timeline.json").read_text())
    steps = [each for each in events if each.get("cat") == "step"]
    assert len(steps) == 8
    for each in steps:
        of_training = told[2 * each["tid"]] if "train" in each["name"] else {}
        assert each["args"] == {"step": each["args"]["step"], **of_training}


class _Twice(Layer):
    """A layer that calls its experts twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _Sorting(Layer):
    """A layer whose router chooses by a sort."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).sort(descending=True)
        mixed: Tensor = x + self.experts(x, weights=weights[:, :2], chosen=chosen[:, :2])
        return mixed


def _refusals(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    wrapped = NxDPPModel(expert_parallelize(_made(0.0), PLAN), transformer_layer_cls=Layer, num_microbatches=2)
    inputs = _inputs(0)
    with nxdpp.recorded_routing(wrapped) as routing:
        wrapped.run_train(x=inputs)

    def replay(call: Callable[[], Any], given: Any = routing) -> str:
        def replayed() -> None:
            with nxdpp.replayed_routing(wrapped, given):
                call()

        return _message(replayed)

    def too_many() -> None:
        for _ in range(2):
            wrapped.run_train(x=inputs)

    others = copy.deepcopy(routing)
    others[0]["layers.1.experts"][1][0, 0] = 4
    return [
        _message(lambda: nxdpp.recorded_routing(_made(0.0)).__enter__()),  # type: ignore[arg-type]  # no NxDPPModel
        replay(too_many),
        replay(lambda: wrapped.run_train_microbatches([{"x": inputs}])),
        replay(lambda: None, others),
        replay(lambda: None, [{"layers.0.experts": {0: [1]}}]),
    ]


def _without_experts(rank: int) -> str:
    parallel_state.initialize_model_parallel()
    wrapped = NxDPPModel(Model(0.0), transformer_layer_cls=Layer)
    return _message(lambda: nxdpp.recorded_routing(wrapped).__enter__())


REFUSED = [
    "recorded_routing takes a wrapped model, not a Model",
    "has given the choices of all its steps",
    "has the microbatches [0, 1] of layers.0.experts, the step has 1",
    "names experts 0 to 4 of 4",
    "must have tensors (N, K) of int64",
]


def test_a_routing_that_does_not_fit_is_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert [text for text, message in zip(REFUSED, messages, strict=True) if text not in message] == []
    (message,) = run_ranks(1, _without_experts)
    assert "takes a model whose experts are divided over ranks" in message


def _fails(rank: int, case: str) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model, layer = _made(0.0), {"sort": _Sorting, "twice": _Twice}.get(case, Layer)
    for each in model.layers:
        each.__class__ = layer
    wrapped = NxDPPModel(expert_parallelize(model, PLAN), transformer_layer_cls=layer, num_microbatches=2)
    with nxdpp.recorded_routing(wrapped) as routing:
        wrapped.run_train(x=_inputs(0))
    _turn_routers(wrapped)
    with nxdpp.replayed_routing(wrapped, routing):
        wrapped.run_train(x=_inputs(0 if case == "sort" else 1))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("sort", "has not got the experts that replayed_routing gives"),
        ("twice", r"layers\.0\.experts is called twice in microbatch 0"),
        ("tokens", "has the choices of 1 token of layers.0.experts, and the microbatch has 3"),
    ],
)
def test_a_replay_that_cannot_be_right_is_an_error(case: str, text: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        run_ranks(2, _fails, case)
