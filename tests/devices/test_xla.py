"""Start of XLA's device: each way in which torch_xla or its device is missing has a sentence with the remedy."""

import logging
import re

import pytest
import torch

from nxdpp.devices import xla
from tests.support.fake_xla import FakeXla

REMEDY = "pip install '.[xla]' -c constraints-xla.txt, which takes the torch that torch_xla fits"


def test_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    FakeXla().install(monkeypatch, "NEURON")
    with caplog.at_level(logging.INFO):
        assert xla.start(0, 2) == torch.device("xla", 0)
        assert xla.start(1, 2) == torch.device("xla", 0)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.messages == ["device='xla' is PJRT's NEURON, as PJRT_DEVICE says; the ranks communicate over gloo"]
    assert xla.XlaDevice(torch.device("xla", 0)).kind == "xla (NEURON)"


def test_no_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(import_error=ModuleNotFoundError("No module named 'torch_xla'", name="torch_xla")).install(monkeypatch)
    with pytest.raises(RuntimeError, match=re.escape("device='xla': torch_xla is not installed. Install")) as raised:
        xla.start(0, 1)
    assert REMEDY in str(raised.value)


def test_a_torch_xla_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(import_error=ImportError("_XLAC.so: undefined symbol: _ZN5torch\nMore.")).install(monkeypatch)
    expected = f"torch_xla 2.9.0 cannot be imported beside torch {torch.__version__}: _XLAC.so: undefined symbol: _ZN5"
    with pytest.raises(RuntimeError, match=re.escape(expected)) as raised:
        xla.start(0, 1)
    assert REMEDY in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("No PjRtPlugin registered for: TPUS. Make sure\nMore."),
        ModuleNotFoundError("No module named 'libneuronxla'", name="libneuronxla"),
    ],
)
def test_a_device_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    FakeXla(device_error=error).install(monkeypatch, "TPUS")
    reason = str(error).partition("\n")[0]
    with pytest.raises(RuntimeError, match=re.escape(f"PJRT_DEVICE='TPUS' cannot be used: {reason}. Set")):
        xla.start(0, 1)
    # The remedy.
    FakeXla().install(monkeypatch, "CPU")
    assert xla.start(0, 1).type == "xla"


def test_each_local_rank_needs_a_chip_of_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla().install(monkeypatch, "TPU")
    with pytest.raises(RuntimeError, match=r"4 local ranks would each take all TPU chips .*TPU_VISIBLE_CHIPS=\$LOCAL"):
        xla.start(1, 4)
    assert xla.start(0, 1).type == "xla"
    # The remedy.
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "1")
    assert xla.start(1, 4).type == "xla"
