"""Optimizers over a part of a model make the steps of one process, or are refused in their first step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, fully_shard, parallel_state, tensor_parallelize
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.optimizer import Zero1Optimizer
from tests.gradients.optimizer.optimizers import Lamb, Lion, Sam
from tests.pipeline.after_wrapping.scripts import PipelinedTraining, Plain, Script, Training, compare
from tests.support.run_ranks import run_ranks

BY_ELEMENT = "Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD, SparseAdam"


def muon(training: Training) -> None:
    parameters = list(training.wrapped.parameters())
    matrices = optim.Muon([each for each in parameters if each.dim() == 2], lr=1e-2)
    others = optim.AdamW([each for each in parameters if each.dim() != 2], lr=1e-2)
    for _ in range(3):
        training.record.append(training.loss())
        matrices.step()
        others.step()
        matrices.zero_grad()
        others.zero_grad()


def by(make: Callable[[Any], optim.Optimizer]) -> Script:
    return lambda training: training.steps(3, make(training.wrapped.parameters()))


def refused(run: Callable[[Training], object]) -> Script:
    """A script that goes on with AdamW, as the message says."""

    def script(training: Training) -> None:
        if isinstance(training, PipelinedTraining):
            text = rf"computes the step of a parameter from other parameters.* of 2 pipeline .*{BY_ELEMENT}, Adafactor"
            with pytest.raises(RuntimeError, match=text):
                run(training)
            training.wrapped.zero_grad()
        training.steps(3)

    return script


def lbfgs(training: Training) -> None:
    optim.LBFGS(training.wrapped.parameters()).step(training.loss)


def sam(training: Training) -> None:
    Sam(training.wrapped.parameters(), optim.AdamW, lr=1e-2).step(training.loss)


def sam_in_two_steps(training: Training) -> None:
    optimizer = Sam(training.wrapped.parameters(), optim.SGD, lr=1e-2)
    training.loss()
    optimizer.first_step()
    optimizer.zero_grad()
    training.loss()
    optimizer.second_step()


def lbfgs_of_another_model(training: Training) -> None:
    other = nn.Linear(2, 2)
    optimizer = optim.LBFGS(other.parameters())
    optimizer.step(lambda: other(torch.ones(2)).sum())
    training.steps(3, optim.SGD(training.wrapped.parameters(), lr=1e-1))


def group_added_later(training: Training) -> None:
    optimizer = Sam(nn.Linear(2, 2).parameters(), optim.SGD, lr=1e-2)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: None)
    optimizer.add_param_group({"params": list(training.wrapped.parameters())})
    optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    optimizer.step(lambda: None)


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Script]] = {
    "Adafactor": (Plain, by(lambda given: optim.Adafactor(given, lr=1e-2))),
    "Muon": (Plain, muon),
    "Lion": (Plain, by(Lion)),
    "LBFGS of another model": (Plain, lbfgs_of_another_model),
    "LBFGS": (Plain, refused(lbfgs)),
    "Sam": (Plain, refused(sam)),
    "Sam in two steps": (Plain, refused(sam_in_two_steps)),
    "a group added later": (Plain, refused(group_added_later)),
}


def pipelined(rank: int) -> dict[str, Any]:
    return compare(rank, 2, SCRIPTS)


def test_over_a_pipeline() -> None:
    for result in run_ranks(2, pipelined):
        for name, (alone, together) in result.items():
            assert len(alone) == 3
            assert together == alone, name


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def step(optimizer: optim.Optimizer) -> None:
    optimizer.step(lambda: 0.0)


def divided(rank: int) -> tuple[list[float], list[float]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    ids = torch.arange(24).view(4, 6)
    model = NxDPPModel(tensor_parallelize(llama()), num_microbatches=2)
    matrices = [each for each in model.parameters() if each.dim() == 2]
    norms = [each for each in model.parameters() if each.dim() == 1]
    model.run_train(input_ids=ids, labels=ids)
    for make in (optim.Muon, optim.Adafactor, optim.LBFGS):
        text = (
            rf"{make.__name__} computes the step of an element from other elements, and 16 parameters of a group are "
            rf"this rank's parts of tensors that 2 tensor ranks divide \(the first has the shape \(16, 16\)\).*"
            rf"{BY_ELEMENT}"
        )
        with pytest.raises(RuntimeError, match=text):
            step(make(matrices))
    for make in (optim.Adafactor, optim.LBFGS):
        step(make(norms, lr=0.0))
    model.zero_grad()
    alone, loop = llama(), []
    ours, theirs = (Lion(each.parameters()) for each in (model, alone))
    losses = []
    for _ in range(3):
        loss = model.run_train(input_ids=ids, labels=ids)
        assert loss is not None
        losses.append(loss.item())
        ours.step()
        ours.zero_grad()
        parts = [alone(input_ids=part, labels=part, use_cache=False).loss / 2 for part in ids.chunk(2)]
        torch.stack(parts).sum().backward()
        loop.append(sum(map(float, parts)))
        theirs.step()
        theirs.zero_grad()
    return losses, loop


def test_over_tensor_ranks() -> None:
    for losses, alone in run_ranks(2, divided):
        assert losses == pytest.approx(alone, abs=1e-6)


STEPPING_ROWS: dict[str, Callable[[Any], optim.Optimizer]] = {
    each.__name__: partial(each, lr=1e-2)
    for each in (optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.ASGD, optim.NAdam, optim.RMSprop, Lion)
}
STEPPING_ROWS |= {
    "AdamW": partial(AdamW_FP32OptimParams, lr=1e-2),
    "fused AdamW": partial(optim.AdamW, lr=1e-2, fused=True),
    "SGD": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}
REFUSED_OVER_ROWS: list[tuple[Callable[[Any], optim.Optimizer], str]] = [
    *(
        (
            make,
            rf"{make.__name__} computes .* 4 parameters .* rows of tensors that fully_shard divides over replicas .*"
            rf"{BY_ELEMENT}.* Or train without fully_shard",
        )
        for make in (optim.Muon, optim.Adafactor, optim.LBFGS, Lamb)
    ),
    (optim.Rprop, "torch's Rprop cannot step the rows .*: take AdamW, Adam or SGD"),
    (partial(optim.SGD, fused=True), "torch's SGD with fused=True cannot step the rows .*: leave fused=True out"),
]


def gathered(rows: torch.Tensor) -> torch.Tensor:
    tensor = rows.detach()
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def sharded(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    model = NxDPPModel(llama(), num_microbatches=2)
    fully_shard(model)
    ids = torch.arange(24).view(4, 6).chunk(2)[rank]
    model.run_train(input_ids=ids, labels=ids)
    known = [each for each in model.parameters() if each.dim() == 2][:4]
    for name, make in STEPPING_ROWS.items():
        whole = [nn.Parameter(gathered(each)) for each in known]
        rows = [nn.Parameter(each.detach().clone()) for each in known]
        ours, theirs = make(rows), make(whole)
        for _ in range(3):
            for each, own, other in zip(known, rows, whole, strict=True):
                assert each.grad is not None
                own.grad, other.grad = each.grad.clone(), gathered(each.grad)
            ours.step()
            theirs.step()
        assert all(torch.equal(gathered(own), other) for own, other in zip(rows, whole, strict=True)), name
    before = [gathered(each) for each in known]
    for make, text in REFUSED_OVER_ROWS:
        with pytest.raises(RuntimeError, match=text):
            step(make(known))
    with pytest.raises(ValueError, match=r"fully_shard has sharded them .* torch.optim.AdamW\(model.local_parameters"):
        Zero1Optimizer(model.local_parameters(), optim.AdamW)
    assert all(torch.equal(gathered(each), old) for each, old in zip(known, before, strict=True))


def test_over_rows_of_shards() -> None:
    run_ranks(2, sharded)
