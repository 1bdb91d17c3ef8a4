"""``apply_compile`` of tensor-parallel layers: the numbers of the same layers that are not compiled."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from nxdpp import NxDPPModel, apply_checkpoint, apply_compile, parallel_state, tensor_parallelize
from nxdpp.devices.collective_bytes import sent_bytes
from nxdpp.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxdpp.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.pipeline.layer_compilation import compile_modules, compiled_modules
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.tensor.utils import local_slice
from tests.support.models import llama, padded_batch
from tests.support.run_ranks import run_ranks
from tests.support.tensor_parallel_models import Model, ParallelLayer, ParallelModel

VOCABULARY = 64


class GroupedLayer(nn.Module):
    """Query, key and value heads that ranks share, an activation and a row-parallel layer."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.qkv = GQAQKVColumnParallelLinear(8, [8, 4], gather_output=False, kv_size_multiplier=copies)
        self.out = RowParallelLinear(8, 8, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x)
        repeated = torch.cat([key + value] * (query.shape[-1] // key.shape[-1]), -1)
        changed: torch.Tensor = x + self.out(query.sigmoid() * repeated)
        return changed


class Grouped(nn.Module):
    """Layers with shared heads under a gathered head."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(GroupedLayer(copies) for _ in range(2))
        self.head = ColumnParallelLinear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


class FeedForward(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(self.up(x).relu())
        return changed


class Short(nn.Module):
    """A model of which torch compiles only the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList([FeedForward()])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def divisible() -> Any:
    return llama(2, vocab_size=VOCABULARY)


class Case(NamedTuple):
    """A model of this rank, and the class of its layers where it is not found."""

    model: Callable[[], Any]
    layer: type[nn.Module] | None = None

    def wrap(self, **arguments: Any) -> Any:
        torch.manual_seed(0)
        model = self.model()
        return NxDPPModel(model, transformer_layer_cls=self.layer, **{"num_microbatches": 2, **arguments})

    def batch(self, length: int = 10) -> dict[str, torch.Tensor]:
        batch = padded_batch(4, length)
        return batch if self.layer is None else {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


CASES = {
    "llama": Case(lambda: tensor_parallelize(divisible())),
    "llama, sequence": Case(lambda: tensor_parallelize(divisible(), sequence_parallel=True)),
    "layers": Case(lambda: ParallelModel(2, VOCABULARY, False), ParallelLayer),
    "layers, sequence": Case(lambda: ParallelModel(2, VOCABULARY, True), ParallelLayer),
    "grouped": Case(lambda: Grouped(2), GroupedLayer),
}

# Gradients of aot_eager differ by roundings in torch 2.9, in one process too: of float32, or two of bfloat16.
ROUNDINGS, HALF_ROUNDINGS = (1e-6, 2**-7) if torch.__version__.startswith("2.9.") else (0.0, 0.0)
SHORT = Case(Short, FeedForward)
DEEP = Case(lambda: ParallelModel(4, VOCABULARY, True), ParallelLayer)


class Pair:
    """Two models of a case, one of them compiled."""

    def __init__(self, case: Case, backend: str = "aot_eager", **arguments: Any) -> None:
        self.case = case
        self.eager, self.compiled = case.wrap(**arguments), case.wrap(**arguments)
        apply_compile(self.compiled, backend=backend)

    def check(self, length: int = 10, tolerance: float = ROUNDINGS, messages: bool = False) -> Any:
        """A step of both has equal losses and gradients, and as many collectives. Return the compiled model's loss."""
        batch = self.case.batch(length)
        losses: list[Any] = []
        sent: list[tuple[float, int]] = []
        for model in (self.eager, self.compiled):
            model.zero_grad()
            with sent_bytes() as counted:
                losses.append(model.run_train(**batch))
            sent.append((counted.total, counted.steps))
        assert not messages or sent[0] == sent[1], sent
        assert losses[0] is None or torch.equal(*losses) or tolerance
        for (name, parameter), other in zip(
            self.eager.local_named_parameters(), self.compiled.local_parameters(), strict=True
        ):
            expected, found = parameter.grad, other.grad
            assert (found - expected).abs().max() <= tolerance * expected.abs().max(), name
        return losses[1]


def codes() -> int:
    return int(counters["stats"]["unique_graphs"])


def one_of_each(names: Iterable[str], backend: str = "aot_eager", tolerance: float = ROUNDINGS) -> dict[str, Pair]:
    pairs = {}
    for name in names:
        counters.clear()
        pairs[name] = Pair((CASES | {"short": SHORT})[name], backend)
        # The first step traces the model without values.
        for is_counted in (False, True):
            pairs[name].check(tolerance=tolerance, messages=is_counted)
        assert not counters["graph_break"], (name, counters["graph_break"])
    return pairs


def modes(llamas: Pair, layers: Pair) -> None:
    """Evaluation, changing lengths, autocast and recomputation."""
    for model in (llamas.eager, llamas.compiled):
        model.eval()
    assert torch.equal(*[model.run_eval(**llamas.case.batch()) for model in (llamas.eager, llamas.compiled)])
    for model in (llamas.eager, llamas.compiled):
        model.train()
    llamas.check()
    kept = [child.siblings.in_graph for child in llamas.compiled.modules() if "siblings" in vars(child)]
    assert kept == [()] * 10
    found = [codes()]
    for length in (12, 14, 16):
        layers.check(length)
        found.append(codes())
    # One of each class: embedding, layer, norm and head.
    assert 0 < found[1] - found[0] <= 4, found
    assert found[1:] == [found[1]] * 3, found
    compare_with_one_process(layers)
    with torch.autocast(torch.empty(0).device.type, torch.bfloat16):
        layers.check(tolerance=HALF_ROUNDINGS)
    apply_checkpoint(layers.compiled)
    layers.check()


def compare_with_one_process(layers: Pair) -> None:
    """The compiled ranks and the compiled modules of one process differ by rounding."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    torch.manual_seed(0)
    whole = Model(2, VOCABULARY)
    compile_modules(compiled_modules(whole.named_children()), {"backend": "aot_eager"})
    loss = layers.check()
    expected = whole(**layers.case.batch())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in layers.compiled.local_named_parameters():
        theirs = whole.get_parameter(name).grad
        assert theirs is not None
        if (dim := getattr(parameter, "partition_dim", -1)) >= 0:
            theirs = local_slice(theirs, dim, rank, 2, parameter.partition_stride)
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-5, atol=1e-6)


def over_two_ranks(rank: int, names: Sequence[str]) -> None:
    parallel_state.initialize_model_parallel(2, 1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    pairs = one_of_each(names)
    modes(*(pairs[name] for name in names[:2]))


@pytest.mark.cpu_only("the compiler does not follow the mode of these ranks that puts tensors on the device")
@pytest.mark.parametrize(
    "names",
    [
        ("llama", "layers"),
        pytest.param(("llama, sequence", "layers, sequence", "grouped"), marks=pytest.mark.sweep),
    ],
)
def test_compiled_ranks_have_the_numbers_of_eager_ones(names: Sequence[str]) -> None:
    run_ranks(2, over_two_ranks, names)


def by_inductor(rank: int) -> None:
    parallel_state.initialize_model_parallel(2, 1)
    one_of_each([*CASES, "short"], "inductor", 1e-5)


@pytest.mark.sweep
def test_inductor_has_the_numbers_of_eager_ranks_to_rounding() -> None:
    run_ranks(2, by_inductor)


def run_families(names: tuple[str, ...]) -> None:
    for name in names:
        chunks = FAMILIES[name].default_chunks
        pair = Pair(DEEP, num_microbatches=4, schedule=name, virtual_pipeline_size=chunks)
        for step in range(2):
            pair.check(10 + 2 * step)


def over_four_ranks(rank: int, names: tuple[str, ...]) -> None:
    parallel_state.initialize_model_parallel(2, 2)
    run_families(names)


@pytest.mark.sweep
def test_all_families() -> None:
    run_ranks(4, over_four_ranks, tuple(FAMILIES))
