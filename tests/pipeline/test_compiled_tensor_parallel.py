"""``apply_compile`` of tensor-parallel layers: the numbers of the same layers that are not compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from nxdpp import NxDPPModel, apply_compile, parallel_state, tensor_parallelize
from nxdpp.devices.collective_bytes import sent_bytes
from tests.support.models import llama, padded_batch
from tests.support.run_ranks import run_ranks
from tests.support.tensor_parallel_models import ParallelLayer, ParallelModel

VOCABULARY = 64


def divisible() -> Any:
    return llama(2, vocab_size=VOCABULARY)


class Case(NamedTuple):
    """A model of this rank, and the class of its layers where it is not found."""

    model: Callable[[], Any]
    layer: type[nn.Module] | None = None

    def wrap(self) -> Any:
        torch.manual_seed(0)
        return NxDPPModel(self.model(), transformer_layer_cls=self.layer, num_microbatches=2)

    def batch(self, length: int = 10) -> dict[str, torch.Tensor]:
        batch = padded_batch(4, length)
        return batch if self.layer is None else {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


LLAMA = Case(lambda: tensor_parallelize(divisible()))
LAYERS = Case(lambda: ParallelModel(2, VOCABULARY, True), ParallelLayer)

# Gradients of aot_eager differ by roundings in torch 2.9, in one process too.
ROUNDINGS = 1e-6 if torch.__version__.startswith("2.9.") else 0.0


class Pair:
    """Two models of a case, one of them compiled."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.eager, self.compiled = case.wrap(), case.wrap()
        apply_compile(self.compiled, backend="aot_eager")
        counters.clear()
        # The first step traces the model without values.
        self.check()
        self.check(messages=True)
        assert not counters["graph_break"], counters["graph_break"]

    def check(self, length: int = 10, messages: bool = False) -> Any:
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
        assert losses[0] is None or torch.equal(*losses) or ROUNDINGS
        for (name, parameter), other in zip(
            self.eager.local_named_parameters(), self.compiled.local_parameters(), strict=True
        ):
            expected, found = parameter.grad, other.grad
            assert (found - expected).abs().max() <= ROUNDINGS * expected.abs().max(), name
        return losses[1]


def codes() -> int:
    return int(counters["stats"]["unique_graphs"])


def modes(llamas: Pair, layers: Pair) -> None:
    """No memory of siblings is kept; changing lengths."""
    kept = [child.siblings.in_graph for child in llamas.compiled.modules() if "siblings" in vars(child)]
    assert kept == [()] * 10
    found = [codes()]
    for length in (12, 14):
        layers.check(length)
        found.append(codes())
    # One of each class: embedding, layer, norm and head.
    assert 0 < found[1] - found[0] <= 4, found
    assert found[2] == found[1], found


def over_two_ranks(rank: int) -> None:
    parallel_state.initialize_model_parallel(2, 1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    modes(Pair(LLAMA), Pair(LAYERS))


@pytest.mark.cpu_only("the compiler does not follow the mode of these ranks that puts tensors on the device")
def test_compiled_ranks_have_the_numbers_of_eager_ones() -> None:
    run_ranks(2, over_two_ranks)
