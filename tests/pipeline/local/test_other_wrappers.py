"""Models in wrappers of other runtimes: refused, with a remedy that is followed here."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nxdpp import NxDPPModel
from tests.support.models import make, padded_batch

pytestmark = pytest.mark.usefixtures("one_rank")

BATCH = padded_batch(4)


@pytest.fixture
def new_accelerator() -> Iterator[None]:
    """Let accelerate forget the settings of other tests in this process, and of this one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def llama() -> Any:
    return make("llama", layers=2)


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def refused(model: nn.Module) -> str:
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"\S") as caught:
        NxDPPModel(model, num_microbatches=2)
    assert [name for name, _ in model.named_parameters()] == names
    return str(caught.value)


def sharded_layer(model: Any) -> Any:
    fully_shard(model.model.layers[0], mesh=mesh())
    return model


def wrapped_layer(model: Any) -> Any:
    model.model.layers[1] = nn.DataParallel(model.model.layers[1])
    return model


REFUSED: list[tuple[Callable[[Any], Any], list[str]]] = [
    (
        DistributedDataParallel,
        ["the model, a DistributedDataParallel, runs its module as a whole", "give the module inside: model.module"],
    ),
    (
        wrapped_layer,
        ["model.layers.1, a DataParallel, runs its module", "put its .module in the place of model.layers.1"],
    ),
    (sharded_layer, ["model.layers.0, a FSDPLlamaDecoderLayer, has parameters that FSDP shards"]),
    (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        [
            "the model, a FullyShardedDataParallel, has parameters that FSDP shards",
            "Build the model again without fully_shard",
        ],
    ),
    (
        lambda model: torch.compile(model, backend="eager"),
        ["torch.compile was given the model", "(._orig_mod), and compile its layers afterwards: nxdpp.apply_compile("],
    ),
    (
        lambda model: NxDPPModel(model, num_microbatches=2),
        ["the model, a NxDPPModel, is a pipeline already. Use it as it is (run_train), or build the model"],
    ),
]


def test_models_in_other_wrappers_are_refused() -> None:
    for wrap, texts in REFUSED:
        message = refused(wrap(llama()))
        assert all(text in message for text in texts), message


@pytest.mark.usefixtures("new_accelerator")
def test_other_wrappers_around_the_wrapped_model() -> None:
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    with pytest.raises(RuntimeError, match=r"leave it out\. Gradients are averaged over the data-parallel replicas"):
        DistributedDataParallel(wrapped)
    for compiles in (partial(torch.compile, wrapped, backend="eager"), partial(wrapped.compile, backend="eager")):
        with pytest.raises(RuntimeError, match=r"Call nxdpp.apply_compile\(model\) in its place"):
            compiles()
    with pytest.raises(RuntimeError, match=r"FSDP would shard this rank's stages.*Leave it out"):
        fully_shard(wrapped, mesh=mesh())
    with pytest.raises(RuntimeError, match="a pipelined model cannot be called"):
        nn.DataParallel(wrapped)(**BATCH)
    with pytest.raises(TypeError, match=r"cannot be pickled.*torch.save\(model.local_state_dict\(\), file\)"):
        torch.save(wrapped, io.BytesIO())
    torch.save(wrapped.local_state_dict(), io.BytesIO())
    wrapped.run_train(**BATCH)

    with pytest.raises(RuntimeError, match=r"FSDP would shard this rank's stages.*Leave it out"):
        FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"))
    wrapped.run_train(**BATCH)
    sharded: Any = NxDPPModel(llama(), num_microbatches=2)
    FullyShardedDataParallel(sharded.local_module, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"a LocalModule, is in a wrapper of data parallelism.* Leave the wrapper"):
        sharded.run_train(**BATCH)
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    with pytest.raises(AttributeError, match=r"never run.*out of accelerate's prepare\(\), and call run_train under"):
        Accelerator(cpu=True, mixed_precision="bf16").prepare(wrapped)
    with torch.autocast("cpu", torch.bfloat16):
        wrapped.run_train(**BATCH)


def wrap_first_layer(wrapped: Any) -> None:
    layers = wrapped.local_module.model.layers
    layers.add_module("0", DistributedDataParallel(layers.get_submodule("0")))


def test_wrappers_of_local_layers() -> None:
    text = r"model.layers.0, a \w+, is in a wrapper of data parallelism"
    with pytest.raises(RuntimeError, match=text):
        NxDPPModel(llama(), num_microbatches=2, post_partition_hooks=[wrap_first_layer])
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    # In a later step too, and between a move and the step.
    wrapped.run_train(**BATCH)
    wrapped.move_model_to_device()
    wrap_first_layer(wrapped)
    with pytest.raises(RuntimeError, match=rf"{text}.* Leave the wrapper out: run_train averages the gradients"):
        wrapped.run_train(**BATCH)
