"""``backend`` and ``device``: each pair is honoured or refused, with a remedy."""

import re

import pytest

from nxdpp.ranks.device_arguments import wanted_device


def test_each_pair_that_fits() -> None:
    pairs = {
        (None, None): None,
        ("gloo", None): "cpu",
        ("nccl", None): "cuda",
        (None, "cpu"): "cpu",
        ("gloo", "cpu"): "cpu",
        (None, "cuda"): "cuda",
        ("nccl", "cuda"): "cuda",
        (None, "xla"): "xla",
        ("gloo", "xla"): "xla",
    }
    assert {pair: wanted_device(*pair) for pair in pairs} == pairs


@pytest.mark.parametrize(
    ("backend", "device", "needed"), [("nccl", "xla", "gloo"), ("nccl", "cpu", "gloo"), ("gloo", "cuda", "nccl")]
)
def test_a_backend_that_does_not_serve_the_device(backend: str, device: str, needed: str) -> None:
    expected = (
        f"backend='{backend}' does not serve device='{device}', which communicates over {needed}: leave backend out, "
        f"or give backend='{needed}'"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        wanted_device(backend, device)
    assert wanted_device(None, device) == wanted_device(needed, device) == device


@pytest.mark.parametrize("device", ["tpu", "cuda:0", "", "XLA", 0, ["xla"]])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(ValueError, match=r"^device=.* must be 'cpu', 'cuda', .* or 'xla', for torch_xla's device"):
        wanted_device(None, device)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"^backend='xla' must be 'gloo', for the CPU, or 'nccl'"):
        wanted_device("xla", "xla")
