"""Tensors in dicts and plain attributes whose methods take a size of the inputs."""

import torch

from tests.support.traced_models import PlainModel, run_graph, trace_with

TABLE = torch.arange(4.0)


class Keeps(PlainModel):
    """Adds a kept row to each row of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"row": TABLE}

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        row, count = self.kept["row"], hidden.shape[0]
        rows = row.unsqueeze(0).expand(count, -1) + row.repeat(count, 1) + row.repeat(2).reshape(count, 4)
        return hidden + rows + row.new_ones((count, 4)) * 2


def test_a_kept_tensor_takes_a_size_of_the_inputs() -> None:
    model, before = Keeps(), dict(vars(torch.Tensor))
    traced = trace_with(model, {"x": torch.randn(3, 4)})
    assert dict(vars(torch.Tensor)) == before

    x = torch.randn(2, 4)
    assert torch.equal(run_graph(model, traced, {"x": x}), model(x))
