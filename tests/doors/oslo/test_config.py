"""The configuration of ``nxdpp.oslo.initialize``: a dict or a JSON file, each key honoured or refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxdpp.doors.oslo.config import OsloConfig

TENSOR = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}}


def test_sizes() -> None:
    config = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 4}}
    assert OsloConfig.of(config) == OsloConfig(2, 4)
    assert OsloConfig.of(TENSOR) == OsloConfig(2, 1)
    assert OsloConfig.of({"model_parallelism": {"enable": True}}) == OsloConfig()


def test_a_file_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TENSOR))
    assert OsloConfig.of(path) == OsloConfig.of(str(path)) == OsloConfig.of(TENSOR)


def test_checkpointing() -> None:
    keys = {"enable": True, "cpu_checkpointing": True, "partitioned_checkpointing": True}
    expected = OsloConfig(2, 1, checkpoints=True, to_cpu=True, partitions=True)
    assert OsloConfig.of({**TENSOR, "activation_checkpointing": keys}) == expected
    keys["contiguous_checkpointing"] = True
    expected = dataclasses.replace(expected, contiguous=True)
    assert OsloConfig.of({**TENSOR, "activation_checkpointing": keys}) == expected


def test_fusion() -> None:
    assert OsloConfig.of({**TENSOR, "kernel_fusion": {"enable": True}}) == OsloConfig(2, fuses=True)
    keys = {"enable": True, "memory_efficient_fusion": True, "custom_cuda_kernels": ["FusedNoRepeatNGram"]}
    expected = OsloConfig(fuses=True, fuses_model=True, kernels=("FusedNoRepeatNGram",))
    assert OsloConfig.of({"kernel_fusion": keys}) == expected


def test_what_is_off_is_taken() -> None:
    off = {
        "model_parallelism": {"enable": False, "tensor_parallel_size": 1},
        "activation_checkpointing": {"enable": False, "contiguous_checkpointing": False},
        "kernel_fusion": {"enable": False, "custom_cuda_kernels": []},
    }
    assert OsloConfig.of(off) == OsloConfig()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "the configuration is empty"),
        ({"deployment": {}}, "unknown section 'deployment': its sections are model_parallelism"),
        ({"model_parallelism": {"enable": True, "tp": 2}}, "unknown key 'tp': its keys are enable, tensor_parallel"),
        ({"model_parallelism": {"enable": True, "tensor_parallel_size": 0}}, "tensor_parallel_size is 0: it must"),
        ({"model_parallelism": {"tensor_parallel_size": 2}}, 'no "enable": true, so tensor_parallel_size=2 would do'),
        ({"model_parallelism": {"enable": False, "pipeline_parallel_size": 2}}, "pipeline_parallel_size=2 would do"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing=True would do nothing"),
        (
            {**TENSOR, "activation_checkpointing": {"enable": True, "contiguous_checkpointing": True}},
            'add "partitioned_checkpointing": true, or leave it out',
        ),
        (
            {"activation_checkpointing": {"enable": True, "partitioned_checkpointing": True}},
            "tensor_parallel_size is 1: leave it out",
        ),
        (
            {**TENSOR, "kernel_fusion": {"enable": True, "memory_efficient_fusion": True}},
            "leave it out, or these two sections",
        ),
        (
            {"activation_checkpointing": {"enable": True}}
            | {"kernel_fusion": {"enable": True, "memory_efficient_fusion": True}},
            "leave it out, or these two sections",
        ),
        (
            {"kernel_fusion": {"enable": True, "custom_cuda_kernels": ["FusedGELU"]}},
            "names 'FusedGELU': the kernels are FusedRMSNorm and FusedNoRepeatNGram",
        ),
        (
            {"kernel_fusion": {"custom_cuda_kernels": ["FusedRMSNorm"]}},
            r"custom_cuda_kernels=\['FusedRMSNorm'\] would do nothing",
        ),
    ],
)
def test_refused_values(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OsloConfig.of(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "must be a dict or the path of a JSON file, not None"),
        ({"model_parallelism": True}, '"model_parallelism" must be a dict of enable'),
        ({"model_parallelism": {"enable": 1}}, "enable must be true or false, not 1"),
        ({"model_parallelism": {"enable": True, "tensor_parallel_size": "2"}}, "must be a whole number, not '2'"),
        ({"model_parallelism": {"enable": True, "tensor_parallel_size": True}}, "must be a whole number, not True"),
        ({"kernel_fusion": {"custom_cuda_kernels": True}}, "must be a list of names, FusedRMSNorm or FusedNoRepeat"),
    ],
)
def test_refused_types(config: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        OsloConfig.of(config)


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OsloConfig.of(tmp_path / "missing.json")
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON file"):
        OsloConfig.of(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json is no JSON file: 'utf-8' codec"):
        OsloConfig.of(path)
    path.write_text('{"model_parallelism": {"enable": true, "enable": false}}')
    with pytest.raises(ValueError, match="the key 'enable' is there twice"):
        OsloConfig.of(path)
    path.write_text("[]")
    with pytest.raises(TypeError, match=r"config\.json has a list"):
        OsloConfig.of(path)


def test_the_import_needs_no_torch() -> None:
    code = "import sys, nxdpp.oslo; print({'torch', 'transformers'} & set(sys.modules), dir(nxdpp.oslo))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert printed == "set() ['initialize']\n"
