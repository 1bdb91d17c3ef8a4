"""Methods of a transformers model on the pipelined one: the same answer as of the model itself, or a named refusal."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from nxdpp import NxDPPModel, init_on_device, parallel_state
from tests.support.models import gradient_differences, llama, padded_batch, reference, train_in_one_process
from tests.support.run_ranks import run_ranks

PROMPT = torch.tensor([[3, 4, 5]])

BEFORE = "call it on the module before NxDPPModel"
REFUSED: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "push_to_hub": (lambda model: model.push_to_hub("a/b"), "upload the directory from one process"),
    "from_pretrained": (lambda model: model.from_pretrained("a"), "nxdpp.load_pretrained.model, directory."),
    "resize_token_embeddings": (lambda model: model.resize_token_embeddings(70), BEFORE),
    "tie_weights": (lambda model: model.tie_weights(), "Weights that were tied then stay tied"),
    "num_parameters": (lambda model: model.num_parameters(only_trainable=True), "add up sum"),
    "get_decoder": (lambda model: model.get_decoder(), "local_module has this rank's modules"),
    "add_module": (lambda model: model.add_module("x", nn.Linear(1, 1)), "Add it to the module before"),
    "another function": (lambda model: setattr(model, "loss_function", abs), "set it before NxDPPModel.module., or"),
    "a shard size": (lambda model: model.save_pretrained("never", max_shard_size="1MB"), "has no max_shard_size"),
    "reentrant": (
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
        "takes no use_reentrant=True",
    ),
    "some layers": (
        lambda model: model.activation_checkpointing_enable({"every_n_layers": 2}),
        "apply_checkpoint.model, layers_to_checkpoint=",
    ),
}


def message(call: Callable[[Any], Any], model: Any) -> str:
    try:
        call(model)
    except (AttributeError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def on_two_ranks(rank: int, directory: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    module = llama()
    whole = reference(module)
    model = NxDPPModel(module, num_microbatches=2)
    found: dict[str, Any] = {
        "messages": {name: message(call, model) for name, (call, _) in REFUSED.items()},
        "config": model.config is module.config,
        "listed": {"config", "generate", "run_train", "lm_head", "dtype"} & set(dir(model)),
        "numbers": [model.num_parameters(), model.num_parameters(exclude_embeddings=True)],
        "expected": [whole.num_parameters(), whole.num_parameters(exclude_embeddings=True)],
        "bytes": model.get_memory_footprint(),
        "embedding": message(lambda model: model.get_input_embeddings(), model),
    }
    found["checkpointing"] = checkpointing(model, whole)
    model.save_pretrained(directory, rank == 0)
    found["loss functions"] = loss_functions(model)
    tied = llama(tie_word_embeddings=True)
    found["expected"] += [tied.num_parameters(), tied.num_parameters(exclude_embeddings=True)]
    model = NxDPPModel(tied, num_microbatches=2)
    found["numbers"] += [model.num_parameters(), model.num_parameters(exclude_embeddings=True)]
    return found


def checkpointing(model: Any, whole: nn.Module) -> list[Any]:
    """Return forwards of a layer in a step without, with and again without recomputation, and differing gradients."""
    calls: list[int] = []
    layer = model.local_module.get_submodule(model.stage_layers[0])
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = padded_batch(4)
    found: list[Any] = []
    train_in_one_process(whole, batch, 2)
    for change in (None, model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        if change is not None:
            change()
        calls.clear()
        model.zero_grad()
        model.run_train(**batch)
        found += [(len(calls), model.is_gradient_checkpointing), *gradient_differences(model, whole)]
    assert "forward" not in vars(layer)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.gradient_checkpointing_enable()
    found.append(model.is_activation_checkpointing)
    model.activation_checkpointing_disable()
    return [*found, model.is_activation_checkpointing]


def loss_functions(model: Any) -> list[float | None]:
    """Return the loss before and after another function, as the refusal says it."""
    batch = padded_batch(4)
    before = model.run_eval(**batch)
    model.original_module.loss_function = lambda logits, **_: logits.float().sum() * 0 + 7
    model.refresh()
    after = model.run_eval(**batch)
    return [None if loss is None else loss.item() for loss in (before, after)]


@pytest.fixture(scope="module")
def directory() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "saved"


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, directory)


def test_a_method_that_cannot_be_done_names_the_remedy(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, (_, words) in REFUSED.items():
            assert pytest.raises(RuntimeError, match=words).matches(RuntimeError(rank["messages"][name])), name


def test_the_configuration_the_numbers_and_the_memory_are_told(ranks: list[dict[str, Any]]) -> None:
    assert [rank["config"] for rank in ranks] == [True, True]
    assert ranks[0]["listed"] == {"config", "generate", "run_train", "dtype"}
    assert ranks[1]["listed"] == ranks[0]["listed"] | {"lm_head"}
    assert ranks[0]["numbers"] == ranks[1]["numbers"] == ranks[0]["expected"]
    # Both ranks have the frequencies of the rotary embedding.
    whole = llama().get_memory_footprint()
    assert whole <= sum(rank["bytes"] for rank in ranks) < 1.01 * whole
    assert max(rank["bytes"] for rank in ranks) < 0.6 * whole
    assert ranks[0]["embedding"] == ""
    assert "get_input_embeddings() of a pipelined model returns values that another rank" in ranks[1]["embedding"]


def test_layers_are_recomputed_from_enable_to_disable(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["checkpointing"] == [(2, False), (4, True), (2, False), True, False]


def test_a_saved_model_loads_in_one_process(ranks: list[dict[str, Any]], directory: Path) -> None:
    torch.manual_seed(0)
    loaded: Any = LlamaForCausalLM.from_pretrained(directory)
    for name, parameter in llama().named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_one_rank_answers_as_the_model_itself(one_rank: None) -> None:
    torch.manual_seed(0)
    module = llama()
    whole: Any = reference(module)
    expected = whole.generate(PROMPT, do_sample=False, max_new_tokens=4)
    model: Any = NxDPPModel(module, num_microbatches=2)
    assert torch.equal(model.generate(PROMPT, do_sample=False, max_new_tokens=4), expected)
    assert model.num_parameters(only_trainable=True) == module.num_parameters()
    with init_on_device(torch.device("meta")):
        module = llama()
    model = NxDPPModel(module, num_microbatches=2)
    assert "Call move_model_to_device() or materialise()" in message(lambda m: m.generate(PROMPT), model)
    model.move_model_to_device()
    assert model.generate(PROMPT, max_new_tokens=4).shape == (1, 7)
