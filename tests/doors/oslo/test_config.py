"""The configuration of ``nxdpp.oslo.initialize``: a dict or a JSON file, each key honoured or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import nxdpp.oslo as oslo
from nxdpp.doors.oslo.config import tensor_parallel_size_of
from tests.doors.oslo.training import gpt2

TENSOR = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}


def test_sizes(tmp_path: Path) -> None:
    assert tensor_parallel_size_of({"model_parallelism": {"enable": True}}) == 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TENSOR))
    for config in (TENSOR, path, str(path)):
        assert tensor_parallel_size_of(config) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_parallelism": {"enable": True, "tp": 2}}, "unknown key 'tp': its keys are enable, tensor_parallel"),
        ({"model_parallelism": {"tensor_parallel_size": 2}}, 'no "enable": true, so tensor_parallel_size=2 would do'),
        ({"model_parallelism": {"enable": True, "pipeline_parallel_size": 2}}, r"size=2 is not .* nxdpp\.NxDPPModel"),
        ({"activation_checkpointing": {"enable": True}}, r"call gradient_checkpointing_enable\(\) of the model"),
        ({"kernel_fusion": {"enable": True}}, r"kernel_fusion=.* call compile\(\) of the model after initialize"),
    ],
)
def test_refused_values(config: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tensor_parallel_size_of(config)


def test_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=2 is not honoured: .* give it to nxdpp\.NxDPPModel"):
        oslo.initialize(gpt2(), TENSOR, num_microbatches=2)
