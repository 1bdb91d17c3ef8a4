"""Costs in parts: forward, input-gradient and weight-gradient."""

import gc

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nxdpp.tracing.costs.count import count_costs
from nxdpp.tracing.costs.node_parts import CountedParts
from nxdpp.tracing.graph.trace import TracingOptions, trace_for


def test_a_count_in_parts_keeps_no_tensors() -> None:
    """A graph that no backward frees is seen by no garbage collector if it keeps itself."""

    def fake_tensors() -> int:
        gc.collect()
        return sum(type(each) is FakeTensor for each in gc.get_objects())

    before = fake_tensors()
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1))
    traced = trace_for(model, {"input": torch.ones(2, 4)}, TracingOptions((nn.Linear,)))
    count_costs(traced, model, {"input": torch.ones(2, 4)}, parts=CountedParts(10.0))
    del traced, model
    assert fake_tensors() == before
