"""``neuronx_distributed_config``: NxD's dict with its defaults, and refusals by name."""

from collections.abc import Iterator
from typing import Any

import pytest

import nxdpp
from nxdpp import parallel_state
from nxdpp.doors.nxd.config import check_sizes
from nxdpp.trainer import neuronx_distributed_config


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def test_the_defaults_are_those_of_nxd() -> None:
    config = nxdpp.neuronx_distributed_config()

    assert parallel_state.get_pipeline_model_parallel_size() == 1
    assert config["optimizer_config"] == {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
    assert config["model_init_config"] == {
        "sequential_move_factor": 11,
        "meta_device_init": False,
        "param_init_fn": None,
    }
    assert config["mixed_precision_config"] == {
        "use_master_weights": False,
        "use_fp32_grad_acc": False,
        "use_master_weights_in_ckpt": False,
    }
    assert config["pipeline_config"] is None
    assert config["activation_checkpoint_config"] is None
    assert config["pad_model"] is False
    assert config["sequence_parallel"] is False


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context_parallel_size": 2}, ValueError, "context_parallel_size=2 is not supported"),
        ({"optimizer_config": {"zero_two": 1}}, ValueError, r"optimizer_config has \['zero_two'\]"),
        ({"optimizer_config": {"zero_one_enabled": "False"}}, TypeError, "zero_one_enabled='False' must be True or"),
        ({"pipeline_config": {"microbatches": 4}}, ValueError, r"\['microbatches'\], which NxDPPModel does not take"),
        ({"activation_checkpoint_config": "half"}, TypeError, "must be 'full', None, a class of modules"),
        ({"mixed_precision_config": {"use_master_weights_in_ckpt": True}}, ValueError, "option of ZeRO-1"),
        ({"mixed_precision_config": {"use_fp32_grad_acc": True}}, ValueError, "or leave it out"),
    ],
)
def test_options_without_a_meaning_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        neuronx_distributed_config(**options)
    assert not parallel_state.model_parallel_is_initialized()


def test_other_sizes_than_those_of_the_job_are_refused() -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(RuntimeError, match="initialized with 1 and 1: give the same"):
        neuronx_distributed_config(pipeline_parallel_size=2)
    with pytest.raises(TypeError, match="must be the result of neuronx_distributed_config"):
        check_sizes({"tensor_parallel_size": 1})
