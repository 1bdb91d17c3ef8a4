"""Bytes of weights, gradients and optimizer state in a plan: those of the ranks of a real training, to the byte."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, MixtralForCausalLM

from nxdpp import NxDPPModel, deferred_init, expert_parallelize, parallel_state
from nxdpp.__main__ import main
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.support.run_ranks import run_ranks

PIPELINE, DATA, MICROBATCHES = 2, 2, 4
# The dtype of a configuration has no effect on a constructor.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "dtype": "bfloat16",
}


class Case(NamedTuple):
    """A construction of README, and the flags of the plan that has the same."""

    dtype: str | None = None
    zero1: bool = False
    tied: bool = False
    schedule: str = "1f1b"
    deferred: bool = False
    experts: int = 1

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
        return CONFIG | {"tie_word_embeddings": self.tied} | (mixture if self.experts > 1 else {})

    def flags(self) -> list[str]:
        """The flags of the plan."""
        return [
            *("--pipeline-parallel-size", str(PIPELINE), "--data-parallel-size", str(DATA)),
            *("--num-microbatches", str(MICROBATCHES), "--seq-length", "16", "--schedule", self.schedule),
            *(["--dtype", self.dtype] if self.dtype else []),
            *(["--zero", "1"] if self.zero1 else []),
            *(["--expert-parallel-size", str(self.experts)] if self.experts > 1 else []),
        ]


CASES = [
    Case(zero1=True, deferred=True),
    Case("bfloat16", zero1=True, tied=True, schedule="zb-v"),
    Case(tied=True),
    Case("bfloat16", zero1=True, deferred=True, experts=2),
]


def _trained(case: Case, cuts: list[str]) -> dict[str, int]:
    """Bytes of this rank after a step."""
    dtype = getattr(torch, case.dtype or "float32")
    config: Any = AutoConfig.for_model(**case.config())
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=PIPELINE, expert_model_parallel_size=case.experts
    )
    torch.manual_seed(0)

    def made() -> nn.Module:
        model: nn.Module = (MixtralForCausalLM if case.experts > 1 else LlamaForCausalLM)(config)
        return model.to(dtype)

    whole = deferred_init(made) if case.deferred else made()
    model = NxDPPModel(
        expert_parallelize(whole) if case.experts > 1 else whole,
        num_microbatches=MICROBATCHES,
        schedule=case.schedule,
        use_zero1_optimizer=case.zero1,
        pipeline_cuts=cuts,
    )
    model.move_model_to_device()
    ids = torch.randint(0, 64, (MICROBATCHES, 16), generator=torch.Generator().manual_seed(1))
    model.run_train(input_ids=ids, labels=ids)
    held = list(model.parameters())
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(held, lr=1e-3)
    masters: list[torch.Tensor] = []
    if case.zero1:
        sharded = Zero1Optimizer(held, torch.optim.AdamW, lr=1e-3)
        masters = [values for _, values, _ in sharded.shards()]
        optimizer = sharded
    optimizer.step()
    moments = [
        tensor for state in optimizer.state.values() for name, tensor in state.items() if name.startswith("exp_avg")
    ]
    own = _storages(held)
    parallel_state.destroy_model_parallel()
    return {
        "weights": sum(own.values()),
        "gradients": sum(_storages(gradients).values()),
        "optimizer": sum((_storages([*moments, *masters]) | dict.fromkeys(own, 0)).values()),
    }


def _storages(tensors: Iterable[torch.Tensor | nn.Parameter]) -> dict[int, int]:
    """Bytes of each memory that ``tensors`` have."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _rank(rank: int, cuts: list[list[str]]) -> list[dict[str, int]]:
    return [_trained(case, own) for case, own in zip(CASES, cuts, strict=True)]


def test_the_state_is_that_of_real_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for case in CASES:
        (tmp_path / "config.json").write_text(json.dumps(case.config()))
        assert main(["plan", str(tmp_path), "--json", *case.flags()]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        assert plans[-1]["dtype"] == (case.dtype or "float32")
    measured = run_ranks(PIPELINE * DATA, _rank, [plan["best"][0]["cuts"] for plan in plans])

    for number, (case, plan) in enumerate(zip(CASES, plans, strict=True)):
        for rank, real in enumerate(of_rank[number] for of_rank in measured):
            predicted = plan["best"][0]["memory"][rank // DATA]
            assert {name: predicted[name] for name in real} == real, (case, rank)
