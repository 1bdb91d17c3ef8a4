"""Optimizers over a part of a model make the steps of one process, or are refused in their first step."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel, declare_optimizer, fully_shard, parallel_state, tensor_parallelize
from nxdpp.gradients.optimizer.fp32_adamw import AdamW_FP32OptimParams
from nxdpp.optimizer import Zero1Optimizer
from tests.gradients.optimizer.optimizers import Lamb, Lion, Sam
from tests.pipeline.after_wrapping.scripts import WIDTH, PipelinedTraining, Plain, Script, Training, compare
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


def wide() -> nn.Module:
    """A model with 4,096 elements in each matrix of a layer, from which on bitsandbytes has states of 8 bits."""
    model = Plain()
    for layer in model.layers:
        layer.linear = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH))
    return model


def eight_bits(training: Training) -> None:
    optimizer = bitsandbytes.optim.AdamW8bit(training.wrapped.parameters(), lr=1e-2)
    training.steps(3, optimizer)
    assert torch.uint8 in {
        getattr(each, "dtype", None) for state in optimizer.state.values() for each in state.values()
    }


def refused(run: Callable[[Training], object], text: str) -> Script:
    """A script whose pipeline is refused before it changes anything, and goes on with AdamW, as the message says."""

    def script(training: Training) -> None:
        if isinstance(training, PipelinedTraining):
            with pytest.raises(RuntimeError, match=text):
                run(training)
            training.wrapped.zero_grad()
        training.steps(3)

    return script


OVER_STAGES = rf"computes the step of a parameter from other parameters.* of \d pipeline .*{BY_ELEMENT}, Adafactor"


def unknown(kind: type[optim.Optimizer], reason: str = "is not known") -> str:
    declared = re.escape(f'nxdpp.declare_optimizer({kind.__name__}, looks_at="element")')
    return rf"^{kind.__name__} {re.escape(reason)}, and .* layers of its part of \d pipeline ranks: .*{declared}"


def declared(training: Training) -> None:
    """Write the line of the message."""
    optimizer = Lion(training.wrapped.parameters())
    if isinstance(training, PipelinedTraining):
        training.loss()
        with pytest.raises(RuntimeError, match=unknown(Lion)) as error:
            optimizer.step()
        (line,) = re.findall(r"nxdpp\.declare_optimizer\([^)]*\)", str(error.value))
        training.wrapped.zero_grad()
        exec(line, {"nxdpp": nxdpp, "Lion": Lion})
    training.steps(3, optimizer)


class Sometimes(optim.SGD):
    """Averages its gradients over all ranks in each fourth step."""

    number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        parameters = self.param_groups[0]["params"]
        if self.number % 4 == 0:
            for parameter in parameters:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


def sends_later(training: Training) -> None:
    """Three steps that send nothing, and one that is refused before it has changed a value."""
    nxdpp.declare_optimizer(Sometimes, looks_at="element")
    optimizer = Sometimes(training.wrapped.parameters(), lr=0.1)
    training.steps(3, optimizer)
    if isinstance(training, PipelinedTraining):
        training.loss()
        before = [each.clone() for each in training.wrapped.parameters()]
        with pytest.raises(
            RuntimeError, match=r"Sometimes sends messages in its step, .*before ProcessGroup\.allreduce"
        ):
            optimizer.step()
        assert all(map(torch.equal, training.wrapped.parameters(), before))
        dist.barrier()


def lbfgs(training: Training) -> None:
    optim.LBFGS(training.wrapped.parameters()).step(training.loss)


def sam(training: Training) -> None:
    Sam(training.wrapped.parameters(), optim.AdamW, lr=1e-2).step(training.loss)


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Script]] = {
    "AdamW8bit": (wide, eight_bits),
    "Muon": (Plain, muon),
    "Lion": (Plain, declared),
    "LBFGS": (Plain, refused(lbfgs, OVER_STAGES)),
    "Sam": (Plain, refused(sam, unknown(Sam))),
    "declared and sending later": (Plain, sends_later),
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


def divided(rank: int) -> None:
    parallel_state.initialize_model_parallel(2, 1)
    ids = torch.arange(24).view(4, 6)
    model = NxDPPModel(tensor_parallelize(llama()), num_microbatches=2, broadcast_and_average_loss=True)
    matrices = [each for each in model.parameters() if each.dim() == 2]
    norms = [each for each in model.parameters() if each.dim() == 1]
    model.run_train(input_ids=ids, labels=ids)
    kinds: tuple[Callable[..., optim.Optimizer], ...] = (optim.Muon, optim.Adafactor, optim.LBFGS)
    for make in kinds:
        text = (
            rf"{make.__name__} computes the step of an element from other elements, and 16 parameters of a "
            rf"group are this rank's parts of tensors that 2 tensor ranks divide \(the first has the shape \(\d+, "
            rf"16\)\).*{BY_ELEMENT}"
        )
        with pytest.raises(RuntimeError, match=text):
            step(make(matrices))
    for make in (*kinds[1:], Lamb):
        step(make(norms, lr=0.0))
    text = r'^Lamb is not known, and .* parts of tensors that 2 tensor ranks divide: .*\(Lamb, looks_at="element"\)'
    with pytest.raises(RuntimeError, match=text):
        step(Lamb(matrices))
    declare_optimizer(Lamb, looks_at="tensor")
    with pytest.raises(RuntimeError, match="Lamb computes the step of an element from other elements"):
        step(Lamb(matrices))


def test_over_tensor_ranks() -> None:
    run_ranks(2, divided)


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
        for make in (optim.Muon, optim.Adafactor, optim.LBFGS)
    ),
    (Lamb, "^Lamb is not known, and .* rows of tensors that fully_shard divides over replicas: "),
    (bitsandbytes.optim.AdamW, "bitsandbytes's AdamW cannot step the rows .*: take AdamW, Adam or SGD of torch"),
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
    ids = (torch.arange(48).view(8, 6) % 32).chunk(2)[rank]
    model.run_train(input_ids=ids, labels=ids)
    known = [each for each in model.parameters() if each.dim() == 2][:4]
    declare_optimizer(Lion, looks_at="element")
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
