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
    sizes: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**{**sizes, "decoder_start_token_id": 0}))


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


CASES = (("llama", 1), ("tied_llama", 1), ("t5", 2))
"""Model, and stages on each rank."""


def materialise(name: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        wrapped = NxDPPModel(make(name), num_microbatches=4)
    torch.manual_seed(3)
    wrapped.materialise()
    return {**dict(wrapped.local_named_parameters()), **dict(wrapped.local_named_buffers())}


def on_a_real_rank(rank: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return [describe(name, False, chunks) for name, chunks in CASES], materialise("tied_llama")


def test_each_debug_rank_holds_the_part_and_the_initial_values_of_the_real_rank() -> None:
    ranks = run_ranks(2, on_a_real_rank)
    assert [bool(part["ties"]) for part in ranks[0][0]] == [False, True, True]
    for rank, (parts, values) in enumerate(ranks):
        parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=2)
        for (name, chunks), part in zip(CASES, parts, strict=True):
            for on_meta in (False, True):
                assert describe(name, on_meta, chunks) == part
        ours = materialise("tied_llama")
        assert list(ours) == list(values)
        assert all(torch.equal(value, values[key]) for key, value in ours.items())
        parallel_state.destroy_model_parallel()
    assert not dist.is_initialized()


def wrap(**arguments: Any) -> NxDPPModel:
    parallel_state.initialize_debug(pipeline_model_parallel_rank=1, pipeline_model_parallel_size=2)
    return NxDPPModel(make("llama"), num_microbatches=4, **arguments)


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


def test_what_needs_other_processes_is_refused(tmp_path: Path) -> None:
    wrapped, batch = wrap(), padded_batch(4)
    for method, step in ((wrapped.run_train, "a training step"), (wrapped.run_eval, "an evaluation")):
        with pytest.raises(RuntimeError, match=rf"^{step} needs the processes.*debug mode.*rank 1 of 2.*torchrun"):
            method(**batch)
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match=r'^partition="profiled" needs the processes.*debug mode'):
        wrap(partition="profiled", partition_batch=padded_batch(1))
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match=r"^trace_file_path needs the processes.*debug mode"):
        wrap(trace_file_path=str(tmp_path / "trace.json"))
    assert not list(tmp_path.iterdir())
