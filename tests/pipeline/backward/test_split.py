"""Split backward: the same bits and the same work as a plain backward, and no memory held afterwards."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen  # type: ignore[import-untyped]
import yaml  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nxdpp.pipeline.backward import structure
from nxdpp.pipeline.backward.graph import AT_ONCE, BackwardAnalysis
from nxdpp.pipeline.backward.split import SplitBackward
from tests.pipeline.backward.split_and_plain import compare, forward, plain
from tests.pipeline.backward.stages_of_models import stages_of
from tests.support.models import make, padded_batch

shown_hooks = pytest.mark.skipif(not structure.HOOKS_ARE_SHOWN, reason="this torch hides hooks: nothing waits")


def batches(*shape: int, count: int = 4) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(*shape, generator=generator)] for _ in range(count)]


class Calls(nn.Module):
    """Runs a function of itself and of received values."""

    def __init__(self, function: Any, **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *values: torch.Tensor) -> Any:
        return self.function(self, *values)


def linear(seed: int = 0, size: int = 4, out: int = 4) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(size, out)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("name", ["tied_llama", "gpt2", "mixtral"])
def test_stages_of_models(name: str) -> None:
    model = make(name)
    model.config.use_cache = False
    for number, stage in enumerate(stages_of(model, [padded_batch(2, seed=seed) for seed in range(3)], 3)):
        found = compare(stage.module, stage.batches, stage.run)
        assert found.analyses == 1
        # All weights of a layer wait: at least one product for each weight and microbatch.
        if structure.HOOKS_ARE_SHOWN or number == 0:
            assert found.weight_products >= 3 * 4, number


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), x.flatten(0, -2).t() @ gradients[0].flatten(0, -2)


twice: Any = Twice.apply


def in_place_on_view(self: Any, x: torch.Tensor) -> Any:
    y = self.one(x)
    y[..., :2] += self.two(x)[..., :2]
    y[..., 2:].mul_(self.scale)
    return self.one(y)


PLAIN: dict[str, Any] = {
    "layers": lambda: nn.Sequential(linear(0), nn.GELU(), nn.LayerNorm(4), linear(1)),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear(1)),
    "in place on a view": lambda: Calls(in_place_on_view, one=linear(0), two=linear(1), scale=parameter(2)),
    "output is a view of an input": lambda: Calls(lambda m, x: (x.flatten(), m.one(x)), one=linear()),
    "no received value used": lambda: Calls(lambda m, x: m.one.weight @ m.one.bias, one=linear()),
    "used directly and not": lambda: Calls(
        lambda m, x: ((x * m.w + 1).tanh() * m.w + m.w.exp() * x) * m.w + functional.linear(x, m.w.diag(), m.w),
        w=parameter(4),
    ),
    "attention to parameters": lambda: Calls(
        lambda m, x: functional.scaled_dot_product_attention(m.q.expand(2, 1, 3, 4), m.one(x)[:, None], x[:, None]),
        q=parameter(3, 4),
        one=linear(),
    ),
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True),
    "half of it in lower precision": lambda: Calls(
        lambda m, x: m.one(x.bfloat16()).float() * m.w, one=linear().bfloat16(), w=parameter(4)
    ),
}


def test_plain_modules() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4))
    compare(module, batches(2, 3, 5, 5))
    for name, make_module in PLAIN.items():
        torch.manual_seed(0)
        assert compare(make_module(), batches(2, 3, 4)).analyses == 1, name


def in_autocast(module: Any, values: Sequence[torch.Tensor]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(*values)


def test_frozen_parameters_and_autocast() -> None:
    for frozen in (["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]):
        module = nn.Sequential(linear(0), nn.ReLU(), linear(1))
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        compare(module, batches(2, 4))
    shared = Calls(lambda m, x: m.one(m.two(m.one(x)).relu()), one=linear(0), two=linear(1))
    compare(shared, batches(2, 3, 4), in_autocast)
    # With the casts of autocast's cache, which the microbatches share.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(nn.Sequential(linear(0), linear(1)), batches(2, 3, 4), delay=2)


def recomputed(module: Any, values: Sequence[torch.Tensor]) -> Any:
    return module.last(checkpoint(module.layer, module.start(*values), use_reentrant=False))


@shown_hooks
def test_recomputes_once_under_checkpointing() -> None:
    module = Calls(None, start=linear(0), layer=nn.Sequential(linear(1), nn.Dropout(0.3), linear(2)), last=linear(3))
    runs = []
    module.get_submodule("layer.0").register_forward_hook(lambda *_: runs.append(1))
    found = compare(module, batches(2, 4, count=2), recomputed)
    # Forward and recomputation, of two microbatches, in two backwards.
    assert len(runs) == 8
    assert found.weight_products > 0
    microbatch = forward(module, batches(2, 4)[0], recomputed, 0)
    backward = SplitBackward(BackwardAnalysis(), microbatch.edges, microbatch.roots)
    backward.input_gradients(microbatch.gradients)
    immediate = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert immediate == {"layer.0.weight", "layer.0.bias", "layer.2.weight", "layer.2.bias"}


def test_hooks_run_once() -> None:
    calls: list[str] = []

    def scale(name: str, factor: int) -> Any:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return gradient * factor

        return hook

    def run(module: Any, values: Sequence[torch.Tensor]) -> Any:
        hidden = module.one(values[0])
        hidden.register_hook(scale("hidden", 2))
        result = twice(hidden, module.w)
        result.register_hook(scale("result", 3))
        return result

    def hooked() -> Any:
        module = Calls(None, one=linear(), w=parameter(4, 4))
        for name, p in module.named_parameters():
            p.register_hook(scale(f"tensor {name}", 2))
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"after {name}"))
        return module

    expected, module = hooked(), hooked()
    ((x,),) = batches(2, 3, 4, count=1)
    theirs = plain(expected, [[x]], run)
    once = sorted(calls)
    calls.clear()
    microbatch = forward(module, [x], run, 0)
    backward = SplitBackward(BackwardAnalysis(), microbatch.edges, microbatch.roots)
    (found,) = backward.input_gradients(microbatch.gradients)
    backward.weight_gradients()
    assert sorted(calls) == once
    assert found is not None
    assert torch.equal(found, theirs.received[0][0])  # type: ignore[arg-type]
    for name, p in module.named_parameters():
        assert torch.equal(p.grad, theirs.parameters[name]), name  # type: ignore[arg-type]


@shown_hooks
def test_no_memory_of_a_microbatch_is_held() -> None:
    """Between the calls only the tensors of the second call are held."""
    size = 256
    seen: dict[str, weakref.ref[Any]] = {}

    def note(name: str, x: torch.Tensor) -> torch.Tensor:
        seen[name] = weakref.ref(x.untyped_storage())
        return x

    def run(module: Any, values: Sequence[torch.Tensor]) -> Any:
        hidden = note("sigmoid", module[0](note("received", values[0])).sigmoid())
        return module[1](note("exp", (hidden * 2).exp()))

    def alive() -> set[str]:
        return {name for name, reference in seen.items() if reference() is not None}

    module = nn.Sequential(linear(0, size, size), linear(1, size, size))
    analysis = BackwardAnalysis()
    gc.disable()
    try:
        for _ in range(3):
            microbatch = forward(module, [torch.randn(size, size)], run, 0)
            seen["received tensor"] = weakref.ref(microbatch.received[0])
            backward = SplitBackward(analysis, microbatch.edges, microbatch.roots)
            gradients = [note("gradient", gradient) for gradient in microbatch.gradients]
            del microbatch
            assert alive() == {"received", "sigmoid", "exp", "gradient", "received tensor"}
            (found,) = backward.input_gradients(gradients)
            assert found is not None
            note("input gradient", found)
            del gradients, found
            # The inputs of both layers, and the gradient of the last layer's output.
            assert alive() == {"received", "exp", "gradient", "received tensor"}
            backward.weight_gradients()
            assert alive() == set()
    finally:
        gc.enable()


def test_operations_that_compute_all_gradients_at_once_are_known() -> None:
    """``AT_ONCE`` has all of torchgen's operations with one formula for several inputs and without a mask."""
    path = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
    found = set()
    for entry in yaml.safe_load(path.read_text()):
        name = entry["name"].split("(")[0].split(".")[0]
        for formulas in (entry, *entry.get("dispatch", {}).values()):
            for inputs, formula in formulas.items():
                if "," in inputs and isinstance(formula, str) and "grad_input_mask" not in formula:
                    found.add("".join(part.capitalize() for part in name.split("_")) + "Backward0")
    names = {name.lower() for name in AT_ONCE}
    assert {name for name in found if name.lower() not in names} == set()
