"""Predictions of layouts: memory beside measured peaks, times beside the simulator."""

from itertools import combinations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.layer_times import CountedModel
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DEVICES, Job, Link, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict
from nxdpp.planning.stage_costs import stage_costs, stage_ends
from nxdpp.schedules.families.registry import find_family
from nxdpp.schedules.simulate import simulate

# The model of benchmarks/results/dimensions.md.
LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


COUNTED: dict[tuple[float, float], dict[tuple[int, bool, int, int], CountedModel]] = {}


def _llama() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LLAMA)


def _costs(devices: int, batch: int, rate: float = 1e9, latency: float = 1e-5) -> ModelCosts:
    model = _llama()
    machine = Machine(devices, 10**9, DEVICES["cpu"], link=Link(rate, latency))
    costs = ModelCosts(model, machine, Job(batch, lambda size: microbatch_on_meta(model, size, 128)))
    # The model is counted once for all tests with this link.
    costs._counted = COUNTED.setdefault((rate, latency), costs._counted)
    return costs


def _predict(layout: Layout) -> Prediction:
    return predict(_costs(layout.devices, 8 * layout.data), layout)


# Layout, and the measured peak of each stage in KB: benchmarks/results/dimensions.md.
MEASURED = [
    (Layout(tensor=2, pipeline=2, microbatch=2, sequence=True), [22447.6, 17795.6]),
    (Layout(tensor=2, pipeline=2, data=2, microbatch=2, zero=1), [21660.2, 16352.8]),
]


@pytest.mark.parametrize(("layout", "measured"), MEASURED)
def test_the_memory_is_that_of_measured_ranks(layout: Layout, measured: list[float]) -> None:
    predicted = [rank.total / 1e3 for rank in _predict(layout).memory]

    assert predicted == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("samples", "ranks", "held"), [(2, 2, 4), (2, 4, 8), (256, 4, 0)])
def test_shared_memory_has_the_slots_of_the_messages_in_flight(samples: int, ranks: int, held: int) -> None:
    message = samples * 128 * 256 * 4
    layout = Layout(pipeline=ranks, microbatch=samples)
    prediction = predict(_costs(ranks, 8 * samples), layout)

    assert [rank.transport for rank in prediction.memory] == [held * message] * ranks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_the_time_of_a_schedule_is_that_of_the_simulator(schedule: str) -> None:
    chunks = find_family(schedule).default_chunks
    layout = Layout(pipeline=2, chunks=chunks, schedule=schedule)
    costs = _costs(2, 8)

    prediction = predict(costs, layout)

    model = costs.of(1, False, 1)
    action = costs.machine.device.action_seconds
    stages = stage_costs(model, stage_ends(model, 2 * chunks, False), False, action)
    inputs, weights = [stage.input_gradient for stage in stages], [stage.weight_gradient for stage in stages]
    if schedule.startswith("zb"):
        # Nothing receives a gradient of the first stage. Each weight-gradient is an action.
        inputs[0], weights[0] = action, weights[0] + inputs[0] - action
        weights = [weight + action for weight in weights]
    link = costs.machine.link
    sent = [stage.sent / link.bytes_per_second + link.latency for stage in stages]
    timeline = simulate(
        find_family(schedule).build(2, 8, chunks), [stage.forward for stage in stages], inputs, weights, sent
    )
    assert prediction.times[0].total - prediction.times[0].optimizer == pytest.approx(timeline.makespan)
    assert prediction.bubble == pytest.approx(timeline.mean_bubble, abs=1e-6)


def test_a_slow_link_takes_the_time_of_its_bytes() -> None:
    layout = Layout(tensor=2, data=2, zero=1)
    quick, slow = (predict(_costs(4, 8, rate=rate, latency=0.0), layout) for rate in (1e12, 1e6))

    assert slow.sent == quick.sent
    assert slow.times[0].tensor == pytest.approx(slow.most_sent.tensor / 1e6)
    assert slow.times[0].average == pytest.approx(slow.most_sent.data / 1e6)
    assert slow.limited_by.startswith("tensor collectives")


def test_each_stage_of_zero_moves_its_bytes() -> None:
    """On a slow link the exchange is the step: once with ZeRO-2, three times for each of 8 microbatches with ZeRO-3."""
    once, each = (predict(_costs(2, 16, rate=1e3, latency=0.0), Layout(data=2, zero=zero)) for zero in (2, 3))

    weights = 4 * sum(parameter.numel() for parameter in _llama().parameters())
    assert once.most_sent.data == weights
    assert each.most_sent.data == 8 * 3 * weights / 2
    assert once.times[0].average == pytest.approx(weights / 1e3, rel=1e-3)
    assert (once.times[0].exchange, each.times[0].average) == (0, 0)
    assert each.times[0].exchange + each.times[0].compute == pytest.approx(12 * weights / 1e3, rel=1e-3)
    assert each.limited_by.startswith("ZeRO-3 exchange")


@pytest.fixture(scope="module")
def counted() -> CountedModel:
    return _costs(1, 8).of(1, False, 1)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_cuts_have_the_least_work_of_the_slowest_stage(counted: CountedModel, stages: int) -> None:
    def slowest(ends: list[int]) -> float:
        return max(stage.work for stage in stage_costs(counted, ends, False, 0.0))

    best = min(slowest([*inner, 5]) for inner in combinations(range(1, 5), stages - 1))

    assert slowest(stage_ends(counted, stages, False)) == pytest.approx(best, rel=1e-5)


def test_more_stages_than_layers_are_refused(counted: CountedModel) -> None:
    with pytest.raises(ValueError, match="5 layers, the head included, cannot be split over 6 stages"):
        stage_ends(counted, 6, False)


def test_samples_between_counted_ones_are_interpolated() -> None:
    costs = _costs(1, 12)
    exact = costs._counted_now(1, False, 3, 1)
    for one, two in zip(costs.of(1, False, 3).layers, exact.layers, strict=True):
        assert (one.forward, one.held) == pytest.approx((two.forward, two.held), rel=0.01)


def test_a_tied_weight_counts_once() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, n_positions=64))
    job = Job(4, lambda size: microbatch_on_meta(model, size, 32))

    def weights(pipeline: int) -> list[float]:
        costs = ModelCosts(model, Machine(pipeline, 10**9, DEVICES["cpu"]), job)
        return [rank.weights for rank in predict(costs, Layout(pipeline=pipeline)).memory]

    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert weights(1) == [size]
    assert sum(weights(2)) == size + model.lm_head.weight.numel() * 4


def test_other_devices_than_those_of_the_machine_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 2 x pipeline 2 x data 1 are 4 devices, and the machine has 2"):
        predict(_costs(2, 8), Layout(tensor=2, pipeline=2))
    with pytest.raises(ValueError, match="a global batch of 8 does not divide over 1 replica in microbatches of 3"):
        predict(_costs(2, 8), Layout(pipeline=2, microbatch=3))


def test_an_encoder_is_sent_to_each_stage_of_the_decoder() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
    config.decoder_start_token_id = 0
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    costs = ModelCosts(model, Machine(4, 10**9), Job(4, lambda size: microbatch_on_meta(model, size, 16)))
    counted = costs.of(1, False, 1)

    predicted = stage_costs(counted, [1, 3, 4, len(counted.layers)], True, 0.0)

    # Hidden states of (1, 16, 32) in float32, and the bias of the positions of 4 heads (1, 4, 16, 16), which the first
    # layer makes. Stages of the decoder get the encoder's output from the one before.
    state, bias = 16 * 32 * 4, 4 * 16 * 16 * 4
    assert predicted[0].sent == state + bias
    assert predicted[2].sent >= 2 * state
    # The last stage of the decoder has its input and the encoder's output.
    assert predicted[-1].held >= 2 * 16 * 32 * 4
