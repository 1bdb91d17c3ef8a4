"""Names of OSLO's tutorial and of its methods, with their arguments and defaults; docs/oslo.md has each."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import nxdpp.oslo as oslo
from nxdpp.doors.oslo.config import _KEYS, REFUSED
from nxdpp.doors.oslo.parallel_model import ParallelModel
from nxdpp.oslo.pytorch.model_parallelism.network.mpu import MPU

PAGE = (Path(__file__).parents[3] / "docs/oslo.md").read_text()
KINDS = ("data", "tensor", "pipeline", "model")
METHODS = [f"get_{kind}_parallel_{name}" for kind in KINDS for name in ("group", "rank", "world_size")]
OTHER_METHODS = (
    "get_tensor_parallel_src_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "get_pipeline_parallel_global_ranks_across_all_groups",
    "get_pipeline_model_parallel_global_ranks_per_group",
    "model_parallel_is_initialized",
    "destroy_model_parallel",
)
MAPPINGS = ("broadcast", "reduce", "scatter", "gather")


@pytest.mark.parametrize(
    ("named", "signature"),
    [
        (oslo.initialize, "(model, config, *, num_microbatches=1)"),
        (MPU, "(tensor_parallel_size=1, pipeline_parallel_size=1, master_addr=None, master_port=None)"),
        (
            ParallelModel.save_parallelized,
            "(self, save_directory, save_config=True, state_dict=None, save_function='torch.save', "
            "merge_checkpoints=False)",
        ),
        (ParallelModel.from_parallelized, "(self, load_directory)"),
        *((getattr(MPU, name), "(self)") for name in METHODS),
        *((getattr(MPU, name), "(self)") for name in OTHER_METHODS),
        *((getattr(MPU, name), "(self, inputs)") for name in MAPPINGS),
    ],
)
def test_arguments_and_defaults(named: Any, signature: str) -> None:
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default="torch.save" if parameter.default is torch.save else parameter.default,
        )
        for parameter in inspect.signature(named).parameters.values()
    ]
    assert str(inspect.Signature(parameters)) == signature
    kind = named.__name__.replace("rank", "group").replace("world_size", "group")
    assert any(text in PAGE for text in (f"`{kind}`", f"`{named.__name__}`", f"{named.__name__}("))


def test_the_page_has_each_key() -> None:
    assert all(f"`{key}`" in PAGE for key in (*_KEYS, *REFUSED))
