"""Checks of the arguments of the constructor and of a step."""

import logging
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline import arguments
from nxdpp.pipeline.config import PipelineConfig
from tests.support.models import make
from tests.support.run_ranks import run_ranks
from tests.support.traced_models import PlainModel


class Tracer(fx.Tracer):
    """A tracer class of a user."""


@pytest.mark.parametrize("count", [0, -2, 1.0, "2", None, True, np.True_, np.float32(2)])
def test_invalid_numbers_of_microbatches(count: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"num_microbatches={re.escape(repr(count))} must be a whole number of at least 1"
    ):
        arguments.check_number_of_microbatches(count)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"num_microbatches": np.int64(4), "virtual_pipeline_size": np.uint8(2)}
    config = PipelineConfig(PlainModel(), **given, partition_memory_limit=np.int32(5))  # type: ignore[arg-type]
    numbers = (config.num_microbatches, config.virtual_pipeline_size, config.partition_memory_limit)
    assert numbers == (4, 2, 5)
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize("name", ["last", True, None])
def test_invalid_times_of_checks_of_inputs(name: Any) -> None:
    with pytest.raises(ValueError, match=r"check_inputs=.* must be 'first', 'always' or 'never'"):
        PipelineConfig(PlainModel(), check_inputs=name).check()


def test_options_of_the_returned_loss_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="return_mb_loss=True and broadcast_and_average_loss=True exclude each other"):
        arguments.check_loss_returns(True, True)
    for either in ((True, False), (False, True), (False, False)):
        arguments.check_loss_returns(*either)


@pytest.mark.parametrize("tracer", [None, "hf", "torch", fx.Tracer, Tracer])
def test_valid_tracers(tracer: Any) -> None:
    arguments.check_tracer(tracer)


@pytest.mark.parametrize("tracer", ["huggingface", "", 3, Tracer(), nn.Module])
def test_invalid_tracers(tracer: Any) -> None:
    with pytest.raises(ValueError, match=r"tracer_cls=.* must be 'hf', 'torch', or a subclass of torch\.fx\.Tracer"):
        arguments.check_tracer(tracer)


@pytest.mark.parametrize("wrong", [3, "sqrt", nn.Linear, nn.Linear(1, 1)])
def test_invalid_functions_and_python_modules(wrong: Any) -> None:
    message = r"{} takes Python functions and Python modules \(import math; \[math\]\), not"
    with pytest.raises(TypeError, match=message.format("autowrap_functions")):
        arguments.check_wraps([math.sqrt, wrong], ())
    with pytest.raises(TypeError, match=message.format("autowrap_modules")):
        arguments.check_wraps((), [math, wrong])


def test_functions_and_modules_may_be_in_either_list() -> None:
    """The API guide prints ``autowrap_functions: Tuple[ModuleType]`` and ``autowrap_modules: Tuple[Callable]``."""
    function = torch.relu
    arguments.check_wraps([function, math], [math, function])
    config = PipelineConfig(PlainModel(), autowrap_functions=(math,), autowrap_modules=(function, torch))
    options = config.tracing_options()
    assert (options.autowrap_functions, options.autowrap_modules) == ((function,), (math, torch))


def test_methods_of_objects_are_refused() -> None:
    arguments.check_obj_methods({})
    with pytest.raises(ValueError, match=r"autowrap_obj_methods=.*which parameters a method reads.*leaf_module_cls"):
        arguments.check_obj_methods({"model": ["forward"]})


def wrap_few(rank: int, ranks: int) -> list[list[str]]:
    """Wrap models with fewer microbatches than ranks, and with enough; return the warnings."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    found = []
    for microbatches in (1, 2 * ranks):
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, own=messages: own.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("nxdpp.pipeline.arguments").addHandler(handler)
        NxDPPModel(make("llama", layers=4), num_microbatches=microbatches)
        logging.getLogger("nxdpp.pipeline.arguments").removeHandler(handler)
        found.append(messages)
    return found


@pytest.mark.parametrize(("ranks", "idle", "then"), [(2, 50, 20), (4, 75, 27)])
def test_rank_0_warns_of_idle_ranks(ranks: int, idle: int, then: int) -> None:
    first, *others = run_ranks(ranks, wrap_few, ranks)
    assert others == [[[], []]] * (ranks - 1)
    (message,), enough = first
    assert message.startswith(f"num_microbatches=1 on {ranks} pipeline ranks: a rank waits for others in {idle} %")
    assert f"to {2 * ranks} or more" in message
    assert message.endswith(f"it is {then} %.")
    assert not enough
