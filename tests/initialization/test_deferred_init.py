"""Bit-for-bit results of ``deferred_init`` for torch's modules and for operations in constructors."""

import copy
import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional, init
from torch.nn.utils import parametrizations

from nxdpp import deferred_init
from nxdpp.initialization.record import record_of
from tests.initialization.eager_and_deferred import check
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(30, 17),
    "LSTM": lambda: nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=5, add_bias_kv=True),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 5)),
    "deepcopy": lambda: copy.deepcopy(nn.LSTM(4, 5)),
    "half": lambda: nn.Linear(30, 40).half(),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    check(MODULES[name])


def initialised(change: Callable[[torch.Tensor], object], shape: tuple[int, ...] = (9, 5)) -> Callable[[], nn.Module]:
    """A constructor that calls ``change`` on a parameter of zeros, between two random parameters."""

    def make() -> nn.Module:
        module = nn.Linear(3, 7)
        weight = nn.Parameter(torch.zeros(shape))
        with torch.no_grad():
            change(weight)
        module.register_parameter("changed", weight)
        module.register_parameter("after", nn.Parameter(torch.randn(3)))
        return module

    return make


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def draw_under_another_seed(tensor: torch.Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        init.normal_(tensor)


def write_numpy(tensor: torch.Tensor) -> None:
    array = np.arange(45.0).reshape(9, 5)
    tensor.copy_(torch.from_numpy(array))
    array[:] = 0


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "orthogonal_ wide": lambda t: init.orthogonal_(t.t()),
    "trunc_normal_": lambda t: init.trunc_normal_(t, std=0.02),
    "bernoulli_ tensor": lambda t: t.bernoulli_(torch.rand(9, 5)),
    "sparse_": lambda t: init.sparse_(t, 0.3),
    "exponential_": lambda t: t.exponential_(),
    "randperm": lambda t: t.copy_(torch.randperm(45).view(9, 5)),
    "dropout": lambda t: t.copy_(functional.dropout(torch.ones(9, 5), 0.3)),
    "random_": lambda t: t.random_(0, 9),
    "own generator": lambda t: init.normal_(t, generator=torch.Generator().manual_seed(3)),
    "every second column": lambda t: t[:, ::2].normal_(),
    "mask": lambda t: t.normal_().__setitem__(t > 0, 0.0),
    "nonzero": lambda t: t.view(-1)[torch.randn(45).nonzero()[:3, 0]].fill_(2.0),
    "data": lambda t: set_data(t, torch.randn(3, 4)),
    "data of tensors": lambda t: set_data(t, torch.tensor([torch.rand(()), 2.0, torch.rand(()).item()])),
    "multinomial": lambda t: t.copy_(torch.multinomial(torch.rand(50), 45).view(9, 5)),
    "numpy": write_numpy,
    "tolist": lambda t: t.fill_(torch.rand(4).tolist()[2]),
    "if": lambda t: t.fill_(1.0 if torch.rand(1) > 0.5 else 2.0),
    "svd": lambda t: t[:5].copy_(torch.linalg.svd(torch.randn(5, 5))[2]),
    "devices": lambda t: t.copy_(torch.arange(45, device=t.device).view(9, 5).to(t.device).to("cpu").to(t).cpu()),
    "seeds": draw_under_another_seed,
    "swap": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.randn(4))),
    "foreach": lambda t: torch._foreach_mul_([t.normal_(), t], 2.0),
    "out": lambda t: torch.randn(9, 5, out=t.data),
    "resize_": lambda t: t.data.resize_(10, 6).normal_(),
    "vector_to_parameters": lambda t: nn.utils.vector_to_parameters(torch.randn(45), [t]),
    "overlapping copy": lambda t: t.normal_()[1:].copy_(t.clone()[:-1]),
    "copy of itself": lambda t: t[:5].copy_(t.normal_()[:5].t().clone()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_operations_in_constructors(name: str) -> None:
    check(initialised(CHANGES[name]))


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "causal mask": lambda: torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5),
    "random complex": lambda: torch.randn(5, dtype=torch.complex64),
    "empty": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name: str) -> None:
    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("made", BUFFERS[name](), persistent=False)
        return module

    check(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("draw", [torch.Tensor.normal_, torch.Tensor.uniform_])
@pytest.mark.parametrize("contiguous", [True, False])
def test_generator_state_after_any_number_of_draws(
    dtype: torch.dtype, draw: Callable[[torch.Tensor], torch.Tensor], contiguous: bool
) -> None:
    """Also with the second normal number of a pair left in the generator."""

    def make(count: int) -> nn.Module:
        module = nn.Module()
        odd = torch.randn(count % 5)
        tensor = torch.zeros(count, dtype=dtype) if contiguous else torch.zeros(count, 2, dtype=dtype)[:, 0]
        module.register_buffer("drawn", draw(tensor))
        module.register_buffer("odd", odd)
        return module

    for count in (*range(1, 10), *range(14, 19), 31, 32, 33, 2**18 - 1, 2**18 + 1):
        check(partial(make, count), seed=count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generator_state_after_a_large_tensor(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.register_buffer("normal", torch.empty(2**22 + 33, dtype=dtype).normal_())
        module.register_buffer("uniform", torch.empty(2**22 + 33, dtype=dtype).uniform_())
        return module

    check(make)


def test_tied_and_overlapping_parameters() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
        module[1].weight = module[0].weight
        both = torch.randn(10, 4)
        module.register_parameter("upper", nn.Parameter(both[:5]))
        module.register_parameter("lower", nn.Parameter(both[5:].t()))
        return module

    check(make)


def test_a_tensor_from_outside_is_copied() -> None:
    given = torch.randn(4, 3)
    before = given.clone()

    def make() -> nn.Module:
        module = nn.Linear(3, 4)
        module.weight.data.copy_(given)
        return module

    module = deferred_init(make)
    given.zero_()
    record = record_of(module)
    assert record is not None
    assert torch.equal(record.materialise(module.get_parameter("weight")), before)


def test_a_constructor_may_change_a_tensor_from_outside() -> None:
    given = torch.zeros(4, 3)

    def make() -> nn.Module:
        module = nn.Linear(3, 4)
        given.copy_(module.weight.data)
        given.add_(torch.ones(4, 3))
        return module

    torch.manual_seed(3)
    make()
    expected = given.clone()
    torch.manual_seed(3)
    deferred_init(make)
    assert torch.equal(given, expected)
    assert given.any()


def test_plain_attributes_have_values() -> None:
    class WithAttributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.anchors = torch.arange(4)
            self.levels = {"a": [torch.rand(2), 3]}
            self.again = self.anchors
            self.part = self.weight.data[:2]

    torch.manual_seed(0)
    eager = WithAttributes()
    torch.manual_seed(0)
    deferred = deferred_init(WithAttributes)
    assert torch.equal(deferred.anchors, eager.anchors)
    assert deferred.again is deferred.anchors
    assert torch.equal(deferred.levels["a"][0], eager.levels["a"][0])  # type: ignore[arg-type]
    assert deferred.part.is_meta


def test_unwritten_elements_are_zero_and_known() -> None:
    class Unwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Parameter(torch.empty(1000))
            self.partly = nn.Parameter(torch.empty(1000))
            self.partly.data[:500].normal_()

    module: Unwritten = deferred_init(Unwritten)
    record = record_of(module)
    assert record is not None
    assert not record.is_written(module.never)
    assert record.is_written(module.partly)
    assert not record.materialise(module.never).any()
    half = record.materialise(module.partly)
    assert half[:500].all()
    assert not half[500:].any()


def test_the_record_is_found_from_a_wrapper_and_freed_with_the_module() -> None:
    assert record_of(nn.Linear(2, 2)) is None
    module = deferred_init(nn.Linear, 3, 4, bias=False)
    assert module.bias is None
    assert record_of(nn.Sequential(module)) is record_of(module) is not None
    with pytest.raises(ValueError, match="several calls of deferred_init"):
        record_of(nn.Sequential(module, deferred_init(nn.Linear, 3, 4)))


AFTERWARDS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda module: module.half(), r"0\.weight was replaced after deferred_init"),
    "zeros_": (lambda module: init.zeros_(module.get_parameter("1.bias")), r"1\.bias was written to after"),
    "buffer": (lambda module: module.get_buffer("1.running_mean").add_(1), r"1\.running_mean was written to"),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_later_changes_are_refused(name: str) -> None:
    change, message = AFTERWARDS[name]
    module = deferred_init(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    change(module)
    with pytest.raises(RuntimeError, match=message):
        record_of(module)


def test_allowed_later_changes() -> None:
    module = deferred_init(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    module[0].weight = module[1].weight
    module[1].bias = nn.Parameter(torch.zeros(3))
    module[0].register_parameter("bias", None)
    module.append(nn.Linear(3, 3, device="meta"))
    module.requires_grad_(False).eval()
    assert record_of(module) is not None


def test_recording_and_materialising_need_no_other_memory() -> None:
    reset_peak()
    before = resident_bytes()
    module = deferred_init(lambda: nn.Sequential(*(nn.Linear(4000, 4000) for _ in range(20))))
    record = record_of(module)
    assert record is not None
    made = [record.materialise(part.get_parameter("weight")) for part in module[3:5].children()]
    bytes_made = sum(tensor.nbytes for tensor in made)
    assert bytes_made == 2 * 4000 * 4000 * 4
    assert peak_bytes() - before < bytes_made + 30 * 2**20


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "data_ptr": (lambda t: t.data_ptr(), "data_ptr on a tensor of shape"),
    "pickle": (lambda t: pickle.dumps(t), "no data"),
    "cuda": (lambda t: torch.zeros(2, device="cuda"), "for device cuda"),
    "sparse": (lambda t: torch.zeros(2, 2, layout=torch.sparse_coo), "only strided tensors"),
    "conjugate": (lambda t: torch.ones(2, dtype=torch.complex64).conj()[0], "resolve_conj"),
    "wrong shapes": (lambda t: t @ torch.ones(99, 2), "shapes"),
    "a meta tensor with others": (lambda t: t + torch.ones(9, 5, device="meta"), "tensors on meta and on the CPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        deferred_init(initialised(change))
    assert torch.ones(1).device.type == "cpu"
    check(lambda: nn.Linear(2, 3))
