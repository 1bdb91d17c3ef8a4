"""Cross-entropy of divided logits equals torch's on the gathered ones: values, gradients, memory."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxdpp.parallel_layers import loss_functions, parallel_state
from nxdpp.parallel_layers.loss_functions import parallel_cross_entropy
from nxdpp.parallel_layers.utils import split_tensor_along_last_dim
from tests.support.run_ranks import run_ranks

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


class _LargestTensor(TorchDispatchMode):
    """Notes the largest storage other than that of ``known``, in bytes."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._known = known.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() != self._known:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


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
        for smoothing in (0.0, 0.1, 1.0):
            _compare((3, 5), 24, smoothing, dtype, ignored=smoothing != 0.1)
    with mock.patch.object(loss_functions, "_BYTES_AT_ONCE", 100):
        _compare((7,), 24, 0.1, torch.float32, ignored=True)
    _compare((2, 3, 4), 8, 0.0, torch.float32, ignored=False)
    _extremes(size)
    _memory()
    for label in (-1, 24):
        with pytest.raises(IndexError, match=f"label {label} is outside of the vocabulary of 24"):
            parallel_cross_entropy(torch.zeros(1, 24 // size), torch.tensor([label]))
    with pytest.raises(ValueError, match="label_smoothing=2"):
        parallel_cross_entropy(torch.zeros(1, 8), torch.zeros(1, dtype=torch.long), 2)
    with pytest.raises(ValueError, match=r"labels of shape \(2,\)"):
        parallel_cross_entropy(torch.zeros(1, 8), torch.zeros(2, dtype=torch.long))
    parallel_state.destroy_model_parallel()


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


def _memory() -> None:
    """No tensor is larger than this rank's logits, and only one is as large: their gradient."""
    rows, columns = 64, 4096
    logits = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(rows)
    with mock.patch.object(loss_functions, "_BYTES_AT_ONCE", columns * 4 * 4):
        with _LargestTensor(logits) as forward:
            losses = parallel_cross_entropy(logits, labels).sum()
        with _LargestTensor(logits) as backward:
            losses.backward()
    assert forward.nbytes <= columns * 4 * 4
    assert backward.nbytes == logits.nbytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_and_gradients_equal_those_of_the_gathered_logits(size: int) -> None:
    run_ranks(size, _all_cases, size)
