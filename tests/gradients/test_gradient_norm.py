"""``clip_grad_norm``: norms and clipped gradients of torch on the whole model, in one process."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxdpp import GradScaler, NxDPPModel, parallel_state
from nxdpp.gradients.gradient_norm import clip_grad_norm, get_grad_norm
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from tests.pipeline.runtime.scheduled_models import Chain, Tied, make, rows
from tests.support.plain_models import Block
from tests.support.run_ranks import run_ranks
from tests.support.tied_parallel_model import VOCABULARY, TiedLayer, TiedModel

NORM_TYPES = (2.0, math.inf, 3.5)


def parameter(gradient: torch.Tensor | None, **attributes: object) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(gradient.shape if gradient is not None else 1).to(getattr(gradient, "dtype", None)))
    made.grad = None if gradient is None else gradient.clone()
    vars(made).update(attributes)
    return made


def check_model(model_class: Callable[[int], nn.Module], scaled: bool) -> None:
    """Clip a wrapped model, and the same in one process."""
    whole: Any = make(model_class, 4)
    scaler = GradScaler(init_scale=2.0**10) if scaled else None
    model = NxDPPModel(copy.deepcopy(whole), transformer_layer_cls=Block, num_microbatches=2, grad_scaler=scaler)
    model.move_model_to_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    for norm_type in NORM_TYPES[:2]:
        whole.zero_grad()
        model.zero_grad()
        x = rows(8)
        for part in x.chunk(2 * replicas):
            (whole(part) / (2 * replicas)).backward()
        model.run_train(x=x.chunk(replicas)[replica])
        if scaler is not None:
            with pytest.raises(RuntimeError, match=r"unscale_\(optimizer\) before"):
                model.clip_grad_norm_(1e-2)
            scaler.unscale_(optimizer)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e-2, norm_type)
        norm = model.clip_grad_norm_(1e-2, norm_type)
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        named = dict(whole.named_parameters(remove_duplicate=False))
        for name, own in model.local_named_parameters():
            assert own.grad is not None
            torch.testing.assert_close(own.grad, named[name].grad, rtol=1e-5, atol=1e-8)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
    copies = [name for name, each in model.local_named_parameters() if getattr(each, "shared", False)]
    assert bool(copies) == (model_class is Tied and model.holds_last_stage)


def check_parallel_model() -> None:
    """A norm over sharded, replicated, copied, padded and tied parameters of a wrapped model."""
    torch.manual_seed(0)
    whole = TiedModel(parallel=False)
    torch.manual_seed(0)
    model = NxDPPModel(TiedModel(parallel=True), transformer_layer_cls=TiedLayer, num_microbatches=2, schedule="zb-h1")
    ids = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(3))
    for norm_type in (2.0, math.inf):
        whole.zero_grad()
        model.zero_grad()
        for part in ids.chunk(2):
            (whole(part) / 2).backward()
        model.run_train(ids=ids)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e-2, norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(1e-2, norm_type), expected, rtol=1e-5, atol=0)
        for name, own in model.local_named_parameters():
            if name.endswith("norm.weight"):
                full = whole.get_parameter(name).grad
                assert full is not None
                torch.testing.assert_close(own.grad, full, rtol=1e-4, atol=1e-4 * full.abs().max().item())


def clip(rank: int) -> None:
    for tensor, pipeline in ((2, 2), (1, 2)):
        parallel_state.initialize_model_parallel(tensor, pipeline)
        if tensor == pipeline:
            check_parallel_model()
        else:
            check_model(Tied, scaled=False)
            check_model(Chain, scaled=True)
            refuse_before_the_average()
            check_not_finite()
        parallel_state.destroy_model_parallel()


def check_not_finite() -> None:
    """A gradient of the last stage alone is not finite: all ranks are told, and keep their gradients."""
    model = NxDPPModel(make(Chain, 4), transformer_layer_cls=Block, num_microbatches=2)
    model.run_train(x=rows(4))
    own = [each for each in model.local_parameters() if each.grad is not None]
    gradients = [each.grad for each in own if each.grad is not None]
    if model.holds_last_stage:
        gradients[-1].fill_(math.nan)
    before = [gradient.clone() for gradient in gradients]
    with pytest.raises(RuntimeError, match="norm of the gradients of the whole model is nan"):
        clip_grad_norm(own, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close([each.grad for each in own], before, equal_nan=True, rtol=0, atol=0)
    assert clip_grad_norm(own, 1.0, math.inf).isnan()


def refuse_before_the_average() -> None:
    model = NxDPPModel(make(Chain, 4), transformer_layer_cls=Block, use_zero1_optimizer=True)
    if parallel_state.get_data_parallel_size() > 1:
        with pytest.raises(RuntimeError, match="use_zero1_optimizer=True leaves the average"):
            model.clip_grad_norm_(1.0)
    else:
        assert model.clip_grad_norm_(1.0) == 0
    averaging = NxDPPModel(make(Chain, 4), transformer_layer_cls=Block)
    with averaging.no_sync():
        averaging.run_train(x=rows(2))
    if parallel_state.get_data_parallel_size() > 1:
        with pytest.raises(RuntimeError, match=r"not averaged over replicas.*clip_grad_norm\(model"):
            averaging.clip_grad_norm_(1.0)
        clip_grad_norm(averaging.local_parameters(), 1.0)
    averaging.run_train(x=rows(2))
    assert averaging.clip_grad_norm_(1.0) > 0


def test_norm_is_that_of_the_whole_model_on_four_ranks() -> None:
    run_ranks(4, clip)


@pytest.fixture
def alone() -> Any:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("alone")
def test_arguments_that_make_no_norm_are_refused() -> None:
    own = parameter(torch.ones(2))
    for norm_type in (0, -1.0, math.nan, -math.inf):
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            clip_grad_norm(own, 1.0, norm_type)
    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be above 0"):
            clip_grad_norm(own, max_norm)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        clip_grad_norm(table.parameters(), 1.0)
    assert own.grad is not None
    assert own.grad.tolist() == [1, 1]


@pytest.mark.usefixtures("alone")
def test_halves_and_extreme_values() -> None:
    halves = [parameter(torch.full((1000,), 3.0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    norm = clip_grad_norm(halves, 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(18_000)))
    large = [parameter(torch.full((1,), 1e30)), parameter(torch.zeros(0))]
    torch.testing.assert_close(clip_grad_norm(large, math.inf), torch.tensor(1e30))
    assert large[0].grad == torch.tensor(1e30)
    # A number, where nothing is counted.
    assert clip_grad_norm([], 1.0) == 0
    assert clip_grad_norm([parameter(torch.zeros(0))], 1.0, math.inf) == 0


def whole_gradients() -> dict[str, torch.Tensor]:
    """Gradients of a model with two stages: a tied embedding, a norm, a bias without gradient, split weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (8, 4), "norm0": (4,), "norm1": (4,), "weight0": (8, 4), "weight1": (4, 8), "key1": (4, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def part_of_rank(whole: dict[str, torch.Tensor]) -> list[nn.Parameter]:
    """Parameters of this rank, with NxD's attributes."""
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    stages, stage = parallel_state.get_pipeline_model_parallel_size(), parallel_state.get_pipeline_model_parallel_rank()
    split = {"tensor_model_parallel": size > 1, "partition_dim": 0, "num_partitions": size}
    shards = {name: gradient.chunk(size)[rank] for name, gradient in whole.items()}
    # Two ranks hold each partition of the key, as with kv_size_multiplier=2.
    key_partitions = max(1, size // 2)
    key = whole["key1"].chunk(key_partitions)[rank * key_partitions // size]
    parts = {
        0: [parameter(shards["embedding"], **split), parameter(whole["norm0"]), parameter(shards["weight0"], **split)],
        1: [
            parameter(whole["norm1"]),
            parameter(shards["weight1"], **split),
            parameter(key, **{**split, "num_partitions": key_partitions}),
            parameter(None),
        ],
    }
    if stages == 1:
        return parts[0] + parts[1]
    return parts[stage] + ([parameter(shards["embedding"], **split, shared=True)] if stage else [])


def torch_norm(whole: dict[str, torch.Tensor], max_norm: float, norm_type: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and clipped gradient of norm1 by torch."""
    parameters = {name: parameter(gradient) for name, gradient in whole.items()}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type)
    clipped = parameters["norm1"].grad
    assert clipped is not None
    return norm, clipped


def check_synthetic() -> None:
    whole = whole_gradients()
    for norm_type in NORM_TYPES:
        for max_norm in (0.5, 1e6):
            norm, clipped = torch_norm(whole, max_norm, norm_type)
            own = part_of_rank(whole)
            for force_spmd in (True, False):
                torch.testing.assert_close(get_grad_norm(own, norm_type, force_spmd=force_spmd), norm)
            # A parameter that is given twice counts once.
            torch.testing.assert_close(clip_grad_norm([*own, own[0]], max_norm, norm_type), norm)
            norm1 = own[0] if own[0].shape == (4,) else None
            if norm1 is not None and parallel_state.get_pipeline_model_parallel_rank():
                torch.testing.assert_close(norm1.grad, clipped)
    # A rank without parameters takes part.
    norm, _ = torch_norm({"norm1": whole["norm1"]}, 1.0, 2.0)
    last = parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_size() - 1
    torch.testing.assert_close(clip_grad_norm([parameter(whole["norm1"])] if last else [], 1.0), norm)


def check_shards() -> None:
    """Each replica has pieces of the parameters, as with ZeRO-1; each group of replicas has all."""
    whole = whole_gradients()
    for count in {1, parallel_state.get_data_parallel_size()}:
        norm, clipped = torch_norm(whole, 0.5, 2.0)
        optimizer = Zero1Optimizer(part_of_rank(whole), torch.optim.SGD, lr=0.1, sharding_groups=count)
        optimizer.reduce_gradients()
        torch.testing.assert_close(optimizer.gradient_norm(), norm)
        torch.testing.assert_close(optimizer.clip_gradients(0.5), norm)
        for shard, piece, _ in optimizer.shards():
            if shard.parameter == 0 and parallel_state.get_pipeline_model_parallel_rank():
                torch.testing.assert_close(piece.grad, clipped[shard.start : shard.stop])
    with pytest.raises(ValueError, match=r"clip_gradients\(\) of .*Give torch's error_if_nonfinite by name"):
        clip_grad_norm([parameter(whole["norm0"])], 0.5, 2.0, True)


def _given_parameters(rank: int) -> None:
    for tensor, pipeline in ((2, 1), (1, 2)):
        parallel_state.initialize_model_parallel(tensor, pipeline)
        check_synthetic()
        check_shards()
        parallel_state.destroy_model_parallel()


def test_norms_of_given_parameters_and_of_pieces_of_zero1_are_those_of_torch() -> None:
    """As NxD's scripts call it: with parts that several ranks hold, a tied copy, and pieces of two replicas."""
    run_ranks(4, _given_parameters)
