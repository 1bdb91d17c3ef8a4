"""The fake accelerator computes what the CPU computes, and finds what CUDA would do wrong in silence.

The type is registered for the rest of a process, so each test has a process of its own.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import fake_device
from tests.support.run_ranks import run_ranks

REASON = fake_device.why_not()
# The first test may build the library.
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
    pytest.mark.cpu_only("its ranks start the fake accelerator"),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    fake_device.built()


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    return run_ranks(1, _installed, function, args)[0]


def _installed(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    fake_device.install()
    return function(*args)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def train(device: str, attention: str, **settings: Any) -> tuple[list[float], list[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(  # type: ignore[call-arg]  # attn_implementation is an argument of a base class
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model: torch.nn.Module = LlamaForCausalLM(config).double()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    losses = []
    for step in range(3):
        ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


def _trains_as_on_the_cpu(attention: str) -> None:
    expected_losses, expected = train("cpu", attention, foreach=False)
    for settings in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        losses, parameters = train("fake", attention, **settings)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama_trains_as_on_the_cpu(attention: str) -> None:
    in_a_process(_trains_as_on_the_cpu, attention)


def _computes(device: str) -> list[torch.Tensor]:
    functions = torch.nn.functional
    drawn = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    first, second, third = (tensor.to(device).requires_grad_() for tensor in drawn)
    rows = torch.tensor([2, 0, 2, 1]).to(device)
    results = [
        functions.mse_loss(first, second),
        functions.smooth_l1_loss(first, second),
        functions.huber_loss(first, second, reduction="sum"),
        functions.cross_entropy(first, rows),
        functions.layer_norm(first, (6,), second[0], third[0]),
        functions.batch_norm(first, None, None, training=True),
        functions.conv1d(first[None], second[None, :, :3]),
        functions.embedding(rows, first),
        functions.softmax(first, -1) @ second.t(),
        torch.cat([first, second]).sort(dim=0).values,
        first[rows],
        torch.where(first > 0, second, third).cumsum(1),
        torch.einsum("ij,kj->ik", first, third),
        first.t().reshape(3, 8).std(0),
        torch.linalg.vector_norm(first, dim=1),
        first.topk(2).values,
        functions.gelu(first, approximate="tanh"),
        torch.view_as_complex(first.reshape(12, 2).contiguous()).abs(),
        torch.view_as_complex(first.reshape(12, 2)).conj().clone().angle(),
        torch.view_as_complex(first.reshape(12, 2)).conj().imag.clone(),
        torch.full_like(first, 2.0).masked_fill(first < 0, 0.0).scatter_add(0, rows[None, :4], second[:1, :4]),
    ]
    assert device == "cpu" or torch.histc(rows.int(), 3, 0, 2).tolist() == [1, 1, 2]
    half = torch.nn.LayerNorm(6, dtype=torch.bfloat16, device=device)
    results.append(half(first.bfloat16()).double())
    norm = torch.nn.BatchNorm1d(6).double().to(device).eval()
    results.append(norm(first))
    torch.stack([result.square().sum() for result in results]).sum().backward()
    return [tensor.detach().cpu() for tensor in [*results, *(each.grad for each in (first, second, third))]]


def _equals_the_cpu() -> None:
    torch.testing.assert_close(_computes("fake"), _computes("cpu"), rtol=1e-12, atol=1e-12)


def test_operators_equal_those_of_the_cpu() -> None:
    in_a_process(_equals_the_cpu)


def _is_freed_and_given_again() -> None:
    first = torch.ones(1000, device="fake")
    address = first.data_ptr()
    view = first.as_strided((4,), (1,))
    storage = first.untyped_storage()
    assert storage.data_ptr() == address
    del first, view, storage
    second = torch.empty(1000, device="fake")
    assert second.data_ptr() == address
    assert second.isnan().all()


def test_freed_memory_is_not_a_number() -> None:
    in_a_process(_is_freed_and_given_again)


def _runs_late() -> None:
    pinned = torch.zeros(4).pin_memory()
    tensor = torch.ones(4, device="fake")
    pinned.copy_(tensor, non_blocking=True)
    assert not pinned.any()
    torch.accelerator.synchronize()
    assert pinned.all()


def test_kernels_run_late() -> None:
    in_a_process(_runs_late)


def _touches() -> None:
    import ctypes

    tensor = torch.ones(4, device="fake")
    assert ctypes.c_float.from_address(tensor.data_ptr()).value


def test_host_that_touches_memory_faults() -> None:
    with pytest.raises(AssertionError, match="the host touched memory of the device") as caught:
        in_a_process(_touches)
    assert "SIGSEGV" in str(caught.value)
    assert "in _touches" in str(caught.value)


def _misses_waits() -> list[str]:
    compute, side = torch.accelerator.current_stream(), torch.Stream("fake")
    tensor = torch.ones(8, device="fake")

    def read_on_side() -> torch.Tensor:
        with side:
            return tensor * 2

    errors = [error_of(read_on_side)]
    side.wait_stream(compute)
    doubled = read_on_side()
    errors.append(error_of(lambda: doubled.sum()))
    errors.append(error_of(lambda: tensor.zero_()))
    compute.wait_stream(side)
    assert doubled.sum().item() == 16
    # Other bytes of the same memory are no conflict.
    tensor[:4].add_(1)
    with side:
        tensor[4:].add_(1)
    errors.append(error_of(lambda: tensor.sum()))
    torch.accelerator.synchronize()
    assert tensor.sum().item() == 16
    return errors


def test_missing_wait_is_an_error() -> None:
    first, second, third, fourth = in_a_process(_misses_waits)
    assert "stream 1 of fake:0 reads memory in aten::mul" in first
    assert "stream 0 of fake:0 writes it in aten::fill_" in first
    assert "_misses_waits" in first
    assert "read_on_side" in first
    assert "stream 0 of fake:0 reads memory in aten::sum" in second
    assert "stream 0 of fake:0 writes memory in aten::zero_" in third
    assert "aten::sum" in fourth


def _frees_early(records: bool) -> str:
    side = torch.Stream("fake")
    tensor = torch.ones(8, device="fake")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = tensor * 2
    address = tensor.data_ptr()
    if records:
        tensor.record_stream(side)
    del tensor
    error = error_of(lambda: torch.empty(100, device="fake"))
    if records:
        # Another stream has not left the memory.
        assert torch.empty(8, device="fake").data_ptr() != address
        with side:
            assert doubled.sum().item() == 16
    return error


def _frees_after_a_wait() -> None:
    compute, side = torch.accelerator.current_stream(), torch.Stream("fake")
    tensor = torch.ones(8, device="fake")
    side.wait_stream(compute)
    with side:
        tensor * 2
    address = tensor.data_ptr()
    del tensor
    # As in FSDP2: the stream that gets the memory waits before it allocates.
    compute.wait_stream(side)
    assert torch.empty(8, device="fake").data_ptr() == address


def test_wait_after_the_end_of_a_tensor() -> None:
    in_a_process(_frees_after_a_wait)


def test_missing_record_stream_is_an_error() -> None:
    error = in_a_process(_frees_early, False)
    assert "32 bytes of stream 0 of fake:0 are given to the next tensor while stream 1 of fake:0 may" in error
    assert "record_stream" in error
    assert in_a_process(_frees_early, True) == "no error"


def _autocasts() -> None:
    linear = torch.nn.Linear(4, 4, device="fake")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("fake", dtype=dtype):
            product = linear(torch.ones(2, 4, device="fake"))
            loss = torch.nn.functional.mse_loss(product, torch.ones_like(product))
        assert product.dtype is dtype
        assert loss.dtype is torch.float32


def test_autocast() -> None:
    in_a_process(_autocasts)


def _draws() -> None:
    torch.manual_seed(3)
    first = torch.rand(4, device="fake")
    state = torch.fake.get_rng_state()  # type: ignore[attr-defined]
    second = torch.nn.functional.dropout(torch.ones(64, device="fake"))
    assert set(second.tolist()) == {0.0, 2.0}
    torch.fake.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(second, torch.nn.functional.dropout(torch.ones(64, device="fake")))
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4, device="fake"))
    own = torch.Generator("fake").manual_seed(3)
    assert torch.equal(first, torch.rand(4, device="fake", generator=own))
    host = torch.Generator()
    assert "Expected a 'fake' device type" in error_of(lambda: torch.rand(4, device="fake", generator=host))


def test_generator() -> None:
    in_a_process(_draws)


def _recomputes() -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(64, device="fake", requires_grad=True)
    for reentrant in (False, True):
        weight.grad = None
        dropped = checkpoint(
            lambda tensor: torch.nn.functional.dropout(tensor) * tensor, weight, use_reentrant=reentrant
        )
        dropped.sum().backward()
        # The recomputation drops what the forward has dropped: the gradient of mask * w * w is 2 * mask * w.
        assert weight.grad is not None
        assert torch.equal(weight.grad, 2 * dropped.detach())


def test_recomputation_draws_the_same_numbers() -> None:
    in_a_process(_recomputes)


def _counts_waits() -> None:
    tensor = torch.ones(4, device="fake")
    with fake_device.host_waits() as none:
        (tensor * 2).sum()
        torch.ones(4).pin_memory().to("fake", non_blocking=True)
    assert not none
    for wait in (
        lambda: tensor.sum().item(),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 0],
        lambda: torch.equal(tensor, tensor),
        lambda: bool(tensor.any()),
        lambda: tensor.cpu(),
        lambda: torch.ones(4).to("fake"),
        lambda: torch.accelerator.synchronize(),
    ):
        with fake_device.host_waits() as found:
            wait()
        assert len(found) == 1
        assert __file__ in next(iter(found))


def test_waits_of_the_host_are_counted() -> None:
    in_a_process(_counts_waits)


def _refuses_host_tensors() -> str:
    tensor = torch.ones(4, device="fake")
    assert (tensor + torch.tensor(1.0)).sum().item() == 8
    return error_of(lambda: tensor + torch.ones(4))


def test_host_tensors_are_refused() -> None:
    assert "Expected all tensors to be on the same device" in in_a_process(_refuses_host_tensors)


def _times() -> None:
    start, end = (torch.Event("fake", enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(4, device="fake")
    end.record()
    assert "must be completed" in error_of(lambda: start.elapsed_time(end))
    assert not end.query()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_events() -> None:
    in_a_process(_times)


def _backward_has_a_thread() -> bool:
    import threading

    threads = set()

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.add(threading.get_ident())
            return gradient

    Noted.apply(  # type: ignore[no-untyped-call]
        torch.ones(3, device="fake", requires_grad=True)
    ).sum().backward()
    return threading.get_ident() not in threads


def test_backward_has_its_own_thread() -> None:
    assert in_a_process(_backward_has_a_thread)


def _errors_come_later() -> str:
    table = torch.nn.Embedding(4, 2, device="fake")
    rows = table(torch.tensor([7], device="fake"))
    return error_of(lambda: rows.sum().item())


def test_error_of_a_kernel_comes_later() -> None:
    error = in_a_process(_errors_come_later)
    assert "a kernel failed" in error
    assert "aten::embedding" in error or "aten::index_select" in error
    assert "_errors_come_later" in error


def _several_devices() -> None:
    assert torch.accelerator.device_count() == 2
    first = torch.ones(4, device="fake:0")
    second = first.to("fake:1")
    assert "same device" in error_of(lambda: first + second)
    assert second.sum().item() == 4


def test_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICES", "2")
    in_a_process(_several_devices)


def _keeps_pinned_memory() -> None:
    source = torch.ones(256).pin_memory()
    address = source.data_ptr()
    copy = source.to("fake", non_blocking=True)
    del source
    assert torch.empty(256, pin_memory=True).data_ptr() != address
    assert copy.sum().item() == 256
    again = [torch.empty(256, pin_memory=True) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]


def test_pinned_memory_is_kept_for_late_copies() -> None:
    in_a_process(_keeps_pinned_memory)


def _memory_is_counted() -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.ones(1024, device="fake")
    assert torch.accelerator.memory_allocated() - before == 4096
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + 4096
    torch.fake.empty_cache()  # type: ignore[attr-defined]
    assert torch.fake.memory_reserved() < 4096  # type: ignore[attr-defined]
    assert os.environ.get("FAKE_DEVICES") is None


def test_memory_is_counted() -> None:
    in_a_process(_memory_is_counted)
