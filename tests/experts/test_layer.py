"""The way of tokens to experts of a module of one's own: uneven and empty experts, and inputs without a gradient."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxdpp
from nxdpp import NxDPPModel, expert_parallelize, parallel_state
from nxdpp.gradients.average import bucket_allreduce_gradients, reduce_gradients
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.initialization.parts import own_part
from tests.support.expert_models import make
from tests.support.run_ranks import run_ranks

WIDTH = 6
MICROBATCHES = 2


class Experts(nn.Module):
    """Four experts in one parameter, with the choices behind their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.offset = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for slot in range(chosen.shape[1]):
            product = torch.einsum("nh,nhj->nj", x, self.matrix[chosen[:, slot]]) + self.offset[chosen[:, slot]]
            total = total + weights[:, slot : slot + 1] * product.tanh()
        return total


class _Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))


class ExpertsInside(nn.Module):
    """Four experts, the rows of one after those of the other, in a parameter of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.inside = 4, _Matrices()

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        matrices = self.inside.matrix.view(self.num_experts, WIDTH, WIDTH)
        products = torch.einsum("nh,nkhj->nkj", x, matrices[chosen])
        return torch.einsum("nkj,nk->nj", products.tanh(), weights).unsqueeze(1)


class ListedExperts(nn.Module):
    """Four experts, which are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Layer(nn.Module):
    """Two of four experts for each token; ``towards`` 3 sends all tokens to the last two experts."""

    def __init__(self, towards: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts()
        with torch.no_grad():
            self.router.bias.copy_(towards * torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mixed: Tensor = x + self.experts(x, weights=weights, chosen=chosen).view_as(x)
        return mixed


class Model(nn.Module):
    """A loss over layers of experts, the first of which gets the inputs as they are."""

    def __init__(self, towards: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(towards) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PLAN = {"layers.*.experts.matrix": "grouped_gemm", "layers.*.experts.offset": "grouped_gemm"}
INSIDE = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.inside.matrix": "grouped_gemm"}


def _made(towards: float) -> Model:
    torch.manual_seed(3)
    return Model(towards).double()


def _inputs(replica: int) -> Tensor:
    # Of the first replica one row of a microbatch, of the second three.
    rows = MICROBATCHES * (1 + 2 * replica)
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))


def _experts(model: Model, layer: int) -> Any:
    return model.get_submodule(f"layers.{layer}.experts")


def _differences(
    towards: float,
    schedule: str,
    frozen: bool,
    accumulated: bool = False,
    reduction: str = "mean",
    shared: bool = False,
    inside: bool = False,
) -> dict[str, float]:
    """Differences above rounding of gradients, in two steps that add up where these are means."""
    model = _made(towards)
    if inside:
        for layer in model.layers:
            layer.experts = ExpertsInside().double()
    if shared:
        model.first = model.layers[0]
        _experts(model, 2).matrix = _experts(model, 0).matrix
    model.layers[0].router.requires_grad_(not frozen)
    whole = copy.deepcopy(model)
    wrapped = NxDPPModel(
        expert_parallelize(model, INSIDE if inside else PLAN),
        transformer_layer_cls=Layer,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        gradient_reduction=reduction,
    )
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    if accumulated:
        with wrapped.no_sync():
            wrapped.run_train(x=_inputs(replica))
    for step in range(2 if reduction == "mean" else 1):
        wrapped.run_train(x=_inputs(replica))
        for each in range(replicas):
            for part in _inputs(each).chunk(MICROBATCHES):
                share = 1 / MICROBATCHES / replicas if reduction == "mean" else 1
                (whole(part) * (1 + (accumulated and step == 0)) * share).backward()
    found = {}
    for name, parameter in wrapped.local_named_parameters():
        theirs = whole.get_parameter(name).grad
        if theirs is None or parameter.grad is None:
            assert parameter.grad is theirs, name
        else:
            found[name] = float((parameter.grad - own_part(theirs, parameter)).abs().max())
    return {name: value for name, value in found.items() if not value <= 1e-12}


def _train(rank: int, pipeline: int) -> dict[Any, dict[str, float]]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=2)
    cases: list[tuple[Any, ...]] = [
        (0.0, "1f1b", False),
        # Rank 0 of the expert group gets no token.
        (30.0, "1f1b", True),
        (30.0, "zb-h1", False),
        (0.0, "1f1b", False, True),
        (0.0, "1f1b", False, False, "sum"),
        (0.0, "1f1b", False, False, "mean", False, True),
        (30.0, "1f1b", False, False, "mean", False, True),
    ]
    return {case: found for case in cases if (found := _differences(*case))}


def test_uneven_and_empty_experts_are_exact() -> None:
    assert run_ranks(2, _train, 1) == [{}, {}]


def test_uneven_and_empty_experts_are_exact_over_two_stages() -> None:
    assert run_ranks(4, _train, 2) == [{}] * 4


def _message(call: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def _refusals(rank: int) -> list[str]:
    sizes: list[Any] = [3, 0, 2.0]
    refused = [
        _message(lambda size=size: parallel_state.initialize_model_parallel(expert_model_parallel_size=size))
        for size in sizes
    ]
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, data_parallel_shard_size=1)
    divided = expert_parallelize(_made(0.0), PLAN)
    single = _made(0.0)
    _experts(single, 1).matrix = nn.Parameter(torch.zeros(3, WIDTH, WIDTH, dtype=torch.float64))
    uneven = make("mixtral", 1)
    uneven.model.layers[0].mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(6, 48, 16))
    wrapped = NxDPPModel(expert_parallelize(_made(0.0), PLAN), transformer_layer_cls=Layer)
    trained = list(wrapped.local_parameters())
    profiled: dict[str, Any] = {"partition": "profiled", "partition_batch": {"x": _inputs(0)}}
    control = parallel_state.get_replica_control_group()
    return [
        *refused,
        _message(lambda: parallel_state.initialize_model_parallel(data_parallel_shard_size=1)),
        _message(lambda: expert_parallelize(divided, PLAN)),
        _message(lambda: expert_parallelize(wrapped, PLAN)),
        _message(lambda: expert_parallelize(nn.Linear(2, 2))),
        _message(lambda: expert_parallelize(ListedExperts())),
        _message(lambda: expert_parallelize(ListedExperts(), {"experts.*.weight": "grouped_gemm"})),
        _message(lambda: expert_parallelize(nn.DataParallel(_made(0.0)), PLAN)),
        _message(lambda: expert_parallelize(uneven)),
        _message(lambda: expert_parallelize(_made(0.0), {"layers.*.expert": "grouped_gemm"})),
        _message(lambda: expert_parallelize(_made(0.0), {"layers.*.experts.matrix": "colwise"})),
        _message(lambda: expert_parallelize(_made(0.0), {"layers.*.router.weight": "grouped_gemm"})),
        _message(lambda: expert_parallelize(single, {"layers.*.experts.matrix": "grouped_gemm"})),
        _message(lambda: NxDPPModel(divided, transformer_layer_cls=Layer, check_against_module="first")),
        _message(lambda: NxDPPModel(divided, transformer_layer_cls=Layer, **profiled)),
        _message(lambda: nxdpp.tensor_parallelize(divided, {}, sequence_parallel=True)),
        _message(lambda: reduce_gradients(trained, parallel_state.get_data_parallel_group(), control)),
        _message(nxdpp.neuronx_distributed_config),
        _message(lambda: nxdpp.fully_shard(wrapped)),
        _message(lambda: nxdpp.apply_compile(wrapped, backend="eager")),
        _message(lambda: wrapped.generate(torch.zeros(1, 1))),
        _message(lambda: Zero1Optimizer(wrapped.local_parameters(), torch.optim.SGD, sharding_groups=2)),
        _message(lambda: bucket_allreduce_gradients([torch.zeros(1)])),
    ]


REFUSED = [
    "expert_model_parallel_size=3 must divide the 2 data-parallel ranks",
    "expert_model_parallel_size=0 must divide the 2 data-parallel ranks",
    "expert_model_parallel_size=2.0 must be a whole number of at least 1",
    "already initialized with expert_model_parallel_size=2, which differs from expert_model_parallel_size=1",
    "the experts of the model are divided already",
    "takes a model before it is wrapped, not a NxDPPModel",
    "Linear has no plan for experts",
    "the experts in experts are modules, which their block calls one by one",
    "experts that are modules in a list have to become one parameter (experts, ...) first",
    "the model, a DataParallel, runs its module as a whole",
    "have different numbers of experts along dimension 0: {'gate_up_proj': 6, 'down_proj': 4}",
    "the plan names layers.*.expert, which Model does not have",
    "unknown styles in the plan: colwise",
    "layers.0.router, a Linear, takes input: experts over ranks take hidden states",
    "the 3 experts of layers.1.experts do not divide by expert_model_parallel_size=2",
    "does not go with check_against_module='first'",
    "does not go with partition='profiled', which runs layers on one rank: leave it out",
    "expert_parallelize was not compared with sequence_parallel=True",
    "reduce_gradients sums over one group",
    "the trainer divides no experts: wrap the model by NxDPPModel(nxdpp.expert_parallelize(model), ...)",
    "fully_shard does not go with data_parallel_shard_size next to expert_parallelize",
    "compiled layers were not compared: leave apply_compile out",
    "generate with expert_model_parallel_size=1",
    "leave sharding_groups out",
    "expert_model_parallel_size=2): wrap the model, whose run_train averages them",
]


def test_what_is_not_supported_is_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert [text for text, message in zip(REFUSED, messages, strict=True) if text not in message] == []


def _refuses_parts_of_experts(rank: int) -> None:
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    model = nxdpp.tensor_parallelize(make("mixtral", 1))
    before = dict(model.named_parameters())
    message = "has tensor-parallel parameters already.*call tensor_parallelize\\(expert_parallelize\\(model\\)\\)"
    with pytest.raises(ValueError, match=message):
        expert_parallelize(model)
    assert all(before[name] is each for name, each in model.named_parameters())


def test_experts_that_tensor_ranks_have_divided_are_refused() -> None:
    run_ranks(4, _refuses_parts_of_experts)


def _with_shared_experts(rank: int, pipeline: int) -> dict[str, float]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline, expert_model_parallel_size=2)
    return _differences(0.0, "1f1b", False, shared=True)


def test_a_layer_of_two_names_and_one_parameter_of_two_layers_are_exact() -> None:
    assert run_ranks(2, _with_shared_experts, 1) == [{}, {}]


def test_one_parameter_of_experts_on_two_stages_is_exact() -> None:
    assert run_ranks(4, _with_shared_experts, 2) == [{}] * 4


class _Skipping(Layer):
    """A layer that leaves its experts out for some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x[0, 0] == 1 else super().forward(x)


def _mistakes(rank: int, case: str) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model, kind = _made(0.0), _Skipping if case == "skipped" else Layer
    for layer in model.layers:
        layer.__class__ = kind
    wrapped = NxDPPModel(expert_parallelize(model, PLAN), transformer_layer_cls=kind, num_microbatches=MICROBATCHES)
    inputs = _inputs(0)
    if case == "skipped":
        inputs[:, 0] = rank
    if case == "evaluation" and rank == 1:
        wrapped.run_eval(x=inputs)
    elif case == "microbatches":
        wrapped.run_train_microbatches([{"x": inputs}] * (1 + rank))
    elif case == "values" and rank == 2:
        with torch.no_grad():
            for name, parameter in wrapped.local_named_parameters():
                if "experts" in name:
                    parameter.add_(1.0)
    wrapped.run_train(x=inputs)


@pytest.mark.parametrize(
    ("case", "ranks", "text"),
    [
        ("evaluation", 2, "evaluation of experts over ranks.*Make the same calls"),
        ("microbatches", 2, "microbatches: 1"),
        ("skipped", 2, r"sends tokens of layers\.\d\.experts, microbatch 0 .*every replica must call the same experts"),
        ("values", 4, "data-parallel rank 2 has other values than data-parallel rank 0 in the parts"),
    ],
)
def test_a_mistake_of_one_replica_is_named(case: str, ranks: int, text: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)RuntimeError: .*{text}"):
        run_ranks(ranks, _mistakes, case)
