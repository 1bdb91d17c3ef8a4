"""``manual_pp_partition``: a list of layers, as NxD's own tests have it; and stages that a script cuts by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.manual_pipe_stage import PipelineStageModule, manual_model
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks

SIZE, LAYERS = 8, 5


class Wrapped(nn.Linear):
    """A layer that takes and returns a list, as layers of NxD's manual stages."""

    def forward(self, input: Any) -> Any:
        return [super().forward(input[0] if isinstance(input, list | tuple) else input)]


def make_layers(is_shared: bool) -> list[nn.Module]:
    torch.manual_seed(5)
    layers: list[nn.Module] = [Wrapped(SIZE, SIZE, bias=False) for _ in range(LAYERS)]
    if is_shared:
        pairs = [(layers[0], "weight"), (layers[-1], "weight")]
        PipelineStageModule.mark_weight_sharing(pairs, "first and last")
    return layers


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(6)
    return [(torch.rand(4, SIZE), torch.randint(0, SIZE, (4,))) for _ in range(3)]


def losses_of_one_process(is_shared: bool) -> list[float]:
    layers = make_layers(is_shared)
    optimizer = torch.optim.SGD({id(p): p for layer in layers for p in layer.parameters()}.values(), lr=0.1)
    losses = []
    for inputs, labels in batches():
        parts = []
        for each, wanted in zip(inputs.chunk(2), labels.chunk(2), strict=True):
            output: Any = [each]
            for layer in layers:
                output = layer(output)
            loss = nn.functional.cross_entropy(output[0], wanted)
            (loss / 2).backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def first_alone(layers: list[nn.Module], stages: int) -> dict[nn.Module, int]:
    return {layer: min(number, stages - 1) for number, layer in enumerate(layers)}


def losses_over_ranks(is_shared: bool, partition_fn: Any) -> tuple[list[float], list[str]]:
    model = NxDPPModel(
        module=make_layers(is_shared),
        num_microbatches=2,
        manual_pp_partition=True,
        manual_pp_stage_partition_fn=partition_fn,
        manual_pp_loss_fn=nn.CrossEntropyLoss(),
        return_loss_on_cpu=True,
        broadcast_and_average_loss=True,
    )
    model.register_shared_weights()
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
    losses = []
    for inputs, labels in batches():
        losses.append(model.run_train(inputs=inputs, labels=labels).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [name for name, _ in model.local_named_children()]


def by_hand() -> None:
    """NxD's three calls, with the even cut; another cut and other inputs are refused."""
    model = NxDPPModel(make("llama"), "LlamaDecoderLayer", num_microbatches=2)
    model.trace(input_names=["input_ids", "attention_mask", "labels"])
    model.cut_pipeline_stage("model.layers.1")
    model.partition()
    assert model.input_names == ["input_ids", "attention_mask", "labels"]
    batch = padded_batch(4)
    with pytest.raises(ValueError, match=r"missing: \['attention_mask'\]"):
        model.run_train(input_ids=batch["input_ids"], labels=batch["labels"])
    with pytest.raises(ValueError, match=r"leaf_modules=\.\.\.\).*NxDPPModel\(\.\.\., leaf_module_cls=\.\.\.\)"):
        model.trace(input_names=["input_ids"], leaf_modules=["LlamaRMSNorm"])
    with pytest.raises(RuntimeError, match=r"was cut after model\.layers\.1 when it was made.*pipeline_cuts=\['model"):
        model.cut_pipeline_stage("model.layers.0")
    model.run_train(**batch)


def over_two_ranks(rank: int) -> list[Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    found = [losses_over_ranks(*case) for case in ((False, None), (True, None), (False, first_alone))]
    by_hand()
    parallel_state.destroy_model_parallel()
    return found


def test_a_list_of_layers_trains_as_in_one_process() -> None:
    first, second = run_ranks(2, over_two_ranks)
    expected = [losses_of_one_process(is_shared) for is_shared in (False, True, False)]
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    for (losses, _), exact, bits in zip(first, expected, (True, False, True), strict=True):
        # The two gradients of a shared weight are summed in a different order.
        assert losses == (exact if bits else pytest.approx(exact, rel=1e-6))
    # The last stage has the remainder. The first one has the shared weight under both its names.
    own = ["layers.0", "layers.1"]
    assert [names for _, names in first] == [own, [*own, "layers.4"], ["layers.0"]]
    assert second[2][1] == ["layers.1", "layers.2", "layers.3", "layers.4"]


def test_marked_weights_are_one_parameter() -> None:
    layers = make_layers(is_shared=True)
    assert layers[0].weight is layers[-1].weight
    with pytest.raises(ValueError, match=r"the weights of 'default' have the shapes \[\(8, 8\), \(9, 8\)\]"):
        PipelineStageModule.mark_weight_sharing([(layers[0], "weight"), (nn.Linear(8, 9), "weight")])


@pytest.fixture
def two_ranks() -> Any:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2)
    yield
    parallel_state.destroy_model_parallel()


def test_stages_that_cannot_be_cut_are_refused(two_ranks: Any) -> None:
    layers = make_layers(is_shared=False)
    with pytest.raises(ValueError, match=r"the stages of the 5 layers are \[1, 0, 0, 0, 0\], and 2 stages are needed"):
        manual_model(layers, 1, lambda layers, stages: {each: int(each is layers[0]) for each in layers}, None)
    with pytest.raises(ValueError, match=r"manual_pp_partition=True excludes pipeline_cuts\."):
        NxDPPModel(copy.copy(layers), manual_pp_partition=True, pipeline_cuts=["layers.0"])
    with pytest.raises(ValueError, match=r"manual_pp_partition=True is needed for manual_pp_loss_fn\."):
        NxDPPModel(make("llama"), manual_pp_loss_fn=nn.CrossEntropyLoss())
