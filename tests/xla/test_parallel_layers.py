"""Tensor-parallel layers on two XLA ranks: outputs, gradients and initial values of two CPU ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.layer_norm import LayerNorm
from nxdpp.tensor.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy
from nxdpp.tensor.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.tensor.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxdpp.tensor.sequence_parallel import allreduce_sequence_parallel_gradients
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, executions, run_xla_ranks

SIZE, INNER, VOCABULARY = 8, 12, 10
Tensors = dict[str, torch.Tensor]
Mapping = Callable[[torch.Tensor], torch.Tensor]


def _random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _own(whole: torch.Tensor, dim: int) -> torch.Tensor:
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size, dim)[rank]


def _run(module: Any, given: torch.Tensor) -> Tensors:
    """Output, gradients and values of ``module`` on the rank's device."""
    device = parallel_state.local_device()
    if isinstance(module, nn.Module):
        module = module.to(device)
    given = given.to(device, copy=True)
    if given.is_floating_point():
        given.requires_grad_()
    output = module(given)
    outputs = list(output) if isinstance(output, tuple) else [output]
    weights = [_random(*each.shape, seed=5 + index).to(device) for index, each in enumerate(outputs)]
    total = sum((each.float() * weight).sum() for each, weight in zip(outputs, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    total.backward()
    found = {f"output {index}": each for index, each in enumerate(outputs)}
    if given.grad is not None:
        found["input's gradient"] = given.grad
    if isinstance(module, nn.Module):
        allreduce_sequence_parallel_gradients(module.parameters())
        for name, parameter in module.named_parameters():
            found[name] = parameter
            if parameter.grad is not None:
                found[f"{name}'s gradient"] = parameter.grad
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _layer(kind: Callable[..., nn.Module], *sizes: Any, given: torch.Tensor, **options: Any) -> Tensors:
    torch.manual_seed(1)
    return _run(kind(*sizes, **options), given)


class _Gated(nn.Module):
    """A norm, two column-parallel layers with one input, and a row-parallel layer; (B, S, H)."""

    def __init__(self) -> None:
        super().__init__()
        split: dict[str, Any] = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
        self.norm = LayerNorm(SIZE, sequence_parallel_enabled=True)
        self.up = ColumnParallelLinear(SIZE, INNER, gather_output=False, **split)
        self.gate = ColumnParallelLinear(SIZE, INNER, bias=False, gather_output=False, **split)
        self.down = RowParallelLinear(INNER, SIZE, input_is_parallel=True, **split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        y: torch.Tensor = x + self.down(self.up(hidden).relu_() * self.gate(hidden))
        return y


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = _Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.gated, x, use_reentrant=False)
        return y


def _masks_of_recomputed_layer() -> list[torch.Tensor]:
    """Masks that a layer with a collective between them draws, in its forward and again in its backward.

    Numbers that were drawn before the layer, since the last end of a graph, do not matter.
    """
    device = parallel_state.local_device()
    model_parallel_xla_manual_seed(7)
    masks = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        hidden = mappings.reduce_from_tensor_model_parallel_region(hidden)
        hidden = functional.dropout(hidden + 1, 0.5)
        masks.append(hidden.detach() != 0)
        with get_xla_rng_tracker().fork():
            hidden = functional.dropout(hidden + 1, 0.5)
            masks.append(hidden.detach() != 0)
            hidden = mappings.reduce_from_tensor_model_parallel_region(hidden)
            hidden = functional.dropout(hidden + 1, 0.5)
            masks.append(hidden.detach() != 0)
        hidden = functional.dropout(hidden + 1, 0.5)
        masks.append(hidden.detach() != 0)
        return hidden * hidden

    hidden = functional.dropout(torch.ones(64, device=device, requires_grad=True))
    output = checkpoint(layer, hidden + 1, use_reentrant=False)
    torch.rand(3, device=device)
    output.sum().backward()
    return [mask.cpu() for mask in masks]


def _cross_entropy() -> Tensors:
    labels = torch.randint(VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(2))
    labels[1, 2] = -100
    labels = labels.to(parallel_state.local_device())
    return _run(lambda logits: parallel_cross_entropy(logits, labels, 0.1), _own(_random(3, 4, VOCABULARY), -1))


def _linears() -> dict[str, Callable[[], Tensors]]:
    x = _random(4, 6, SIZE)
    row = partial(_layer, RowParallelLinear, INNER, SIZE)
    column = partial(_layer, ColumnParallelLinear, SIZE, INNER)
    embedding = partial(_layer, ParallelEmbedding, VOCABULARY, SIZE, given=torch.arange(8).view(2, 4) % VOCABULARY)
    qkv = partial(_layer, GQAQKVColumnParallelLinear, SIZE, [16, 4], kv_size_multiplier=2)
    return {
        "column on its device": lambda: column(given=x, device=parallel_state.local_device()),
        "column, not gathered": partial(column, given=x, gather_output=False, stride=3),
        "column of sequences": partial(column, given=_own(x, 0), sequence_parallel_enabled=True),
        "row": partial(row, given=_random(4, 6, INNER)),
        "row of parts": lambda: row(given=_own(_random(4, 6, INNER), -1), input_is_parallel=True),
        "row of sequences": lambda: row(
            given=_own(_random(4, 6, INNER), -1), input_is_parallel=True, sequence_parallel_enabled=True
        ),
        "embedding": embedding,
        "embedding of sequences": partial(embedding, sequence_parallel_enabled=True, sequence_dimension=1),
        "query, key, value, gathered": partial(qkv, given=x),
        "query, key, value of sequences": lambda: qkv(given=_own(x, 0), sequence_parallel_enabled=True),
        "gated, of sequences": lambda: _layer(_Gated, given=_own(x, 1)),
        "recomputed": lambda: _layer(_Recomputed, given=_own(x, 1)),
        "cross-entropy, smoothed": _cross_entropy,
    }


def _mappings() -> dict[str, Callable[[], Tensors]]:
    x = _random(4, 6, SIZE)
    by_dimension: list[Mapping] = [
        partial(function, sequence_dimension=dim)
        for dim in (0, 1)
        for function in (
            mappings.scatter_to_sequence_parallel_region,
            mappings.gather_from_sequence_parallel_region,
            partial(mappings.gather_from_sequence_parallel_region, to_model_parallel=False),
            mappings.reduce_scatter_to_sequence_parallel_region,
        )
    ]
    functions: list[Mapping] = [
        mappings.copy_to_tensor_model_parallel_region,
        mappings.reduce_from_tensor_model_parallel_region,
        mappings.scatter_to_tensor_model_parallel_region,
        mappings.gather_from_tensor_model_parallel_region,
        *by_dimension,
    ]
    return {f"mapping {index}": partial(_of_rank, each, x) for index, each in enumerate(functions)}


def _of_rank(mapping: Mapping, x: torch.Tensor) -> Tensors:
    # In place, as an activation may be.
    return _run(lambda given: mapping(given * 1).mul_(2), x + parallel_state.get_tensor_model_parallel_rank())


def _cases(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, device=device)
    found: dict[str, Any] = {name: case() for name, case in {**_mappings(), **_linears()}.items()}
    if device is not None:
        found["graphs"] = _graphs()
        found["outside"] = _outside()
        found["masks"] = _masks_of_recomputed_layer()
    parallel_state.destroy_model_parallel()
    return found


def _graphs() -> dict[str, list[int]]:
    """Compilations and runs of graphs of a forward and backward of the gated layers, by repetition."""
    device = parallel_state.local_device()
    graphs: dict[str, list[int]] = {"compiled": [], "run": []}
    torch.manual_seed(1)
    model = nn.Sequential(_Gated(), _Gated()).to(device)
    for step in range(4):
        x = _random(4, 3, SIZE, seed=step).to(device)
        with compilations(graphs["compiled"]), executions(graphs["run"]):
            model(x).square().sum().backward()
            allreduce_sequence_parallel_gradients(model.parameters())
            for parameter in model.parameters():
                assert parameter.grad is not None
            torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).cpu()
        model.zero_grad()
    return graphs


def _outside() -> list[bool]:
    """Return which results of ids and labels in and outside of the vocabulary are not-a-number."""
    device = parallel_state.local_device()
    embedded = ParallelEmbedding(VOCABULARY, SIZE).to(device)(torch.tensor([1, VOCABULARY, -1], device=device))
    logits = _own(_random(3, VOCABULARY), -1).to(device)
    losses = parallel_cross_entropy(logits, torch.tensor([1, VOCABULARY, -1], device=device))
    return [*embedded.isnan().any(-1).tolist(), *losses.isnan().tolist()]


def test_two_ranks_equal_two_ranks_of_the_cpu() -> None:
    on_cpu, on_xla = run_ranks(2, _cases, None), run_xla_ranks(2, _cases, "xla")
    for expected, found in zip(on_cpu, on_xla, strict=True):
        graphs, outside, masks = (found.pop(name) for name in ("graphs", "outside", "masks"))
        assert expected.keys() == found.keys()
        for case, tensors in expected.items():
            assert tensors.keys() == found[case].keys(), case
            for name, tensor in tensors.items():
                ours = found[case][name]
                assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype), (case, name)
                assert torch.allclose(ours, tensor, rtol=1e-5, atol=1e-5), (case, name, ours, tensor)
        assert graphs["compiled"][2:] == [0, 0]
        # A collective ends a graph, if there were operations before it.
        assert graphs["run"][2:] == [14, 14]
        assert outside == [False, True, True] * 2
        first, again = masks[:4], masks[4:]
        assert len({tuple(mask.tolist()) for mask in first}) == len(again) == 4
        assert all(map(torch.equal, first, again))
