"""Steps over experts: token losses, accumulation, a scaled loss, ZeRO-1 and shards have one process's numbers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nxdpp import GradScaler, NxDPPModel, expert_parallelize, fully_shard, parallel_state
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.initialization.parts import own_part
from nxdpp.tensor.shards import first_row
from tests.experts.test_layer import PLAN, WIDTH, Layer, Model
from tests.support.expert_models import batch_of, make, step_of_one_process
from tests.support.run_ranks import run_ranks

MICROBATCHES = 2
LIMIT = 1e-12
MAX_NORM = 0.2


def _replica() -> tuple[int, int]:
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()


def _apart(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not abs(value) <= LIMIT}


def _gradients(wrapped: NxDPPModel, whole: nn.Module) -> dict[str, float]:
    """Largest differences of this rank's gradients from those of ``whole``, by name."""
    found = {}
    for name, parameter in wrapped.local_named_parameters():
        expected = whole.get_parameter(name).grad
        assert expected is not None, name
        assert parameter.grad is not None, name
        found[f"gradient {name}"] = float((parameter.grad - own_part(expected, parameter)).abs().max())
    return found


def _values(wrapped: NxDPPModel, whole: nn.Module) -> dict[str, float]:
    """Largest differences of this rank's parameters, or of its rows, from ``whole``, by name."""
    found = {}
    for name, parameter in wrapped.local_named_parameters():
        expected, rows = own_part(whole.get_parameter(name).detach(), parameter), local_rows(parameter)
        first = first_row(parameter)
        difference = (rows - expected[first : first + len(rows)]).abs()
        found[name] = float(difference.max()) if len(rows) else 0.0
    return found


def _labelled(replica: int) -> dict[str, Tensor]:
    """A batch whose labels are few on replica 0, and more on each later one; a microbatch may have none."""
    batch = batch_of(replica, 2 * MICROBATCHES)
    generator = torch.Generator().manual_seed(replica)
    share = torch.rand(batch["labels"].shape, generator=generator)
    batch["labels"][share > (replica + 1) / 5] = -100
    batch["labels"][:, 0] = -100
    return batch


def _tokens(name: str) -> dict[str, float]:
    """Differences of a step whose loss is the mean over all labels of all replicas."""
    model = make(name, 2)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES, loss_normalization="tokens")
    replica, replicas = _replica()
    batches = [_labelled(each) for each in range(replicas)]
    own = wrapped.run_train(**batches[replica])
    labels = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert len(set(labels)) == replicas
    # A router's loss is the mean over the microbatches.
    parts = replicas * MICROBATCHES
    means = []
    for batch in batches:
        losses = []
        for part in zip(*(value.chunk(MICROBATCHES) for value in batch.values()), strict=True):
            loss = whole(**dict(zip(batch, part, strict=True)), num_items_in_batch=sum(labels) / parts).loss
            (loss / parts).backward()
            losses.append(loss.detach())
        # transformers computes losses in float32, which are compared in the order of the step.
        means.append(torch.stack(losses).mean())
    found = {} if own is None else {"loss": float(own - means[replica])}
    return found | _gradients(wrapped, whole)


def _accumulated(name: str) -> dict[str, float]:
    """Differences of gradients that three batches add up, two of them in ``no_sync()``."""
    model = make(name, 2)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES)
    replica, replicas = _replica()
    for seed in range(3):
        batches = [batch_of(each, 2 * MICROBATCHES, seed) for each in range(replicas)]
        step_of_one_process(whole, batches, MICROBATCHES)
        if seed < 2:
            with wrapped.no_sync():
                wrapped.run_train(**batches[replica])
        else:
            wrapped.run_train(**batches[replica])
    norm = wrapped.clip_grad_norm_(MAX_NORM) - nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    return {"norm": float(norm), **_gradients(wrapped, whole)}


def _sharded(name: str, whole_gradients: bool = False, reduction: str = "mean") -> dict[str, float]:
    """Differences of two clipped steps of ZeRO-1, the second of them of two batches, from a whole optimizer's."""
    model = make(name, 2)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES, use_zero1_optimizer=True)
    # With momentum, and without a division by the size of a gradient: rounding stays rounding.
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = Zero1Optimizer(
        wrapped.local_named_parameters(),
        torch.optim.SGD,
        max_norm=MAX_NORM,
        whole_gradients=whole_gradients,
        reduction=reduction,
        **options,
    )
    plain = torch.optim.SGD(whole.parameters(), **options)
    replica, replicas = _replica()
    found: dict[str, float] = {}
    for step in range(2):
        for part in range(1 + step):
            batches = [batch_of(each, 2 * MICROBATCHES, 2 * step + part) for each in range(replicas)]
            wrapped.run_train(**batches[replica])
            step_of_one_process(whole, batches, MICROBATCHES)
        if reduction == "sum":
            for parameter in whole.parameters():
                assert parameter.grad is not None
                parameter.grad *= replicas
        optimizer.reduce_gradients()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        found[f"norm of pieces {step}"] = float(optimizer.gradient_norm() - norm)
        plain.step()
        optimizer.step()
        assert optimizer.grad_norm is not None
        found[f"norm {step}"] = float(optimizer.grad_norm - norm)
        found |= {f"{key} {step}": value for key, value in _values(wrapped, whole).items()}
        for each in (optimizer, plain):
            each.zero_grad()
    _check_state(wrapped, optimizer)
    return found


def _fully_sharded(name: str, resharding: bool | None = None, reduction: str = "mean") -> dict[str, float]:
    """Differences of two clipped steps of shards, the second of them of two batches, from a whole optimizer's."""
    model = make(name, 2)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(expert_parallelize(model), num_microbatches=MICROBATCHES, gradient_reduction=reduction)
    fully_shard(wrapped, reshard_after_forward=resharding)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(wrapped.local_parameters(), **options)
    plain = torch.optim.SGD(whole.parameters(), **options)
    replica, replicas = _replica()
    found: dict[str, float] = {}
    for step in range(2):
        for part in range(1 + step):
            batches = [batch_of(each, 2 * MICROBATCHES, 2 * step + part) for each in range(replicas)]
            with wrapped.no_sync() if part < step else nullcontext():
                wrapped.run_train(**batches[replica])
            step_of_one_process(whole, batches, MICROBATCHES)
        if reduction == "sum":
            for parameter in whole.parameters():
                assert parameter.grad is not None
                parameter.grad *= replicas * MICROBATCHES
        norm = wrapped.clip_grad_norm_(MAX_NORM)
        found[f"norm {step}"] = float(norm - nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM))
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        found |= {f"{key} {step}": value for key, value in _values(wrapped, whole).items()}
    copies, replicas = parallel_state.get_expert_data_parallel_size(), parallel_state.get_data_parallel_size()
    for parameter in wrapped.local_parameters():
        ranks = copies if is_of_experts(parameter) else replicas
        assert abs(len(local_rows(parameter)) - len(parameter) / ranks) < ranks
    return found


def _check_state(wrapped: NxDPPModel, optimizer: Zero1Optimizer) -> None:
    """Check that a rank keeps its share of the state: of its experts over their copies, of others over all replicas."""
    copies, replicas = parallel_state.get_expert_data_parallel_size(), parallel_state.get_data_parallel_size()
    parameters = list(wrapped.local_parameters())
    kept = [0, 0]
    for shard, _, state in optimizer.shards():
        kept[is_of_experts(parameters[shard.parameter])] += state["momentum_buffer"].numel()
    for of_experts, ranks in enumerate((replicas, copies)):
        numel = sum(each.numel() for each in parameters if is_of_experts(each) is bool(of_experts))
        assert abs(kept[of_experts] - numel / ranks) <= 1


CASES: dict[str, Callable[..., dict[str, float]]] = {
    "tokens": _tokens,
    "accumulated": _accumulated,
    "sharded": _sharded,
    "fully sharded": _fully_sharded,
}


def _train(rank: int, pipeline: int, expert: int, cases: Sequence[tuple[Any, ...]]) -> dict[Any, dict[str, float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert)
    return {case: found for case in cases if (found := _apart(CASES[case[0]](*case[1:])))}


def test_uneven_labels_and_accumulated_steps_are_exact() -> None:
    cases = [("tokens", "balanced mixtral"), ("tokens", "deepseek_v3"), ("accumulated", "mixtral")]
    assert run_ranks(4, _train, 1, 2, cases) == [{}] * 4


def test_uneven_labels_over_two_stages_are_exact() -> None:
    assert run_ranks(4, _train, 2, 2, [("tokens", "balanced mixtral")]) == [{}] * 4


def test_zero1_over_copies_of_experts_is_exact() -> None:
    cases = [("sharded", "mixtral"), ("sharded", "deepseek_v3", True), ("sharded", "mixtral", False, "sum")]
    assert run_ranks(4, _train, 1, 2, cases) == [{}] * 4


def test_zero1_with_one_copy_of_each_expert_over_two_stages_is_exact() -> None:
    cases = [("sharded", "mixtral"), ("sharded", "mixtral", False, "sum"), ("sharded", "mixtral", True)]
    assert run_ranks(4, _train, 2, 2, cases) == [{}] * 4


_SHARDS: list[tuple[Any, ...]] = [("fully sharded", "mixtral"), ("fully sharded", "mixtral", None, "sum")]


def test_shards_of_copies_of_experts_are_exact() -> None:
    cases = [*_SHARDS, ("fully sharded", "deepseek_v3", True)]
    assert run_ranks(4, _train, 1, 2, cases) == [{}] * 4


def test_shards_with_one_copy_of_each_expert_over_two_stages_are_exact() -> None:
    cases = [*_SHARDS, ("fully sharded", "deepseek_v3"), ("fully sharded", "mixtral", True, "sum")]
    assert run_ranks(4, _train, 2, 2, cases) == [{}] * 4


class _Amplified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


class AmplifiedExperts(nn.Module):
    """Four experts, with a factor of the gradients of each."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.offset = nn.Parameter(torch.randn(4, WIDTH))
        self.factor = nn.Parameter(torch.ones(4, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        matrix: Tensor = _Amplified.apply(self.matrix, self.factor)  # type: ignore[no-untyped-call]
        total = torch.zeros_like(x)
        for slot in range(chosen.shape[1]):
            product = torch.einsum("nh,nhj->nj", x, matrix[chosen[:, slot]]) + self.offset[chosen[:, slot]]
            total = total + weights[:, slot : slot + 1] * product.tanh()
        return total


def _scaled(half: bool, zero1: bool) -> list[Any]:
    """Run steps with a scaled loss, in the second of which the last expert overflows; return differences and skips."""
    torch.manual_seed(3)
    model = Model(0.0).double()
    for layer in model.layers:
        layer.experts = AmplifiedExperts().double()
    if half:
        model.float()
    whole = copy.deepcopy(model)
    device = parallel_state.local_device().type
    scaler, reference = GradScaler(init_scale=2.0**10), torch.amp.GradScaler(device, 2.0**10)
    wrapped = NxDPPModel(
        expert_parallelize(model, {**PLAN, "layers.*.experts.factor": "grouped_gemm"}),
        transformer_layer_cls=Layer,
        num_microbatches=MICROBATCHES,
        grad_scaler=scaler,
        use_zero1_optimizer=zero1,
    )
    trained = [(name, each) for name, each in wrapped.local_named_parameters() if each.requires_grad]
    ours: torch.optim.Optimizer = (
        Zero1Optimizer(trained, torch.optim.SGD, grad_clipping=False, lr=0.1)
        if zero1
        else torch.optim.SGD([each for _, each in trained], 0.1)
    )
    theirs = torch.optim.SGD([each for each in whole.parameters() if each.requires_grad], 0.1)
    replica, replicas = _replica()
    found: dict[str, float] = {}
    overflows, scales = [], []
    dtype = torch.float32 if half else torch.float64
    for step in range(3):
        with torch.no_grad():
            for module in (wrapped.local_module, whole):
                for name, parameter in module.named_parameters():
                    # Only the last expert of the last layer: one rank of an expert group has it.
                    is_last = name == "layers.2.experts.factor" and (
                        module is whole or parallel_state.get_expert_model_parallel_rank() == 1
                    )
                    if is_last:
                        parameter[-1] = float("inf") if step == 1 else 1.0
        inputs = [
            torch.randn(4, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + each))
            for each in range(replicas)
        ]
        with torch.autocast(device, torch.float16, enabled=half):
            wrapped.run_train(x=inputs[replica])
            losses = [whole(part) / MICROBATCHES / replicas for each in inputs for part in each.chunk(MICROBATCHES)]
        for loss in losses:
            reference.scale(loss).backward()
        overflows.append(any(not p.grad.isfinite().all() for _, p in trained if p.grad is not None))
        before = [each.detach().clone() for _, each in trained]
        scaler.step(ours)
        reference.step(theirs)
        stepped = not all(torch.equal(one, other) for one, (_, other) in zip(before, trained, strict=True))
        assert stepped is (step != 1)
        scaler.update()
        reference.update()
        ours.zero_grad()
        theirs.zero_grad()
        assert scaler.get_scale() == reference.get_scale()
        scales.append(scaler.get_scale())
        found |= {f"{name} {step}": value for name, value in _values(wrapped, whole).items() if "factor" not in name}
    limit = 1e-3 if half else LIMIT
    return [{name: value for name, value in found.items() if not value <= limit}, overflows, scales]


def _scale(rank: int, pipeline: int, zero1: bool) -> list[Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=2)
    return [_scaled(half, zero1) for half in (False, True)]


def _check_skips(ranks: Sequence[list[Any]]) -> None:
    for found in ranks:
        for differences, _, scales in found:
            assert differences == {}
            assert scales == [1024.0, 512.0, 512.0]
    # Some ranks have no overflow of their own in the second step.
    overflows = [overflow for found in ranks for _, (_, overflow, _), _ in found]
    assert any(overflows)
    assert not all(overflows)


def test_an_overflow_of_one_expert_skips_the_step_on_all_ranks() -> None:
    _check_skips(run_ranks(4, _scale, 2, False))


def test_an_overflow_of_one_expert_skips_the_step_of_zero1() -> None:
    _check_skips(run_ranks(2, _scale, 1, True))
