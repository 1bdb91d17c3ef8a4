"""Debug mode: one process builds the local part of each rank of a job."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration

from nxdpp import NxDPPModel, load_pretrained, parallel_state, save_pretrained
from tests.support.models import MODELS, make, padded_batch
from tests.support.run_ranks import run_ranks


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def build(name: str) -> Any:
    if name in MODELS:
        return make(name)
    torch.manual_seed(1234)
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes))


def describe(name: str, on_meta: bool, virtual_pipeline_size: int) -> dict[str, Any]:
    """Names, shapes and stages of the current rank's part of a model."""
    with torch.device("meta" if on_meta else "cpu"):
        model = build(name)
    wrapped = NxDPPModel(model, num_microbatches=4, virtual_pipeline_size=virtual_pipeline_size)
    return {
        "parameters": {name: parameter.shape for name, parameter in wrapped.local_named_parameters()},
        "buffers": {name: buffer.shape for name, buffer in wrapped.local_named_buffers()},
        "modules": [name for name, _ in wrapped.local_named_modules()],
        "state": list(wrapped.local_state_dict()),
        "cuts": wrapped.pipeline_cuts,
        "layers": (wrapped.layers, wrapped.stage_layers),
        "stages": (wrapped.rank, wrapped.stages, wrapped.local_stages, wrapped.holds_last_stage),
        "ties": wrapped.part.tied._weights,
    }


def on_a_real_rank(rank: int, world_size: int, name: str, virtual_pipeline_size: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    return describe(name, False, virtual_pipeline_size)


@pytest.mark.parametrize(
    ("name", "ranks", "virtual_pipeline_size"),
    [
        pytest.param("llama", 2, 1, marks=pytest.mark.sweep),
        ("llama", 2, 2),
        ("llama", 4, 1),
        pytest.param("tied_llama", 2, 1, marks=pytest.mark.sweep),
        ("tied_llama", 4, 1),
        pytest.param("t5", 2, 1, marks=pytest.mark.sweep),
        ("t5", 2, 2),
        pytest.param("t5", 4, 1, marks=pytest.mark.sweep),
    ],
)
def test_each_debug_rank_holds_the_part_of_the_real_rank(name: str, ranks: int, virtual_pipeline_size: int) -> None:
    real = run_ranks(ranks, on_a_real_rank, ranks, name, virtual_pipeline_size)
    assert bool(real[0]["ties"]) == (name != "llama")
    for on_meta in (False, True):
        for rank in range(ranks):
            parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=ranks)
            assert describe(name, on_meta, virtual_pipeline_size) == real[rank]
            parallel_state.destroy_model_parallel()
    assert not dist.is_initialized()


def wrap(**arguments: Any) -> NxDPPModel:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=1, pipeline_model_parallel_size=2)
    return NxDPPModel(make("llama"), num_microbatches=4, **arguments)


def test_a_model_is_refused_after_another_rank_freed_its_values() -> None:
    model = make("llama")
    for rank in (0, 0, 1):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=2)
        if rank == 0:
            NxDPPModel(model, num_microbatches=4)
    with pytest.raises(ValueError, match=r"^model.layers.2.self_attn.q_proj.weight had values, which were freed when"):
        NxDPPModel(model, num_microbatches=4)
    assert not model.model.embed_tokens.weight.is_meta


def test_values_are_kept_moved_and_loaded() -> None:
    whole = make("llama").state_dict()
    wrapped = wrap()
    wrapped.move_model_to_device()
    state = wrapped.local_state_dict()
    assert state
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    wrapped.load_local_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(parameter.any() for parameter in wrapped.local_parameters())


def materialise(rank: int, name: str) -> dict[str, torch.Tensor]:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    with torch.device("meta"):
        wrapped = NxDPPModel(make(name), num_microbatches=4)
    torch.manual_seed(3)
    wrapped.materialise()
    return {**dict(wrapped.local_named_parameters()), **dict(wrapped.local_named_buffers())}


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_initial_weights_are_those_of_the_real_rank(name: str) -> None:
    for rank, real in enumerate(run_ranks(2, materialise, name)):
        parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=2)
        values = materialise(rank, name)
        parallel_state.destroy_model_parallel()
        assert list(values) == list(real)
        assert all(torch.equal(value, real[key]) for key, value in values.items())


def test_a_checkpoint_is_read_but_not_written(tmp_path: Path) -> None:
    whole = make("llama")
    whole.save_pretrained(tmp_path / "read")
    parallel_state.initialize_debug(pipeline_model_parallel_rank=1, pipeline_model_parallel_size=2)
    with torch.device("meta"):
        wrapped = NxDPPModel(make("llama"), num_microbatches=4)
    load_pretrained(wrapped, tmp_path / "read")
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in wrapped.local_state_dict().items())
    with pytest.raises(RuntimeError, match=r"^save_pretrained needs the processes.*debug mode"):
        save_pretrained(wrapped, tmp_path / "written")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(("method", "step"), [("run_train", "a training step"), ("run_eval", "an evaluation")])
def test_steps_are_refused(method: str, step: str) -> None:
    wrapped = wrap()
    with pytest.raises(RuntimeError, match=rf"^{step} needs the processes.*debug mode.*rank 1 of 2.*torchrun"):
        getattr(wrapped, method)(**padded_batch(4))


def test_a_profiled_partition_is_refused() -> None:
    batch = padded_batch(1)
    with pytest.raises(RuntimeError, match=r'^partition="profiled" needs the processes.*debug mode'):
        wrap(partition="profiled", partition_batch=batch)
    parallel_state.destroy_model_parallel()
    assert len(wrap(partition="balanced", partition_batch=batch).pipeline_cuts) == 1


def test_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^trace_file_path needs the processes.*debug mode"):
        wrap(trace_file_path=str(tmp_path / "trace.json"))
    assert not list(tmp_path.iterdir())
