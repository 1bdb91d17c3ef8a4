"""Cross-entropy of divided logits equals torch's on the gathered ones: values, gradients, memory."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from nxdpp.ranks import parallel_state
from nxdpp.tensor import loss_functions
from nxdpp.tensor.layers import ColumnParallelLinear
from nxdpp.tensor.loss_functions import parallel_cross_entropy
from nxdpp.tensor.utils import split_tensor_along_last_dim
from tests.support.run_ranks import run_ranks

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def _compare(shape: tuple[int, ...], vocabulary: int, smoothing: float, dtype: torch.dtype, ignored: bool) -> None:
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    generator = torch.Generator().manual_seed(5)
    whole = (torch.randn(*shape, vocabulary, generator=generator) * 8).to(dtype)
    labels = torch.randint(vocabulary, shape, generator=generator)
    if ignored:
        labels.view(-1)[::3] = -100
    weights = torch.randn(shape, generator=generator)
    own = split_tensor_along_last_dim(whole, size)[rank].clone().requires_grad_()
    before = own.detach().clone()
    found = parallel_cross_entropy(own, labels, smoothing)
    assert found.shape == labels.shape
    (found * weights).sum().backward()
    gathered = whole.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = functional.cross_entropy(
        gathered.view(-1, vocabulary), labels.view(-1), label_smoothing=smoothing, reduction="none"
    ).view(shape)
    (expected * weights).sum().backward()
    assert found.dtype == expected.dtype
    assert torch.equal(own.detach(), before)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert own.grad is not None
    assert gathered.grad is not None
    assert own.grad.dtype == dtype
    part = split_tensor_along_last_dim(gathered.grad, size)[rank].to(dtype)
    torch.testing.assert_close(own.grad, part, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    mean = functional.cross_entropy(gathered.view(-1, vocabulary), labels.view(-1), label_smoothing=smoothing)
    torch.testing.assert_close(found.sum() / (labels != -100).sum(), mean, rtol=1e-6, atol=1e-6)


def _all_cases(rank: int, size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for dtype in CLOSE:
        for smoothing in (0.0, 0.1):
            _compare((3, 5), 24, smoothing, dtype, ignored=smoothing != 0.1)
    with mock.patch.object(loss_functions, "_BYTES_AT_ONCE", 100):
        _compare((7,), 24, 0.1, torch.float32, ignored=True)
    _compare((2, 3, 4), 8, 0.0, torch.float32, ignored=False)
    _extremes(size)
    _certain_labels(size)
    for vocabulary in (11, 5):
        _padded(vocabulary)
    # Other devices tell it later.
    for label in (-1, 24) if torch.empty(0).is_cpu else ():
        with pytest.raises(IndexError, match=f"label {label} is outside of the vocabulary of 24"):
            parallel_cross_entropy(torch.zeros(1, 24 // size), torch.tensor([label]))
    with pytest.raises(ValueError, match="label_smoothing=2"):
        parallel_cross_entropy(torch.zeros(1, 8), torch.zeros(1, dtype=torch.long), 2)
    with pytest.raises(ValueError, match=r"labels of shape \(2,\)"):
        parallel_cross_entropy(torch.zeros(1, 8), torch.zeros(2, dtype=torch.long))
    parallel_state.destroy_model_parallel()


def _certain_labels(size: int) -> None:
    """Gradients of labels with a probability near 1 are small differences, and have all digits of float32."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    whole = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(64) % 8
    whole[torch.arange(64), labels] += torch.linspace(10, 40, 64)
    own = split_tensor_along_last_dim(whole, size)[rank].clone().requires_grad_()
    parallel_cross_entropy(own, labels).sum().backward()
    exact = whole.double().requires_grad_()
    functional.cross_entropy(exact, labels, reduction="sum").backward()
    assert own.grad is not None
    assert exact.grad is not None
    expected = split_tensor_along_last_dim(exact.grad, size)[rank]
    is_label = functional.one_hot(labels, 8).bool().chunk(size, -1)[rank]
    for columns, rtol, atol in ((~is_label, 1e-5, 0), (is_label, 1e-5, 3e-7)):
        torch.testing.assert_close(own.grad.double()[columns], expected[columns], rtol=rtol, atol=atol)


def _padded(vocabulary: int) -> None:
    """Columns of padding, which the last ranks have, do not count; a rank may have no other ones."""
    torch.manual_seed(0)
    head = ColumnParallelLinear(6, vocabulary, gather_output=False, pad=True)
    torch.manual_seed(0)
    whole = nn.Linear(6, vocabulary)
    x = torch.randn(vocabulary + 1, 6)
    labels = torch.tensor([*range(vocabulary), -100])
    for smoothing in (0.0, 0.3):
        given, theirs = (x.clone().requires_grad_() for _ in range(2))
        logits = head(given)
        logits.retain_grad()
        found = parallel_cross_entropy(logits, labels, smoothing, vocabulary_size=vocabulary)
        expected = functional.cross_entropy(whole(theirs), labels, label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(given.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        own = vocabulary - parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        assert not logits.grad[:, max(0, own) :].any()
    columns = head.padded_size
    if columns > vocabulary and logits.is_cpu:
        with pytest.raises(IndexError, match=f"label {vocabulary} is outside of the vocabulary of {vocabulary}"):
            parallel_cross_entropy(logits.detach()[:1], torch.tensor([vocabulary]), vocabulary_size=vocabulary)
    for wrong in (0, columns + 1):
        with pytest.raises(ValueError, match=f"vocabulary_size={wrong} must be from 1 to {columns}"):
            parallel_cross_entropy(logits.detach(), labels, vocabulary_size=wrong)


def _extremes(size: int) -> None:
    """Large logits do not overflow, and an ignored row has no gradient whatever its logits."""
    logits = torch.full((2, 24 // size), 3e4, dtype=torch.float16, requires_grad=True)
    with torch.no_grad():
        logits[1].fill_(float("inf"))
    losses = parallel_cross_entropy(logits, torch.tensor([0, -100]))
    losses.sum().backward()
    torch.testing.assert_close(losses, torch.tensor([24.0, 1.0]).log())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert not logits.grad[1].any()


def test_losses_and_gradients_equal_those_of_the_gathered_logits() -> None:
    run_ranks(4, _all_cases, 4)
