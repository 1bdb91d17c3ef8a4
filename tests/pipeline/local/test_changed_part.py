"""The first step after a change looks for wrappers, dtypes and values; later steps do not."""

from typing import Any

import pytest
from torch import nn

from nxdpp import NxDPPModel
from nxdpp.pipeline import arguments
from nxdpp.pipeline.local import part
from nxdpp.pipeline.local.part import Part
from tests.support.models import make, padded_batch

pytestmark = pytest.mark.usefixtures("one_rank")

BATCH = padded_batch(4)


def test_checks_run_once_after_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(arguments, "check_trained_dtypes", lambda module: ran.append("dtypes"))
    monkeypatch.setattr(part, "refuse_local_wrappers", lambda module: ran.append("wrappers"))
    monkeypatch.setattr(Part, "check_optimizers", lambda self: ran.append("optimizers"))
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    checks = wrapped.part
    assert checks.unverified_values() is not None
    ran.clear()
    wrapped.run_eval(**BATCH)
    assert ran == ["wrappers"]
    wrapped.run_train(**BATCH)
    assert ran == ["wrappers", "optimizers", "dtypes"]
    wrapped.refresh()
    ran.clear()
    for _ in range(2):
        wrapped.run_train(**BATCH)
        assert ran == ["wrappers", "dtypes"]
        assert checks.unverified_values() is None
    wrapped.refresh()
    assert checks.unverified_values() is not None
    ran.clear()
    for _ in range(2):
        wrapped.run_train(**BATCH)
        assert ran == ["wrappers", "dtypes"]


def test_a_layer_that_is_wrapped_between_a_move_and_the_step_is_refused() -> None:
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    wrapped.run_train(**BATCH)
    wrapped.move_model_to_device()
    layers: Any = wrapped.local_module.get_submodule("model.layers")
    layers.add_module("0", nn.DataParallel(layers.get_submodule("0")))
    with pytest.raises(RuntimeError, match=r"model.layers.0, a DataParallel, is in a wrapper of data parallelism"):
        wrapped.run_train(**BATCH)
