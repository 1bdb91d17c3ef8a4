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
    "Embedding": lambda: nn.Embedding(10, 7, padding_idx=3),
    "Conv2d": lambda: nn.Conv2d(3, 8, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 4, 2),
    "LSTM": lambda: nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(3, 5),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=5, add_bias_kv=True),
    "Transformer": lambda: nn.Transformer(8, 2, 2, 2, 16),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "PReLU": lambda: nn.PReLU(3),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 5)),
    "deepcopy": lambda: copy.deepcopy(nn.LSTM(4, 5)),
    "half": lambda: nn.Linear(30, 40).half(),
    "double": lambda: nn.Linear(30, 40).double(),
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
    "orthogonal_": lambda t: init.orthogonal_(t),
    "orthogonal_ wide": lambda t: init.orthogonal_(t.t()),
    "trunc_normal_": lambda t: init.trunc_normal_(t, std=0.02),
    "sparse_": lambda t: init.sparse_(t, 0.3),
    "eye_": lambda t: init.eye_(t),
    "dirac_": lambda t: init.dirac_(t.view(3, 3, 5)),
    "exponential_": lambda t: t.exponential_(),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ tensor": lambda t: t.bernoulli_(torch.rand(9, 5)),
    "geometric_": lambda t: t.geometric_(0.3),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(0, 9),
    "own generator": lambda t: init.normal_(t, generator=torch.Generator().manual_seed(3)),
    "rows": lambda t: [init.normal_(row) for row in t],
    "transposed": lambda t: t.t().normal_(),
    "every second column": lambda t: t[:, ::2].normal_(),
    "mask": lambda t: t.normal_().__setitem__(t > 0, 0.0),
    "nonzero": lambda t: t.view(-1)[torch.randn(45).nonzero()[:3, 0]].fill_(2.0),
    "unique": lambda t: t.fill_(float(len(torch.randint(0, 9, (9,)).unique()))),
    "data": lambda t: set_data(t, torch.randn(3, 4)),
    "data of a list": lambda t: set_data(t, torch.FloatTensor([[1, 2], [3, 4]])),
    "data of tensors": lambda t: set_data(t, torch.tensor([torch.rand(()), 2.0, torch.rand(()).item()])),
    "new_tensor": lambda t: set_data(t, t.new_tensor([2.0, 3])),
    "randperm": lambda t: t.copy_(torch.randperm(45).view(9, 5)),
    "multinomial": lambda t: t.copy_(torch.multinomial(torch.rand(50), 45).view(9, 5)),
    "dropout": lambda t: t.copy_(functional.dropout(torch.ones(9, 5), 0.3)),
    "normal of tensors": lambda t: t.copy_(torch.normal(torch.rand(9, 5), torch.rand(9, 5))),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "numpy": write_numpy,
    "item": lambda t: t.normal_(0, torch.linspace(0, 1, 5)[3].item()),
    "tolist": lambda t: t.fill_(torch.rand(4).tolist()[2]),
    "to numpy": lambda t: t.fill_(float(torch.rand(4).numpy()[2])),
    "if": lambda t: t.fill_(1.0 if torch.rand(1) > 0.5 else 2.0),
    "norm": lambda t: init.kaiming_normal_(t).div_(t.norm()),
    "svd": lambda t: t[:5].copy_(torch.linalg.svd(torch.randn(5, 5))[2]),
    "devices": lambda t: t.copy_(torch.arange(45, device=t.device).view(9, 5).to(t.device).to("cpu").to(t).cpu()),
    "device": lambda t: t.fill_(1.0 if t.device.type == "cpu" and t.is_cpu and not t.is_meta else 2.0),
    "seeds": draw_under_another_seed,
    "swap": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.randn(4))),
    "cat": lambda t: set_data(t, torch.cat([torch.randn(2, 3), torch.ones(2, 3)]).t()),
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
    "expanded": lambda: torch.arange(5).expand(3, 5),
    "complex": lambda: torch.polar(torch.ones(4), torch.rand(4)),
    "random complex": lambda: torch.randn(5, dtype=torch.complex64),
    "meshgrid": lambda: torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")),
    "scalar": lambda: torch.tensor(0.5),
    "empty": lambda: torch.randn(0, 3),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name: str) -> None:
    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("made", BUFFERS[name](), persistent=False)
        return module

    check(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
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

    for count in (*range(1, 41), 2**18 - 1, 2**18, 2**18 + 1, 2**19 + 17):
        check(partial(make, count), seed=count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_generator_state_after_a_large_tensor(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.register_buffer("normal", torch.empty(2**22 + 33, dtype=dtype).normal_())
        module.register_buffer("uniform", torch.empty(2**22 + 33, dtype=dtype).uniform_())
        return module

    check(make)


def test_explicit_generator_advances_as_in_the_constructor() -> None:
    def make(generator: torch.Generator) -> nn.Module:
        module = nn.Linear(5, 5)
        init.normal_(module.weight, generator=generator)
        module.bias.data.copy_(torch.randperm(5, generator=generator))
        return module

    used, deferred = (torch.Generator().manual_seed(3) for _ in range(2))
    make(used)
    deferred_init(make, deferred)
    assert torch.equal(used.get_state(), deferred.get_state())


def test_default_dtype_of_the_constructor() -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.TransformerEncoderLayer(8, 2, 16)
        finally:
            torch.set_default_dtype(torch.float32)

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


def test_meta_tensors_of_the_constructor_are_not_deferred() -> None:
    class OnMeta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Parameter(torch.ones(3))
            self.nowhere = nn.Parameter(torch.ones(3, device="meta") * 2)

    module = deferred_init(OnMeta)
    record = record_of(module)
    assert record is not None
    assert record.knows(module.here)
    assert not record.knows(module.nowhere)
    with pytest.raises(ValueError, match="was not made by the constructor"):
        record.materialise(module.nowhere)


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


def test_nested_deferred_init_only_calls() -> None:
    def make(build: Callable[..., nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), build(nn.Linear, 3, 2))

    torch.manual_seed(0)
    eager = make(lambda kind, *sizes: kind(*sizes))
    torch.manual_seed(0)
    deferred = deferred_init(make, deferred_init)
    record = record_of(deferred)
    assert record is not None
    for name, parameter in deferred.named_parameters():
        assert torch.equal(record.materialise(parameter), eager.get_parameter(name))


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


def test_numpy_of_a_deferred_tensor_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        deferred_init(initialised(lambda t: t.numpy().__setitem__(0, 1.0)))


def test_arguments() -> None:
    with pytest.raises(TypeError, match="constructor must be a class"):
        deferred_init(nn.Linear(2, 2).weight)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"returned a Tensor, not a torch\.nn\.Module"):
        deferred_init(torch.zeros, 3)  # type: ignore[type-var]
    with torch.device("meta"), pytest.raises(ValueError, match=r"outside of init_on_device"):
        deferred_init(nn.Linear, 2, 3)
