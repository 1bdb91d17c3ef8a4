"""Hooks that change a rank's part: loss and gradients equal those of one process with the same change."""

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, deferred_init, load_pretrained, parallel_state
from tests.pipeline.in_turn import run_in_turn
from tests.support.models import gradient_differences, make, padded_batch, reference, train_in_one_process

Change = Callable[[nn.Module], None]
Place = Callable[[NxDPPModel], nn.Module]

# Gradients of a tied weight are summed in another order.
TIED = {"model.embed_tokens.weight", "lm_head.weight", "lm_head.base.weight"}


class Adapted(nn.Module):
    """A linear layer with a low-rank addition and a buffer; the tracer does not know this class."""

    scale: torch.Tensor

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) / 8)
        self.register_buffer("scale", torch.tensor(0.5))
        base.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale  # type: ignore[no-any-return]


def replace(tree: nn.Module, ending: str, make_new: Callable[[Any, str], nn.Module]) -> None:
    for name, module in list(tree.named_modules()):
        if name.endswith(ending) and type(module) is not nn.Module:
            owner, _, key = name.rpartition(".")
            setattr(tree.get_submodule(owner), key, make_new(module, name))


def adapt_layers(tree: nn.Module) -> None:
    for name, parameter in tree.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    replace(tree, "q_proj", Adapted)
    replace(tree, "down_proj", Adapted)


def adapt_head(tree: nn.Module) -> None:
    replace(tree, "lm_head", Adapted)
    for name, parameter in tree.named_parameters(remove_duplicate=False):
        if name in TIED:
            parameter.requires_grad_(True)


def local(model: NxDPPModel) -> nn.Module:
    return model.local_module


def whole_model(model: NxDPPModel) -> nn.Module:
    return model.original_module


def compare(rank: int, name: str, change: Change, place: Place) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = make(name, layers=2)
    whole = reference(model)
    change(whole)
    wrapped = NxDPPModel(model, num_microbatches=2, post_partition_hooks=[lambda wrapped: change(place(wrapped))])
    wrapped.move_model_to_device()
    names = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in wrapped.local_named_parameters()} <= names
    for seed in range(2):
        loss: Any = wrapped.run_train(**padded_batch(4, seed=seed))
        expected = torch.stack(train_in_one_process(whole, padded_batch(4, seed=seed), 2)).mean()
        assert rank == 0 or torch.equal(loss, expected)
    differences = gradient_differences(wrapped, whole)
    tied = TIED if name == "tied_llama" else set()
    assert all(n in tied and distance is not None and distance < 1e-6 for n, distance in differences.items())
    # Other inputs need a new trace.
    batch = padded_batch(4, length=6)
    del batch["attention_mask"]
    evaluated = wrapped.run_eval(**batch)
    with torch.no_grad():
        expected = torch.stack([whole(**{n: v.chunk(2)[i] for n, v in batch.items()}).loss for i in range(2)]).mean()
    assert rank == 0 or torch.equal(evaluated, expected)


def adapt(tree: nn.Module) -> None:
    adapt_layers(tree)
    adapt_head(tree)


def adapt_on_meta(rank: int, directory: str, built: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole = reference(make("tied_llama", layers=2))
    adapt(whole)
    hooks: list[Any] = [lambda wrapped: adapt(wrapped.local_module)]
    if built == "deferred":
        model = deferred_init(make, "tied_llama", layers=2)
    else:
        with torch.device("meta"):
            model = make("tied_llama", layers=2)
        model.tie_weights()
        hooks.insert(0, lambda wrapped: load_pretrained(wrapped, directory))
    wrapped = NxDPPModel(model, num_microbatches=2, post_partition_hooks=hooks)
    wrapped.move_model_to_device()
    wrapped.run_train(**padded_batch(4))
    train_in_one_process(whole, padded_batch(4), 2)
    differences = gradient_differences(wrapped, whole)
    assert all(n in TIED and distance is not None and distance < 1e-6 for n, distance in differences.items())


def break_it(model: NxDPPModel) -> None:
    raise ArithmeticError("the hook broke")


def take_away(model: NxDPPModel) -> None:
    inner: Any = model.local_module.get_submodule("model")
    delattr(inner, "embed_tokens" if model.rank == 0 else "norm")


def resize_tie(model: NxDPPModel) -> None:
    for name in ("model.embed_tokens", "lm_head"):
        replace(model.local_module, name, lambda *_: nn.Embedding(7, 32))


WRONG: list[tuple[Any, type[Exception], str]] = [
    (take_away, RuntimeError, r"model\.(embed_tokens|norm) was taken away"),
    (resize_tie, RuntimeError, r"is tied over the pipeline ranks \[0, 1\] and was replaced by one of \[7, 32\]"),
]


def refuse(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for hook, kind, message in WRONG:
        with pytest.raises(kind, match=message):
            NxDPPModel(make("tied_llama", layers=2), post_partition_hooks=[hook])
    with pytest.raises(TypeError, match="must be a list of functions"):
        NxDPPModel(make("llama"), post_partition_hooks=print)  # type: ignore[arg-type]
    called: list[Any] = []
    with pytest.raises(ArithmeticError, match="the hook broke") as caught:
        NxDPPModel(
            make("llama", layers=2), post_partition_hooks=[called.append, functools.partial(break_it), called.append]
        )
    assert caught.value.__notes__ == [f"raised by post_partition_hooks[1], break_it, on pipeline rank {rank}"]
    assert len(called) == 1
    model = make("llama", layers=2)
    before = dict(model.named_parameters())
    with pytest.raises(TypeError, match=r"post_partition_hooks\[0\] is 7, which cannot be called"):
        NxDPPModel(model, post_partition_hooks=[7])  # type: ignore[list-item]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


# A tie matters to changes of the tied weight.
CASES: list[tuple[str, Change, Place]] = [
    ("llama", adapt_layers, local),
    ("tied_llama", adapt_head, local),
    ("tied_llama", adapt_head, whole_model),
]


def test_changes_train_as_in_one_process(tmp_path: Path) -> None:
    make("tied_llama", layers=2).save_pretrained(tmp_path)
    run_in_turn(
        2,
        *((compare, *case) for case in CASES),
        *((adapt_on_meta, str(tmp_path), built) for built in ("deferred", "meta")),
        refuse,
    )
