"""transformers' interface of experts over ranks: another implementation in a pipeline, and ours outside of one."""

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface, apply_expert_parallelism

from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.experts.layer import DividedExperts
from tests.experts.test_steps import _apart, _gradients
from tests.support.expert_models import batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks


class _Counting(AllToAllEP):
    calls = 0

    def __call__(self, *args: Any) -> Any:
        _Counting.calls += 1
        return super().__call__(*args)  # type: ignore[no-untyped-call]


def _another(rank: int) -> dict[str, float]:
    """Differences of a step whose tokens another implementation brings."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    EPImplementationInterface.register("counting", _Counting)
    model = make("mixtral", 2)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model, ep_implementation="counting"), num_microbatches=2)
    batches = [batch_of(each, 4) for each in range(2)]
    step_of_one_process(whole, batches, 2)
    wrapped.run_train(**batches[parallel_state.get_data_parallel_rank()])
    assert _Counting.calls == 2
    found = _apart(_gradients(wrapped, whole))
    # The implementation that is kept by module keeps no model alive.
    kept = weakref.ref(next(each for each in wrapped.local_modules() if isinstance(each, DividedExperts)))
    del wrapped, model
    gc.collect()
    assert kept() is None
    return found


def test_another_implementation_takes_our_place() -> None:
    assert run_ranks(4, _another) == [{}] * 4


def _without_pipeline(rank: int) -> dict[str, float]:
    """Differences of gradients of a model that transformers divides, whose tokens ours brings."""
    parallel_state.initialize_model_parallel()
    model = make("mixtral", 2)
    whole = copy.deepcopy(model)
    group = dist.group.WORLD
    assert group is not None
    alone = dist.new_group([rank], use_local_synchronization=True)
    experts, tokens = (DeviceMesh.from_group(each, parallel_state.local_device().type) for each in (group, alone))
    modules = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    parameters = [f"{name}.{each}" for name in modules for each in ("gate_up_proj", "down_proj")]
    plan = dict.fromkeys(parameters, "grouped_gemm") | dict.fromkeys(modules, "ep_dispatch_experts")
    apply_expert_parallelism(model, experts, tokens, plan, "nxdpp")
    batches = [batch_of(each, 2) for each in range(2)]
    model(**batches[rank]).loss.backward()
    for batch in batches:
        whole(**batch).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            ours, theirs = parameter.grad.to_local(), whole.get_parameter(name).grad.chunk(2)[rank]
            found[name] = float((ours - theirs).abs().max())
    assert len(found) == 4
    return _apart(found)


def test_ours_is_registered() -> None:
    assert run_ranks(2, _without_pipeline) == [{}] * 2


def _divided_by_transformers(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, backend="gloo")
    config = DistributedConfig(fsdp_size=2, ep_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    before = dict(model.named_parameters())
    message = r"divided by transformers.* ep_size=2\. Load it without.*expert_model_parallel_size=2\)"
    for divide in (expert_parallelize, partial(NxDPPModel, num_microbatches=2)):
        with pytest.raises(ValueError, match=message):
            divide(model)
    assert all(before[name] is each for name, each in model.named_parameters())


def test_a_model_that_transformers_has_divided_is_refused(tmp_path: Path) -> None:
    make("mixtral", 1).save_pretrained(tmp_path)
    run_ranks(2, _divided_by_transformers, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="ep_implementation='deep' is not registered: give one of 'auto', 'all_to_all'"
    ):
        expert_parallelize(make("mixtral", 1), ep_implementation="deep")
