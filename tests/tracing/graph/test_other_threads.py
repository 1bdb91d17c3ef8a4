"""A thread that uses a transformers model while another thread traces one gets the model's own numbers."""

import threading
from typing import Any

import pytest
import torch
from torch import fx

from nxdpp.tracing.graph.trace import TracingOptions, trace_for
from nxdpp.tracing.models.huggingface import HuggingFaceTracer
from nxdpp.tracing.modules.layers import find_layer_classes
from tests.support.models import make, padded_batch


def test_a_model_runs_while_another_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    other, batch = make("mixtral", layers=2), padded_batch(2)
    expected = other(**batch)
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(other(**batch))
        except BaseException as error:
            outcomes.append(error)

    record = HuggingFaceTracer.call_module

    def with_thread(self: HuggingFaceTracer, *args: Any) -> Any:
        # At each module that the trace reaches, in the thread of the trace.
        if self.is_tracing_thread():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        return record(self, *args)

    monkeypatch.setattr(HuggingFaceTracer, "call_module", with_thread)
    model = make("mixtral", layers=2)
    trace_for(model, batch, TracingOptions(find_layer_classes(model, None)))

    assert len(outcomes) > 4
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        assert not isinstance(outcome.loss, fx.Proxy)
        assert torch.equal(outcome.loss, expected.loss)
        assert torch.equal(outcome.logits, expected.logits)
