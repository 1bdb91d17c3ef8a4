"""``run_train``: accumulation, frozen stages, autocast, messages, and the arguments of NxD's guide."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.p2p.transport import Transport
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import (
    gradient_differences,
    llama,
    make,
    padded_batch,
    reference,
    train_in_one_process,
)
from tests.support.run_ranks import run_ranks

STAGES = 3


def start(stages: int = STAGES) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def wrap(model: nn.Module, **arguments: Any) -> NxDPPModel:
    wrapped = NxDPPModel(model, **{"num_microbatches": 4, **arguments})
    wrapped.move_model_to_device()
    return wrapped


def accumulate(rank: int) -> None:
    start()
    model = make("tied_llama")
    whole = reference(model)
    wrapped = wrap(model)
    # Batch size, sequence length and set of inputs differ between calls, without zero_grad.
    for size, length, is_masked in ((8, 10, True), (4, 7, True), (8, 10, False)):
        batch = padded_batch(size, length, seed=size)
        if not is_masked:
            del batch["attention_mask"]
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, 4)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    for name, distance in gradient_differences(wrapped, whole).items():
        assert name in tied
        assert distance is not None
        assert distance < 1e-6, name
    wrapped.zero_grad()
    assert all(parameter.grad is None for parameter in wrapped.local_parameters())


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Record what this rank sends."""
    sent: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    send, send_object = Transport.send, Transport.send_object

    def noted(self: Transport, tensor: torch.Tensor, destination: int, direction: Any, *rest: int) -> Any:
        sent.append((direction.name, tuple(tensor.shape), tensor.dtype))
        return send(self, tensor, destination, direction, *rest)

    def noted_object(self: Transport, value: Any, *rest: Any) -> None:
        sent.append(("metadata", (), torch.uint8))
        send_object(self, value, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "send", noted)
        patch.setattr(Transport, "send_object", noted_object)
        yield sent


def freeze_first_stage(rank: int) -> list[str]:
    start()
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("model.embed_tokens", "model.layers.0")))
    whole = reference(model)
    batch = padded_batch(8)
    wrapped = wrap(model)
    with recorded() as sent:
        for _ in range(2):
            wrapped.run_train(**batch)
            train_in_one_process(whole, batch, 4)
        assert gradient_differences(wrapped, whole) == {}
        # After unfreezing, the gradient must be sent again.
        for module in (model, whole):
            for parameter in module.parameters():
                parameter.requires_grad_(True)
        wrapped.refresh()
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, 4)
        assert gradient_differences(wrapped, whole) == {}
    return [kind for kind, *_ in sent]


def autocast(rank: int) -> list[tuple[str, torch.dtype]]:
    start()
    model = llama_of_bfloat16_layers()
    whole = reference(model)
    wrapped = wrap(model)
    batch = padded_batch(8)
    with recorded() as sent:
        with torch.autocast(torch.empty(0).device.type, dtype=torch.bfloat16):
            wrapped.run_train(**batch)
            train_in_one_process(whole, batch, 4)
        assert gradient_differences(wrapped, whole) == {}
        # Without autocast, boundary tensors of the same shapes have other dtypes.
        wrapped.run_train(**batch)
        train_in_one_process(whole, batch, 4)
        assert gradient_differences(wrapped, whole) == {}
    return [(kind, dtype) for kind, _, dtype in sent if kind != "metadata"]


class DownProjection(nn.Linear):
    """A linear layer, whose output under autocast is bfloat16 for any input dtype."""


def llama_of_bfloat16_layers() -> Any:
    model = make("llama")
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: module.closing(output))
        layer.closing = DownProjection(32, 32)
    return model


def record_sends(rank: int) -> list[tuple[str, tuple[int, ...]]]:
    start()
    wrapped = wrap(make("llama"))
    wrapped.run_train(**padded_batch(8))
    with recorded() as sent:
        wrapped.run_train(**padded_batch(8, seed=1))
    return [(kind, shape) for kind, shape, _ in sent]


@pytest.fixture(scope="module")
def sent() -> list[list[Any]]:
    """Messages of each of three ranks, by case."""
    return run_in_turn(STAGES, record_sends, freeze_first_stage, autocast)


def test_exactly_one_tensor_crosses_each_boundary(sent: list[list[Any]]) -> None:
    hidden = (2, 10, 32)
    first, second, third = (each for each, *_ in sent)
    assert first == [("ACTIVATION", hidden)] * 4
    assert sorted(second) == [("ACTIVATION", hidden)] * 4 + [("GRADIENT", hidden)] * 4
    assert third == [("GRADIENT", hidden)] * 4


def test_no_gradient_is_sent_to_a_frozen_first_stage(sent: list[list[Any]]) -> None:
    second = sent[1][1]
    assert second.count("ACTIVATION") == 3 * 4
    assert second.count("GRADIENT") == 4, "only after the first stage was unfrozen"


def test_boundary_dtypes_under_autocast(sent: list[list[Any]]) -> None:
    first, second, _ = (each for *_, each in sent)
    assert first == [("ACTIVATION", torch.bfloat16)] * 4 + [("ACTIVATION", torch.float32)] * 4
    assert [dtype for kind, dtype in second if kind == "GRADIENT"] == [torch.bfloat16] * 4 + [torch.float32] * 4


def test_other_shapes_and_inputs_are_those_of_one_process() -> None:
    run_ranks(STAGES, accumulate)


def train_as_in_the_guide(rank: int) -> None:
    start(2)
    torch.manual_seed(1234)
    model = llama(use_cache=True, return_dict=False)
    before = model.config.to_dict()
    whole = reference(model)
    whole.config.return_dict = True
    wrapped = NxDPPModel(
        model,
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=4,
        virtual_pipeline_size=1,
        output_loss_value_spec=(True, False),
        input_names=["input_ids", "attention_mask", "labels"],
        pipeline_cuts=["model.layers.0"],
        trace_file_path=None,
        leaf_module_cls=[LlamaRMSNorm.__name__],
        autowrap_modules=[torch.nn.functional],
        use_zero1_optimizer=False,
        deallocate_pipeline_outputs=False,
    )
    wrapped.move_model_to_device()
    assert wrapped.stage_layers == [["model.layers.0"], [f"model.layers.{i}" for i in (1, 2, 3)]][rank]
    batch = padded_batch(8)
    loss = wrapped.run_train(**batch)
    losses = train_in_one_process(whole, batch, 4)
    assert loss is None or (isinstance(loss, torch.Tensor) and torch.equal(loss, torch.stack(losses).mean()))
    assert gradient_differences(wrapped, whole) == {}
    assert model.config.to_dict() == before
    with pytest.raises(ValueError, match=r"missing: \['attention_mask'\], extra: \['position_ids'\]"):
        wrapped.run_train(input_ids=batch["input_ids"], labels=batch["labels"], position_ids=batch["input_ids"])


def test_arguments_of_the_nxd_guide() -> None:
    run_ranks(2, train_as_in_the_guide)
