"""The configuration of ``nxdpp.oslo.initialize``: a dict or a JSON file, each key honoured or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import nxdpp.oslo as oslo
from nxdpp.doors.oslo.config import tensor_parallel_size_of
from tests.doors.oslo.training import THEIR_CONFIGURATIONS, gpt2

TENSOR = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}


def test_sizes(tmp_path: Path) -> None:
    assert tensor_parallel_size_of({"model_parallelism": {"enable": True}}) == 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TENSOR))
    for config in (TENSOR, path, str(path)):
        assert tensor_parallel_size_of(config) == 2


def test_what_is_off_is_taken() -> None:
    off = {
        "model_parallelism": {"enable": False, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "activation_checkpointing": {"enable": False, "contiguous_checkpointing": False},
        "kernel_fusion": {"enable": False, "custom_cuda_kernels": []},
    }
    assert tensor_parallel_size_of(off) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "must be a dict or the path of a JSON file, not None"),
        ({"model_parallelism": {"enable": True, "tensor_parallel_size": "2"}}, "must be a whole number, not '2'"),
        ({}, "the configuration is empty"),
        ({"deployment": {}}, "unknown section 'deployment': give model_parallelism"),
        ({"model_parallelism": {"enable": True, "tp": 2}}, "unknown key 'tp': its keys are enable, tensor_parallel"),
        ({"model_parallelism": {"enable": True, "tensor_parallel_size": 0}}, "tensor_parallel_size is 0: it must"),
        ({"model_parallelism": {"tensor_parallel_size": 2}}, 'no "enable": true, so tensor_parallel_size=2 would do'),
        ({"model_parallelism": {"enable": True, "pipeline_parallel_size": 2}}, r"size=2 is not .* nxdpp\.NxDPPModel"),
        (THEIR_CONFIGURATIONS["activation_checkpointing"], r"call gradient_checkpointing_enable\(\) of the model"),
        (THEIR_CONFIGURATIONS["kernel_fusion"], r"kernel_fusion=.* call compile\(\) of the model after initialize"),
    ],
)
def test_refused_values(config: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tensor_parallel_size_of(config)


def test_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=2 is not honoured: .* give it to nxdpp\.NxDPPModel"):
        oslo.initialize(gpt2(), TENSOR, num_microbatches=2)


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tensor_parallel_size_of(tmp_path / "missing.json")
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON file"):
        tensor_parallel_size_of(path)
    path.write_text('{"model_parallelism": {"enable": true, "enable": false}}')
    with pytest.raises(ValueError, match="the key 'enable' is there twice"):
        tensor_parallel_size_of(path)
