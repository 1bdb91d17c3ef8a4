"""A measurement of seconds changes neither the model, nor its gradients, nor the random state."""

import torch

from nxdpp.pipeline.partition.assignment import assign_layers
from nxdpp.tracing.costs.measure import measure_nodes
from tests.support.models import make, padded_batch
from tests.support.traced_models import trace_with


def test_model_is_not_changed() -> None:
    model, batch = make("mixtral"), padded_batch(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()

    traced = trace_with(model, batch)
    assigned = assign_layers(traced, model, traced.layers)
    seconds = measure_nodes(traced, model, batch, assigned, torch.device("cpu"))

    assert seconds.keys() == assigned.keys()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
