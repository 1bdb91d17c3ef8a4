"""Going on to the bit in the same layout, for schedules, precisions and sources of random numbers."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from nxdpp import GradScaler, NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.tensor.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from tests.checkpoint.distributed.layouts import Layout, Training, learning_rates, tensors_in
from tests.support import models, tensor_models
from tests.support.run_ranks import run_ranks

STEPS = 1
"""Steps before and after the checkpoint; an evaluation comes before the last of them."""


@dataclass(frozen=True)
class Case:
    """A training of four ranks; data-parallel replicas are the rest."""

    arguments: dict[str, Any]
    pipeline: int = 2
    tensor: int = 1
    zero1: bool = False
    half: bool = False
    recomputes: bool = False
    scales: bool = False
    clips: bool = False
    save: dict[str, Any] = field(default_factory=dict)


CASES = {
    "v": Case({"schedule": "zb-v", "virtual_pipeline_size": 2}, zero1=True, save={"async_save": True}),
    "masters": Case({}, zero1=True, half=True, recomputes=True, clips=True, save={"async_save": True}),
    "scaler": Case({}, scales=True),
    "sequence": Case({}, tensor=2, clips=True),
}


class _Training:
    """A training with dropout; tensor ranks have masks of their own within a layer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = NxDPPModel(
            _module(case),
            num_microbatches=4,
            broadcast_and_average_loss=True,
            use_zero1_optimizer=case.zero1,
            grad_scaler=(scaler := GradScaler(init_scale=2.0**8, growth_interval=2) if case.scales else None),
            **case.arguments,
        )
        self.scaler = scaler
        self.model.move_model_to_device()
        if case.recomputes:
            apply_checkpoint(self.model)
        parameters = [parameter for _, parameter in self.model.local_named_parameters()]
        if case.zero1:
            clip: dict[str, Any] = {"grad_clipping": case.clips, "max_norm": 0.1 if case.clips else None}
            self.optimizer: Optimizer = Zero1Optimizer(parameters, AdamW, **clip, lr=1e-2)
        else:
            self.optimizer = (AdamW_FP32OptimParams if case.half else AdamW)(parameters, lr=1e-2)
        self.scheduler = learning_rates(self.optimizer)

    def steps(self) -> list[float]:
        """Train some steps, with an evaluation before the last of them; return the losses."""
        losses = []
        for number in range(STEPS):
            if number == STEPS - 1:
                self.model.eval()
                losses.append(self._run(self.model.run_eval))
                self.model.train()
            losses.append(self._run(self.model.run_train))
            if self.case.clips and not self.case.zero1:
                self.model.clip_grad_norm_(0.1)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def save(self, path: Path, tag: str) -> None:
        parts = self.model, self.optimizer, self.scheduler, {"tag": tag}
        save_checkpoint(path, tag, *parts, grad_scaler=self.scaler, **self.case.save)

    def load(self, path: Path, tag: str) -> None:
        load_checkpoint(path, tag, self.model, self.optimizer, self.scheduler, grad_scaler=self.scaler)

    def _run(self, run: Callable[..., Any]) -> float:
        context: AbstractContextManager[Any] = (
            torch.autocast(torch.empty(0).device.type, torch.float16) if self.scaler else nullcontext()
        )
        ids = _ids()
        with context:
            loss: float = run(input_ids=ids, labels=ids).item()
        return loss


def _module(case: Case) -> nn.Module:
    if case.tensor == 1:
        model: nn.Module = models.make("gpt2", layers=4, dropout=0.1)
        return model.to(torch.bfloat16) if case.half else model
    module: nn.Module = tensor_models.make("llama", attention_dropout=0.1)
    tensor_parallelize(module, sequence_parallel=True)
    for name, layer in module.named_modules():
        if name.endswith("mlp.down_proj"):
            # Its input is divided over the tensor ranks.
            layer.register_forward_pre_hook(_drop)
    return module


def _drop(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *rest = inputs
    with get_xla_rng_tracker().fork():
        return (functional.dropout(hidden, 0.1, layer.training), *rest)


def _ids() -> torch.Tensor:
    """The batch of this replica: positions in the data that Python and NumPy draw."""
    starts = [random.randrange(50) for _ in range(8)] + np.random.randint(50, size=8).tolist()
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    ids = torch.tensor(starts[replica::replicas])[:, None] + torch.arange(6)
    return ids % min(models.VOCABULARY, tensor_models.VOCABULARY)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed + parallel_state.get_data_parallel_rank())
    get_xla_rng_tracker().reset()
    if parallel_state.get_tensor_model_parallel_size() > 1:
        model_parallel_xla_manual_seed(seed + parallel_state.get_data_parallel_rank())


def _stop_and_go_on(rank: int, path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of the second half of each case, without and with the stop."""
    losses = {}
    for name, case in CASES.items():
        parallel_state.initialize_model_parallel(case.tensor, case.pipeline)
        folder = path / name
        whole = _Training(case)
        _seed(0)
        whole.steps()
        whole.save(folder, "half")
        expected = whole.steps()
        whole.save(folder, "whole")
        halves = _Training(case)
        _seed(5)
        halves.load(folder, "half")
        losses[name] = expected, halves.steps()
        halves.save(folder, "halves")
        finalize_checkpoint()
        get_xla_rng_tracker().reset()
        parallel_state.destroy_model_parallel()
    return losses


def test_going_on_is_exact(tmp_path: Path) -> None:
    for name, (expected, found) in run_ranks(4, _stop_and_go_on, tmp_path)[0].items():
        assert len(set(expected)) == STEPS + 1
        assert found == expected, name
        document, tensors = tensors_in(tmp_path / name / "halves")
        expected_document, values = tensors_in(tmp_path / name / "whole")
        assert tensors.keys() == values.keys()
        assert [key for key, value in values.items() if not torch.equal(tensors[key], value)] == [], name
        for key in ("optimizer", "scheduler", "grad_scaler", "random"):
            assert document.content[key] == expected_document.content[key], name


def _three_replicas(rank: int, path: Path) -> list[str]:
    """Names of the parameters whose values differ after a load in the middle."""
    parallel_state.initialize_model_parallel()

    def step(of: Training, number: int) -> None:
        ids = torch.randint(0, models.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * number + rank))
        of.step({"input_ids": ids, "labels": ids})

    whole, resumed = (Training(lambda: tensor_models.make("llama"), Layout()) for _ in range(2))
    step(whole, 0)
    save_checkpoint(path, "middle", whole.model, whole.optimizer, whole.scheduler)
    load_checkpoint(path, "middle", resumed.model, resumed.optimizer, resumed.scheduler)
    for each in (whole, resumed):
        step(each, 1)
        step(each, 2)
    expected = dict(whole.model.local_named_parameters())
    return [name for name, each in resumed.model.local_named_parameters() if not torch.equal(each, expected[name])]


def test_the_first_step_after_a_load_averages_in_the_order_of_the_others(tmp_path: Path) -> None:
    """Over more replicas than two, the order of a sum shows in its last bit."""
    assert run_ranks(3, _three_replicas, tmp_path) == [[], [], []]
