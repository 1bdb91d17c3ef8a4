"""Gradients of shards that stay whole on a replica, and replicas of shards that a program has made different."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.shards.local_tensors import local_rows
from tests.support.models import VOCABULARY, llama
from tests.support.run_ranks import run_ranks
from tests.support.whole_numbers import state_of

Numbers = dict[str, torch.Tensor]


def wrapped(seed: int = 0, **layout: Any) -> Any:
    parallel_state.initialize_model_parallel(**layout, hang_timeout=60)
    torch.manual_seed(seed)
    bare: Any = llama(2).double()
    if parallel_state.get_tensor_model_parallel_size() > 1:
        bare = nxdpp.tensor_parallelize(bare)
    model = NxDPPModel(bare, num_microbatches=2)
    return nxdpp.fully_shard(model)


def ids_of(number: int, replica: int, rows: int = 4) -> torch.Tensor:
    """The batch of a replica in a step."""
    return torch.randint(0, VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(10 * number + replica))


def step(model: Any, number: int, rows: int = 4) -> None:
    ids = ids_of(number, parallel_state.get_data_parallel_rank(), rows)
    model.run_train(input_ids=ids, labels=ids)


def gradients(model: Any) -> Numbers:
    found = {name: each for name, each in state_of(model).items() if name.startswith("gradient of ")}
    model.zero_grad()
    return found


def _change_one_element(model: Any) -> None:
    for parameter in model.local_parameters():
        if (rows := local_rows(parameter.grad).view(-1)).numel():
            rows[-1] += 1.0


def _freeze_layer(model: Any) -> None:
    last = max(name for name, _ in model.local_named_parameters() if ".layers." in name).split(".self_attn")[0]
    for name, parameter in model.local_named_parameters():
        parameter.requires_grad_(last not in name)


def in_one_process() -> Numbers:
    """Gradients of the whole batches of steps 1 and 2."""
    torch.manual_seed(0)
    alone: Any = llama(2).double()
    replicas = parallel_state.get_data_parallel_size()
    for number in (1, 2):
        ids = torch.cat([ids_of(number, replica) for replica in range(replicas)])
        alone(input_ids=ids, labels=ids).loss.backward()
    return {f"gradient of {name}": each.grad for name, each in alone.named_parameters()}


def keep(rank: int, layout: dict[str, int]) -> list[float]:
    """Train steps in ``no_sync()``; return how far each way is from the gradients that it must have."""
    model = wrapped(**layout)
    model.names = {id(parameter): name for name, parameter in model.local_named_parameters()}
    step(model, 2)
    second = gradients(model)
    with model.no_sync():
        step(model, 1)
    step(model, 2)
    both = gradients(model)
    alone = in_one_process()
    assert max((both[name] - alone[name]).abs().max().item() for name in both) < 1e-14
    # A call that is refused leaves them.
    with model.no_sync():
        step(model, 1)
    with pytest.raises(ValueError, match="a batch of 3"):
        step(model, 2, rows=3)
    step(model, 2)
    found = [(gradients(model), both)]
    # The sample of a gradient, 1,024 of its elements, misses some of them.
    model.zero_grad()
    for change in (_change_one_element, _freeze_layer):
        with model.no_sync():
            step(model, 1)
        change(model)
        with pytest.raises(RuntimeError, match=r"was (changed|frozen) after a step in no_sync.*or call zero_grad\(\)"):
            step(model, 2)
        for parameter in model.local_parameters():
            parameter.requires_grad_(True)
        model.zero_grad()
        step(model, 2)
        found.append((gradients(model), second))
    # What was frozen in no_sync() has gradients of the later step, as in one process.
    for parameter in model.local_parameters():
        parameter.requires_grad_("layers.0" not in model.names[id(parameter)])
    with model.no_sync():
        step(model, 1)
    for parameter in model.local_parameters():
        parameter.requires_grad_(True)
    step(model, 2)
    found.append((gradients(model), {n: second[n] if "layers.0" in n else both[n] for n in both}))
    return [max((ours[name] - theirs[name]).abs().max().item() for name in theirs) for ours, theirs in found]


def step_in_no_sync(rank: int, layout: dict[str, int]) -> float:
    """Step after ``no_sync()``, and as the message says; return how far the gradients are from plain accumulation."""
    model = wrapped(**layout)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.0)
    step(model, 1)
    step(model, 2)
    both = gradients(model)
    for _ in range(2):
        with model.no_sync():
            step(model, 1)
        before = [local_rows(parameter).clone() for parameter in model.local_parameters()]
        with pytest.raises(RuntimeError, match=r"a step of SGD would leave out .*last batch .* outside of no_sync\(\)"):
            optimizer.step()
        assert all(map(torch.equal, before, map(local_rows, model.local_parameters())))
        optimizer.zero_grad()
        optimizer.step()
    with model.no_sync():
        step(model, 1)
    step(model, 2)
    optimizer.step()
    found = gradients(model)
    return max((found[name] - both[name]).abs().max().item() for name in both)


def keep_and_step(rank: int) -> list[float]:
    found = keep(rank, {})
    parallel_state.destroy_model_parallel()
    return [*found, step_in_no_sync(rank, {})]


def test_gradients_of_no_sync_wait_for_the_step_that_reduces_them() -> None:
    """A step of the optimizer without them is refused."""
    for rank in run_ranks(2, keep_and_step):
        assert max(rank) < 1e-15, rank


def _load_on_one(model: Any) -> None:
    if parallel_state.get_data_parallel_rank():
        model.load_state_dict(llama(2).double().state_dict())


def _change_a_copy(model: Any) -> None:
    if parallel_state.get_tensor_model_parallel_rank():
        local_rows(model.get_parameter("model.norm.weight")).add_(1.0)


DIFFERENT: dict[str, tuple[int, dict[str, int], Callable[[Any], None], str]] = {
    "loads": (2, {}, _load_on_one, "loads of state dicts: none"),
    "copies": (4, {"tensor_model_parallel_size": 2}, _change_a_copy, "the first is model.norm.weight"),
}


def differ(rank: int, name: str) -> None:
    _, layout, change, _ = DIFFERENT[name]
    model = wrapped(**layout)
    if name != "copies":
        step(model, 1)
    change(model)
    for number in range(2, 5):
        step(model, number)


@pytest.mark.parametrize("name", DIFFERENT)
def test_replicas_that_differ_are_found(name: str) -> None:
    ranks, _, _, words = DIFFERENT[name]
    with pytest.raises(AssertionError, match=words):
        run_ranks(ranks, differ, name)


def train_over_seeds(rank: int, path: Path, kinds: tuple[str, ...]) -> None:
    """Wrap models of different seeds, shard them, load the weights of one process and train."""
    for kind in kinds:
        model = wrapped(rank, pipeline_model_parallel_size=2)
        if kind == "pretrained":
            nxdpp.load_pretrained(model, path / kind)
        elif kind == "checkpoint":
            nxdpp.load_checkpoint(path, "one", model)
        step(model, 1)
        parallel_state.destroy_model_parallel()


def test_initial_weights_of_other_seeds_are_told_unless_weights_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)  # the seed of rank 0, whose loaded weights are then its initial ones
    bare = llama(2).double()
    bare.save_pretrained(tmp_path / "pretrained")
    nxdpp.save_checkpoint(tmp_path, "one", bare)
    run_ranks(2, train_over_seeds, tmp_path, ("pretrained", "checkpoint"))
    with pytest.raises(AssertionError, match="have built the model with different initial weights"):
        run_ranks(2, train_over_seeds, tmp_path, ("none",))


class SharingLayer(nn.Module):
    """A layer in a reentrant checkpoint, which uses a module that all layers share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.own(self.shared(x).tanh())
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._body(x)
        out: torch.Tensor = recomputed(self._body, x, use_reentrant=True)
        return out


class Sharing(nn.Module):
    """Layers that share a module."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(SharingLayer(shared) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_gradients_that_come_late_are_refused() -> None:
    parallel_state.initialize_model_parallel()
    try:
        bare = Sharing()
        model = NxDPPModel(bare, num_microbatches=2, transformer_layer_cls=SharingLayer, output_loss_value_spec=True)
        nxdpp.fully_shard(model)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model.run_train(x=torch.ones(4, 8))
    finally:
        parallel_state.destroy_model_parallel()
