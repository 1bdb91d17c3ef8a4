"""Wrapping: names, freed and kept parameters, and refusals that leave the model unchanged."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import llama, make, padded_batch
from tests.support.run_ranks import run_ranks


def start(stages: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)


def collect_names(rank: int) -> dict[str, list[str]]:
    start(3)
    wrapped = NxDPPModel(make("tied_llama"), num_microbatches=2)
    return {
        "parameters": [name for name, _ in wrapped.local_named_parameters()],
        "own parameters": [name for name, _ in wrapped.named_parameters()],
        "buffers": [name for name, _ in wrapped.local_named_buffers()],
        "modules": [name for name, _ in wrapped.local_named_modules()],
        "state": list(wrapped.local_state_dict()),
        "own state": list(wrapped.state_dict()),
        "layers": wrapped.stage_layers,
    }


def test_names_are_those_of_the_model() -> None:
    model = make("tied_llama")
    ranks = run_ranks(3, collect_names)
    layers = [["model.layers.0"], ["model.layers.1"], ["model.layers.2", "model.layers.3"]]
    assert [rank["layers"] for rank in ranks] == layers
    known = {name for name, _ in model.named_modules()}
    for rank in ranks:
        assert rank["own parameters"] == rank["parameters"]
        assert rank["own state"] == rank["state"]
        assert set(rank["modules"]) <= known
        assert rank["buffers"] == [name for name, _ in model.named_buffers()]
    # A tied weight is listed once, and a state dict has all its names.
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert [set(rank["state"]) - set(rank["parameters"]) for rank in ranks] == [{head}, set(), {head}]
    of_layers = [[n for n in model.state_dict() if n.startswith(tuple(f"{layer}." for layer in own))] for own in layers]
    assert ranks[0]["parameters"] == [embedding, *of_layers[0]]
    assert ranks[1]["parameters"] == of_layers[1]
    assert sorted(ranks[2]["parameters"]) == sorted([*of_layers[2], "model.norm.weight", embedding])
    assert "model.layers.0.self_attn.q_proj" in ranks[0]["modules"]


def free(rank: int) -> None:
    start(2)
    model = make("tied_llama")
    references = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
    tied = references["model.embed_tokens.weight"]
    wrapped = NxDPPModel(model)
    gc.collect()
    local = {name for name, _ in wrapped.local_named_parameters()}
    alive = {name for name, reference in references.items() if reference() is not None}
    assert alive == {name for name, reference in references.items() if name in local or reference is tied}
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name not in local)
    assert not any(parameter.is_meta for parameter in wrapped.parameters())


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_microbatches": 0}, ValueError, r"num_microbatches=0 must be a whole number of at least 1"),
    ({"num_microbatches": True}, ValueError, r"num_microbatches=True must be a whole number"),
    ({"check_inputs": "last"}, ValueError, "check_inputs='last' must be 'first', 'always' or 'never'"),
    ({"autowrap_obj_methods": {"model": ["forward"]}}, ValueError, "autowrap_obj_methods=.*leaf_module_cls"),
    ({"gradient_reduction": "sum", "use_zero1_optimizer": True}, ValueError, "exclude each other"),
    ({"virtual_pipeline_size": 4}, ValueError, "4 transformer layers cannot be split over 8 pipeline stages"),
    ({"schedule": "2f1b"}, ValueError, "there is no schedule '2f1b' .did you mean '1f1b'.*Choose one of gpipe, 1f1b"),
    ({"schedule": "1f1b", "virtual_pipeline_size": 2}, ValueError, "1f1b has 1 stage per rank, not 2"),
    ({"schedule": [["0F0", "0B0"]]}, ValueError, "the schedule is for .*'ranks': 1.* this pipeline has .*'ranks': 2"),
    ({"param_init_fn": print}, ValueError, "has values already"),
    ({"trace_file_path": "no/such/folder/trace.json"}, ValueError, "there is no folder no/such/folder"),
    ({"return_mb_loss": True, "broadcast_and_average_loss": True}, ValueError, "exclude each other"),
    ({"auto_partition": True, "pipeline_cuts": ["model.layers.0"]}, ValueError, "exclude each other"),
    ({"fuse_microbatches": True}, ValueError, "fuse_microbatches=True joins microbatches in one graph of XLA"),
    ({"use_optimizer_wrapper": 1}, TypeError, "use_optimizer_wrapper=1 must be True or False"),
    ({"pipeline_cuts": ["model.layers.9"]}, ValueError, r"\['model.layers.9'\].*model.layers.0, model.layers.1"),
    ({"pipeline_cuts": []}, ValueError, "0 names, but 2 stages need 1 cut"),
    ({"transformer_layer_cls": "NoSuchLayer"}, ValueError, "NoSuchLayer"),
    ({"transformer_layer_cls": nn.Conv2d}, ValueError, "has no module of that class"),
    ({"leaf_module_cls": ["LlamaModel"]}, ValueError, "holds\\s+transformer layers"),
    ({"tracer_cls": nn.Module}, ValueError, r"must be 'hf', 'torch', or a subclass of torch\.fx\.Tracer"),
    ({"autowrap_functions": [nn.Linear]}, TypeError, "autowrap_functions"),
    ({"autowrap_modules": ["math"]}, TypeError, "autowrap_modules"),
    ({"output_loss_value_spec": (False, False)}, ValueError, "exactly one must be True"),
]


def refuse(rank: int) -> None:
    start(2)
    model = make("llama")
    before = dict(model.named_parameters())
    for arguments, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            NxDPPModel(model, **arguments)
    two_layers = llama(layers=1)
    with pytest.raises(ValueError, match="1 transformer layer cannot be split over 2 pipeline stages"):
        NxDPPModel(two_layers)
    model.config.layerdrop = 0.1
    with pytest.raises(ValueError, match="layerdrop"):
        NxDPPModel(model)
    model.config.layerdrop = 0.0
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_refused_arguments_leave_the_model_unchanged() -> None:
    run_ranks(2, refuse)


def refuse_inputs(rank: int) -> None:
    start(2)
    wrapped = NxDPPModel(make("llama"), num_microbatches=4)
    wrapped.move_model_to_device()
    batch = padded_batch(8)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        (padded_batch(6), ValueError, r"a batch of 6 .* num_microbatches=4"),
        ({**batch, "labels": batch["labels"][:4]}, ValueError, "'labels': 4"),
        ({**batch, "labels": batch["labels"].to("meta")}, ValueError, "labels is on meta"),
        ({**batch, "past_key_values": [batch["labels"]]}, TypeError, "past_key_values is a list"),
        ({**batch, "use_cache": True}, ValueError, "use_cache=True"),
        ({"input_ids": batch["input_ids"]}, ValueError, "no loss"),
    ]
    for inputs, kind, message in bad:
        with pytest.raises(kind, match=message):
            wrapped.run_train(**inputs)
    with pytest.raises(RuntimeError, match="run_train"):
        wrapped(**batch)
    assert wrapped.run_train(**batch) is None or rank == 1


def wrap_on_meta(rank: int) -> None:
    start(2)
    with torch.device("meta"):
        model = make("llama")
    wrapped = NxDPPModel(model, num_microbatches=2)
    assert len(list(wrapped.local_parameters())) in (19, 20)
    with pytest.raises(RuntimeError, match=r"on the meta device .* move_model_to_device\(\)"):
        wrapped.run_train(**padded_batch(4))
    wrapped.move_model_to_device()
    wrapped.run_train(**padded_batch(4))


def test_wrapping_needs_initialize_model_parallel() -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        NxDPPModel(make("llama"))


def test_other_parameters_are_freed_and_bad_inputs_refused() -> None:
    """Parameters of other stages are freed, and what is refused changes nothing."""
    run_in_turn(2, free, refuse_inputs, wrap_on_meta)
