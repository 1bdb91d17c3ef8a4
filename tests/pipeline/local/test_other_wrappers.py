"""Models in wrappers of other runtimes: refused, with a remedy that is followed here."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from nxdpp import NxDPPModel
from nxdpp.integrations import PipelineTrainer
from tests.support.models import make, padded_batch, reference, train_in_one_process

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


def trains_exactly(model: nn.Module, **arguments: Any) -> None:
    """Train a step of ``model``, which has the parameters of ``llama()``, and compare it with one process."""
    whole = reference(llama())
    wrapped = NxDPPModel(model, num_microbatches=2, **arguments)
    wrapped.run_train(**BATCH)
    train_in_one_process(whole, BATCH, 2)
    expected = dict(whole.named_parameters())
    for name, parameter in wrapped.local_named_parameters():
        gradient = expected[name.replace("_orig_mod.", "")].grad
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def refused(model: nn.Module) -> str:
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"\S") as caught:
        NxDPPModel(model, num_microbatches=2)
    assert [name for name, _ in model.named_parameters()] == names
    return str(caught.value)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, nn.DataParallel])
def test_data_parallel_wrappers(wrapper: Any) -> None:
    model = wrapper(llama())
    message = refused(model)
    assert f"the model, a {wrapper.__name__}, runs its module as a whole" in message
    assert "give the module inside: model.module" in message
    trains_exactly(model.module)


class _OwnDataParallel(DistributedDataParallel):
    """A class of the user."""


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, _OwnDataParallel])
def test_a_data_parallel_wrapper_around_the_wrapped_model(wrapper: Any) -> None:
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    with pytest.raises(RuntimeError, match=r"leave it out\. Gradients are averaged over the data-parallel replicas"):
        wrapper(wrapped)
    assert not hasattr(wrapped, "_other")
    wrapped.run_train(**BATCH)


@pytest.mark.usefixtures("new_accelerator")
def test_a_trainer_of_the_wrapped_model(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    settings = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **arguments)
    rows = [{name: rows[i] for name, rows in BATCH.items()} for i in range(4)]
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    with pytest.raises(RuntimeError, match=r"PipelineTrainer\(model, args, \.\.\.\) instead, not wrapped"):
        Trainer(wrapped, settings, train_dataset=rows)
    wrapped.run_train(**BATCH)

    trained = PipelineTrainer(llama(), settings, train_dataset=rows).train()

    assert trained.global_step == 1


@pytest.mark.usefixtures("new_accelerator")
def test_other_wrappers_around_the_wrapped_model() -> None:
    wrapped = NxDPPModel(llama(), num_microbatches=2)
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

    compiled = llama()
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    trains_exactly(compiled)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, nn.DataParallel])
def test_a_data_parallel_wrapper_in_the_model(wrapper: Any) -> None:
    model = llama()
    model.model.layers[1] = wrapper(model.model.layers[1])
    message = refused(model)
    assert f"model.layers.1, a {wrapper.__name__}, runs its module" in message
    assert "put its .module in the place of model.layers.1" in message
    model.model.layers[1] = model.model.layers[1].module
    trains_exactly(model)


def test_fully_sharded_models() -> None:
    sharded = llama()
    fully_shard(sharded.model.layers[0], mesh=mesh())
    assert "model.layers.0, a FSDPLlamaDecoderLayer, has parameters that FSDP shards" in refused(sharded)
    whole = fully_shard(llama(), mesh=mesh())
    assert "the model, a FSDPLlamaForCausalLM, has parameters that FSDP shards" in refused(whole)
    older = FullyShardedDataParallel(llama(), device_id=torch.device("cpu"))
    message = refused(older)
    assert "the model, a FullyShardedDataParallel, has parameters that FSDP shards" in message
    assert "Build the model again without fully_shard" in message
    trains_exactly(llama())


def test_a_model_that_is_wrapped_already() -> None:
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    message = refused(wrapped)
    assert "the model, a NxDPPModel, is a pipeline already. Use it as it is (run_train), or build the model" in message
    with pytest.raises(ValueError, match="0, a NxDPPModel, is a pipeline already"):
        NxDPPModel(nn.Sequential(wrapped))
    with pytest.raises(ValueError, match="the model, a LocalModule, is a pipeline already"):
        NxDPPModel(wrapped.local_module)
    wrapped.run_train(**BATCH)
    trains_exactly(llama())


def test_a_compiled_model() -> None:
    model: Any = torch.compile(llama(), backend="eager")
    message = refused(model)
    assert "torch.compile was given the model" in message
    assert "(._orig_mod), and compile its layers afterwards: nxdpp.apply_compile(wrapped)" in message
    inside = model._orig_mod
    for i, layer in enumerate(inside.model.layers):
        inside.model.layers[i] = torch.compile(layer, backend="eager")
    trains_exactly(inside)


@pytest.mark.parametrize("place", ["", "model"])
def test_a_model_that_is_compiled_in_place(place: str) -> None:
    model = llama()
    model.get_submodule(place).compile(backend="eager")
    assert f"{place or 'the model'} was compiled in place (compile()) and holds transformer layers" in refused(model)
    model = llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    trains_exactly(model)


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
def test_wrappers_of_local_layers(wrap: str) -> None:
    def change(wrapped: NxDPPModel) -> None:
        layers: Any = wrapped.local_module.model.layers  # type: ignore[union-attr]
        layer = layers.get_submodule("0")
        if wrap == "ddp":
            layers.add_module("0", DistributedDataParallel(layer))
        else:
            fully_shard(layer, mesh=mesh())

    with pytest.raises(RuntimeError, match=r"model.layers.0, a \w+, is in a wrapper of data parallelism"):
        NxDPPModel(llama(), num_microbatches=2, post_partition_hooks=[change])
    wrapped = NxDPPModel(llama(), num_microbatches=2)
    change(wrapped)
    with pytest.raises(RuntimeError, match=r"Leave the wrapper out: run_train averages the gradients"):
        wrapped.run_train(**BATCH)
    trains_exactly(llama())
