"""Steps over XLA ranks, one table of models, schedules and settings: the numbers of the CPU and of one XLA process.

No graph is compiled after the second step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.backward import structure
from nxdpp.pipeline.backward.split import SplitBackward
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks
from tests.xla.models import MICROBATCHES, gradients_of_one_process, t5, tiny_llama, tokens

# Graphs of a rank's first step: forward with a check of its mask, two backwards, the mean loss, its broadcast.
_GRAPHS = 6
_STEPS = 4

_CSV = [
    ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"],
    ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
]


class _Layer(nn.Module):
    """A layer with buffers that its forward changes in place, one of which it returns beside its value."""

    decay: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("decay", torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, 8) and the buffer (8)."""
        self.decay.mul_(0.9).add_(0.1 * x.detach().square().mean(0))
        self.seen.mul_(0.5).add_(0.1 * seen + 1)
        return self.norm(self.linear(x)) * self.decay.clone(), self.seen


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        seen = torch.zeros(8, device=x.device)
        for layer in self.layers:
            x, seen = layer(x, seen)
        return (x * seen).square().mean() / 10


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, 8)."""
        y: torch.Tensor = self.linear(x)
        return y.tanh()


class _Detached(nn.Module):
    """A model whose loss depends on the first of its values by way of a skip over stages, not by way of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        first = self.layers[0](x)
        x = self.layers[1](first)
        y: torch.Tensor = self.layers[3](self.layers[2](x.detach()) + first)
        return y.square().mean()


class _Skips(_Detached):
    """A model whose first value is used on all stages."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        first = self.layers[0](x)
        x = first
        for layer in list(self.layers)[1:]:
            x = layer(x + first)
        loss: torch.Tensor = (x * first).square().mean()
        return loss


@dataclass(frozen=True)
class _Case:
    """A model, the arguments of its wrapper, and the inputs of a step by its number.

    ``alone`` compares with a process alone.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Mapping[str, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = ""
    on_device: bool = False
    alone: bool = False
    settled: int = 1


def _ids(step: int, length: int = 16) -> dict[str, torch.Tensor]:
    ids = tokens(step, length=length)
    return {"input_ids": ids, "labels": ids}


def _uneven(step: int) -> dict[str, torch.Tensor]:
    """Inputs of a microbatch without labels, and of others with different numbers of them."""
    ids = tokens(step)
    labels = ids.clone()
    labels[2:4] = -100
    labels[4:6, :7] = -100
    return {"input_ids": ids, "labels": labels}


def _rows(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(32, 8, generator=torch.Generator().manual_seed(step))}


def _llama() -> nn.Module:
    return tiny_llama(4)


def _seeded(model: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return model()

    return make


def _mixtral() -> nn.Module:
    model: Any = make("mixtral")
    # The others, grouped_mm and eager, do not run on XLA devices, or compile anew for each routing.
    model.set_experts_implementation("batched_mm")
    return model  # type: ignore[no-any-return]


def _padded(step: int) -> dict[str, torch.Tensor]:
    """Eight rows of ten tokens, some of them padded."""
    return padded_batch(8, seed=step)


_LLAMA: dict[str, Any] = {"transformer_layer_cls": LlamaDecoderLayer}
_CASES = {
    **{
        name: _Case(
            _llama,
            _ids,
            _LLAMA | {"schedule": name, "virtual_pipeline_size": 2 if name == "interleaved" else 1},
            alone=True,
        )
        for name in FAMILIES
    },
    "gpt2": _Case(partial(make, "gpt2"), _padded, alone=True),
    "t5": _Case(t5, _padded, alone=True),
    "mixtral": _Case(_mixtral, _padded, alone=True),
    "tied": _Case(partial(make, "tied_llama"), _padded),
    "inputs on the device": _Case(_llama, _ids, _LLAMA, on_device=True),
    "tokens": _Case(_llama, _uneven, _LLAMA | {"loss_normalization": "tokens"}),
    "items without labels": _Case(
        _llama,
        _uneven,
        _LLAMA
        | {
            "loss_normalization": "tokens",
            "count_items_fn": lambda inputs: int((inputs["labels"][:, 1:] != -100).sum()),
        },
    ),
    "frozen": _Case(_llama, _ids, _LLAMA, frozen="model.layers.2"),
    "shapes": _Case(_llama, lambda step: _ids(step, 16 if step % 2 else 8), _LLAMA, settled=2),
    "freed outputs": _Case(_llama, _ids, _LLAMA | {"deallocate_pipeline_outputs": True}),
    "written": _Case(_llama, _ids, _LLAMA | {"schedule": _CSV}),
    "buffers": _Case(_seeded(_Buffers), _rows, {"transformer_layer_cls": _Layer, "input_names": ["x"]}),
    "detached": _Case(_seeded(_Detached), _rows, {"transformer_layer_cls": _Linear, "input_names": ["x"]}),
    "skips": _Case(
        _seeded(_Skips), _rows, {"transformer_layer_cls": _Linear, "input_names": ["x"], "schedule": "zb-v"}
    ),
}


def _run_all(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    if device is not None:
        with pytest.raises(ValueError, match=r"set_experts_implementation\('batched_mm'\)"):
            NxDPPModel(make("mixtral"), num_microbatches=1)
    return {name: _run(case) for name, case in _CASES.items()} | {"evaluation": _evaluate()}


def _run(case: _Case) -> dict[str, Any]:
    module = case.model()
    for name, parameter in module.named_parameters():
        parameter.requires_grad = not (case.frozen and name.startswith(case.frozen))
    model = NxDPPModel(module, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **case.arguments)
    model.move_model_to_device()
    # A gradient of rounding alone would be a whole step with the default of eps.
    optimizer = torch.optim.AdamW(list(model.local_parameters()), lr=1e-3, eps=1e-3)
    in_steps, in_optimizer = list[int](), list[int]()
    losses = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        inputs = case.inputs(step)
        if case.on_device:
            inputs = {name: value.to(parallel_state.local_device()) for name, value in inputs.items()}
        with compilations(in_steps):
            loss = model.run_train(**inputs)
        assert isinstance(loss, torch.Tensor)
        losses.append(loss.cpu())
        own = {name: None if p.grad is None else p.grad.cpu() for name, p in model.local_named_parameters()}
        gradients |= {f"{step} {name}": gradient for name, gradient in own.items() if gradient is not None}
        with compilations(in_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    # torch_xla's batch norm keeps the variance of the batch without the correction for its size.
    buffers = {name: b.cpu() for name, b in model.local_named_buffers() if not name.endswith("running_var")}
    found = {"losses": losses, "gradients": gradients, "buffers": buffers}
    if case.alone:
        alone = gradients_of_one_process(case.model(), case.inputs(0), parallel_state.local_device())
        found["alone"] = {f"0 {name}": alone[name] for name in own if name in alone}
    return found | {"compiled": in_steps, "in optimizer": in_optimizer}


def _evaluate() -> dict[str, Any]:
    model = NxDPPModel(
        _llama(), transformer_layer_cls=LlamaDecoderLayer, num_microbatches=4, broadcast_and_average_loss=True
    )
    model.move_model_to_device()
    model.eval()
    compiled: list[int] = []
    losses, outputs = [], []
    for step in range(3):
        with compilations(compiled):
            loss = model.run_eval(**_ids(step))
            output = model.run_eval(input_ids=tokens(step))
        losses.append(loss.cpu())
        outputs.append(None if output is None else output.logits.cpu())
    return {"losses": losses, "outputs": outputs, "compiled": compiled}


def test_steps_give_the_numbers_of_the_cpu_and_of_one_process() -> None:
    on_cpu = run_ranks(2, _run_all, None, timeout=500)
    on_xla = run_xla_ranks(2, _run_all, "xla", timeout=900)
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        for name, known in cpu.items():
            found = xla[name]
            for kind in known.keys() & {"losses", "gradients", "buffers", "outputs"}:
                _check_close(found[kind], known[kind], f"{name}: {kind}")
            _check_alone(found, name)
            settled = _CASES[name].settled if name in _CASES else 1
            assert not any(found["compiled"][settled:]), (name, found["compiled"])
            assert not any(found.get("in optimizer", [])[2:]), name
        # As many as with inputs in host memory: no slice of the inputs is a graph.
        assert xla["inputs on the device"]["compiled"][0] <= _GRAPHS


def _split(rank: int) -> dict[str, Any]:
    """Train as a torch that shows the hooks of saved tensors: weight-gradients are computed by calls of nodes."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    deferred: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "unpack_hook", lambda saved: None)
        weight_gradients = SplitBackward.weight_gradients

        def counted(split: SplitBackward) -> None:
            deferred.append(sum(len(work.split_nodes) for work in split._work or ()))
            weight_gradients(split)

        patch.setattr(SplitBackward, "weight_gradients", counted)
        return {name: _run(_CASES[name]) for name in ("zb-h1", "zb-v")} | {"deferred": deferred}


def test_split_backwards_have_the_gradients_of_one_process() -> None:
    for found in run_xla_ranks(2, _split, timeout=300):
        assert any(found.pop("deferred"))
        for name, of_schedule in found.items():
            _check_alone(of_schedule, name)
            assert not any(of_schedule["compiled"][1:]), name


def _check_alone(found: dict[str, Any], name: str) -> None:
    for parameter, gradient in found.get("alone", {}).items():
        own = found["gradients"][parameter]
        _check_close(own, gradient, f"{name}: {parameter} alone", 1e-6)


def _check_close(found: Any, known: Any, name: str, distance: float = 1e-5) -> None:
    torch.testing.assert_close(found, known, rtol=0, atol=distance, msg=lambda message: f"{name}: {message}")
