"""Vision-language models with images: cut in the language model, images split with their rows."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.microbatches.split_batch import split_batch
from nxdpp.tracing.models.image_rows import split_images
from tests.support.in_process import InProcessPipeline
from tests.support.run_ranks import run_ranks
from tests.support.vision_language import IMAGE, ROWS, SIDE, make_vision_language, pixels, tokens

CPU = torch.device("cpu")


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _reference(model: nn.Module, batch: Mapping[str, Tensor], microbatches: int) -> tuple[list[Tensor], dict[str, Any]]:
    whole = copy.deepcopy(model)
    losses = []
    for part in split_batch(whole, batch, microbatches, None, CPU)[0]:
        loss = whole(**part).loss
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return losses, _gradients(whole)


def _assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tied: str | None) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if name == tied:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(ours[name], gradient), name


def _tied(model: Any) -> str | None:
    """Name of the embedding, which may be tied."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return next((name for name, parameter in model.named_parameters() if parameter is embedding), None)


@pytest.mark.parametrize(
    ("name", "is_mixed"),
    [("blip2", False), ("gemma3", True), ("qwen3_vl", True)],
)
def test_loss_and_gradients_with_images_are_those_of_one_process(name: str, is_mixed: bool) -> None:
    model, batch = (with_mixed_rows if is_mixed else make_vision_language)(name)
    losses, gradients = _reference(model, batch, 2)

    pipeline = InProcessPipeline(model, 3)
    ours = pipeline.train(batch, 2)

    assert all("vision" not in layer and "visual" not in layer for layer in pipeline.partition.layers)
    assert len(pipeline.partition.layers) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, losses, strict=True))
    assert any("vis" in key for key in gradients)
    _assert_equal(_gradients(model), gradients, _tied(model))


def test_layers_of_both_towers_are_cut_with_a_given_batch() -> None:
    towers: Any = {"transformer_layer_cls": ["Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"]}
    model, batch = make_vision_language("qwen2_vl")
    losses, gradients = _reference(model, batch, 2)
    with pytest.raises(ValueError, match=r"these inputs run the layers in the order .*visual.*Give partition_batch"):
        InProcessPipeline(copy.deepcopy(model), 4, **towers).train(batch, 2)
    # The remedy, followed.
    example = split_batch(model, batch, 2, None, CPU)[0][0]
    pipeline = InProcessPipeline(model, 4, example, **towers)
    ours = pipeline.train(batch, 2)

    assert "visual" in pipeline.partition.layers[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, losses, strict=True))
    _assert_equal(_gradients(model), gradients, _tied(model))


def test_images_of_several_rows_go_with_their_rows() -> None:
    model, batch = make_vision_language("qwen2_vl")

    parts, are_alike = split_batch(model, batch, ROWS, None, CPU)

    assert not are_alike
    assert [len(part["image_grid_thw"]) for part in parts] == [1, 1, 2, 1]
    assert [len(part["pixel_values"]) for part in parts] == [16, 16, 32, 16]
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts]), batch["pixel_values"])

    # Images of two sizes beside tokens of their own: which tokens are whose?
    ids = batch["input_ids"].clone()
    ids[ids == IMAGE] = 50
    ids[:, 2:8] = IMAGE
    ids[0, 8:14], ids[2, 2:8] = IMAGE, 50
    sizes = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 4, 4], [1, 4, 6]])
    mixed = {"input_ids": ids, "pixel_values": batch["pixel_values"][:64], "image_grid_thw": sizes}
    with pytest.raises(ValueError, match=r"do not tell the rows of pixel_values.*split_inputs_fn"):
        split_batch(model, mixed, 2, None, CPU)


def with_mixed_rows(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The model, and its batch without the images of its first two rows."""
    model, batch = make_vision_language(name)
    mixed = {key: value.clone() for key, value in batch.items()}
    mixed["input_ids"][:2][mixed["input_ids"][:2] < 40] = 50
    mixed["labels"] = mixed["input_ids"].clone()
    for key in {"token_type_ids", "mm_token_type_ids"} & {*batch}:
        mixed[key][:2] = 0
    of_rows = split_images(model, batch, ROWS)
    mixed |= {key: torch.cat([part[key] for part in of_rows[2:]]) for key in of_rows[0]}
    if not of_rows[0]:
        # Rows of such models have places for images, which stay empty.
        mixed["pixel_values"][:2] = 0
    return model, mixed


def _compare(wrapped: NxDPPModel, whole: Any, batches: list[dict[str, Tensor]]) -> None:
    """A step of each replica's batch, and one process with the rows of all replicas in one piece."""
    wrapped.zero_grad()
    loss = wrapped.run_train(**batches[parallel_state.get_data_parallel_rank()])
    joined = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
    whole.zero_grad()
    expected = whole(**joined).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for key, parameter in wrapped.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(key).grad, rtol=1e-4, atol=2e-6, msg=key)


def _wrapped(model: Any, **more: Any) -> NxDPPModel:
    return NxDPPModel(model, num_microbatches=2, loss_normalization="tokens", broadcast_and_average_loss=True, **more)


def _train_mixed(name: str) -> None:
    """Two steps; the rows without images come first, and then last."""
    replicas = parallel_state.get_data_parallel_size()
    model, batch = with_mixed_rows(name)
    whole = copy.deepcopy(model)
    wrapped = _wrapped(model)
    for step in range(2):
        _compare(wrapped, whole, [turned(batch) if (each + step) % 2 else batch for each in range(replicas)])
    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    assert is_first == any("vis" in key for key in _gradients(wrapped.local_module))


def turned(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows in the other order; the images of a row stay equal in number."""
    return {key: value.flip(0) if len(value) == ROWS else value for key, value in batch.items()}


def _images(numbers: list[int]) -> dict[str, Tensor]:
    """Rows of ``internvl`` with so many images each."""
    batch = {"input_ids": tokens([4 * number for number in numbers])}
    return batch | ({"pixel_values": pixels(sum(numbers), 3, SIDE, SIDE)} if sum(numbers) else {})


def _train_numbers() -> None:
    """Other numbers of images in the microbatches of a step, and in the next step."""
    model, _ = make_vision_language("internvl")
    whole = copy.deepcopy(model)
    wrapped = _wrapped(model)
    for own in ([1, 3, 0, 2], [2, 0, 3, 1]):
        batch = _images(own)
        _compare(wrapped, whole, [batch | {"labels": batch["input_ids"]}])


def _evaluate_uneven() -> None:
    """Numbers of rows that do not divide, some with images, some with none."""
    model, _ = make_vision_language("internvl")
    whole = copy.deepcopy(model).eval()
    wrapped = NxDPPModel(model, num_microbatches=4, loss_normalization="tokens").eval()
    for own in ([0, 1, 0, 2, 0], [2, 0, 1], [0, 0, 0, 0, 0], [1]):
        batch = _images(own)
        output = wrapped.run_eval(**batch, everywhere=True)
        loss = wrapped.run_eval(**batch, labels=batch["input_ids"], everywhere=True)
        with torch.no_grad():
            expected = whole(**batch, labels=batch["input_ids"])
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)


def _on_ranks(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    if parallel_state.get_data_parallel_size() > 1:
        _train_mixed("llava")
        return
    _train_mixed("qwen2_5_vl")
    _train_numbers()
    _evaluate_uneven()


@pytest.mark.parametrize("ranks", [2, 4])
def test_images_over_ranks_and_replicas_have_the_numbers_of_the_whole_batch(ranks: int) -> None:
    run_ranks(ranks, _on_ranks)


def test_a_microbatch_without_images_is_refused_where_forward_needs_them() -> None:
    model, batch = with_mixed_rows("blip2")
    with pytest.raises(ValueError, match=r"microbatch 0 of 2 has no pixel_values, which Blip2.*Order the rows"):
        split_batch(model, batch, 2, None, CPU)
    order = [0, 2, 1, 3]
    ordered = {key: value if key == "pixel_values" else value[order] for key, value in batch.items()}
    parts, _ = split_batch(model, ordered, 2, None, CPU)
    assert [len(part["pixel_values"]) for part in parts] == [1, 1]
