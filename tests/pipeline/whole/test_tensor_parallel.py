"""Tensor-parallel layers in a pipeline: hooks of gradients that ranks share under sequence parallelism."""

from typing import Any

import torch

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.tensor_parallel_models import Model, ParallelLayer, ParallelModel

LAYERS, VOCABULARY, MICROBATCHES = 4, 12, 3


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(VOCABULARY, (2 * MICROBATCHES, 4), generator=generator) for name in ("input_ids", "labels")
    }


def _wrap(module: torch.nn.Module, schedule: str, chunks: int) -> NxDPPModel:
    return NxDPPModel(
        module,
        transformer_layer_cls=ParallelLayer,
        num_microbatches=MICROBATCHES,
        virtual_pipeline_size=chunks,
        schedule=schedule,
    )


def _halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def _check_hooks(schedule: str, chunks: int) -> None:
    """Compare the gradients of norms, whose hooks are not linear, with microbatches in one process."""
    torch.manual_seed(2)
    model = _wrap(ParallelModel(LAYERS, VOCABULARY, True), schedule, chunks)
    torch.manual_seed(2)
    whole = Model(LAYERS, VOCABULARY)
    for module in (model, whole):
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3))
                parameter.register_post_accumulate_grad_hook(_halve)
    for seed in range(2):
        model.run_train(**_batch(seed))
        for part in zip(*(value.chunk(MICROBATCHES) for value in _batch(seed).values()), strict=True):
            (whole(*part) / MICROBATCHES).backward()
    norms = [(name, parameter) for name, parameter in model.named_parameters() if "norm" in name]
    assert norms
    for name, parameter in norms:
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-7, msg=name)


def _cases(rank: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    _check_hooks("zb-h1", 1)


def test_schedules_equal_one_process() -> None:
    run_ranks(4, _cases)
