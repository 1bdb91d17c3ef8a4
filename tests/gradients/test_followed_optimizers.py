"""Optimizers made before a model is divided or cut."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GPT2Config, GPT2LMHeadModel

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.gradients import replaced_parameters
from nxdpp.gradients.followed_optimizers import followed_by_optimizers


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Leave the objects of earlier tests out of the collection after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Other tests of the same process may hold replaced parameters.
    monkeypatch.setattr(replaced_parameters, "_replaced", WeakIdKeyDictionary())
    monkeypatch.setattr(replaced_parameters, "_step_check", None)
    yield
    parallel_state.destroy_model_parallel()
    gc.collect()
    assert not replaced_parameters._let_pass
    assert len(replaced_parameters._replaced) == 0


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def unused(model: nn.Module) -> None:
    """Enter a block, which must be refused."""
    with followed_by_optimizers(model):
        raise AssertionError("the block must not run")


def held(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    return [group["params"] for group in optimizer.param_groups]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def test_parts_take_the_places_of_whole_parameters() -> None:
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    model = gpt2()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    first = {name: parameter.shape for name, parameter in model.named_parameters()}
    whole = weakref.ref(model.get_parameter("transformer.h.0.mlp.c_fc.weight"))
    names = [[n for n, p in model.named_parameters() if p.dim() > 1], [n for n, p in model.named_parameters()]]
    names[1] = [name for name in names[1] if name not in names[0]]
    with followed_by_optimizers(model):
        tensor_parallelize(model)
    now = dict(model.named_parameters())
    assert [[id(each) for each in group] for group in held(optimizer)] == [[id(now[n]) for n in g] for g in names]
    assert now["transformer.h.0.mlp.c_fc.weight"].shape != first["transformer.h.0.mlp.c_fc.weight"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    gc.collect()
    assert whole() is None
    torch.stack([each.sum() for each in model.parameters()]).sum().backward()
    optimizer.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    assert all(state["exp_avg"].shape == each.shape for each, state in optimizer.state.items())


def test_parameters_of_other_stages_leave_their_groups() -> None:
    parallel_state.initialize_debug(pipeline_model_parallel_size=2, pipeline_model_parallel_rank=1)
    model = gpt2()
    layers = list(model.transformer.h)
    embedding = model.transformer.wpe.weight
    optimizer = torch.optim.SGD(
        [
            {"params": [embedding], "lr": 0.1},
            {"params": list(layers[0].parameters()), "lr": 0.2},
            {
                "params": [*layers[1].parameters(), *model.transformer.ln_f.parameters(), model.lm_head.weight],
                "lr": 0.3,
            },
        ]
    )
    kept = list(layers[1].parameters())
    other = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [other], "lr": 0.4})
    freed = weakref.ref(model.get_parameter("transformer.h.0.mlp.c_fc.weight"))
    del layers, embedding
    with followed_by_optimizers(model):
        wrapped = NxDPPModel(model, num_microbatches=1, input_names=["input_ids", "labels"])
    assert [len(group) for group in held(optimizer)] == [0, 0, len(kept) + 3, 1]
    assert all(a is b for a, b in zip(held(optimizer)[2], kept, strict=False))
    assert held(optimizer)[2][-1] is model.lm_head.weight
    assert {id(each) for each in wrapped.local_parameters()} == set(map(id, held(optimizer)[2]))
    gc.collect()
    assert freed() is None
    for each in wrapped.local_parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()


def test_an_optimizer_that_has_stepped_is_refused_before_anything_changes() -> None:
    parallel_state.initialize_debug(tensor_model_parallel_size=2)
    model = gpt2()
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.stack([each.sum() for each in model.parameters()]).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW, has stepped.* Make it after the model is divided or cut"):
        unused(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert len(held(optimizer)[0]) == len(before)


def rename(model: nn.Linear) -> None:
    with followed_by_optimizers(model):
        del model.weight
        model.inner = nn.Linear(2, 2)


def fail(model: nn.Linear) -> None:
    with followed_by_optimizers(model):
        model.bias = nn.Parameter(torch.zeros(2))
        raise KeyError("half way")


def test_an_optimizer_is_not_left_with_old_parameters_in_silence() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"weight, which an optimizer holds, is gone, and inner\.weight is new"):
        rename(model)
    with pytest.raises(KeyError):
        fail(model)
    with pytest.raises(RuntimeError, match=r"SGD, holds 1 parameter that is not this rank's \(bias is"):
        optimizer.step()
