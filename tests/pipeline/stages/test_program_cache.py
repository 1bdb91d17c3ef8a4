"""Numbers that steps are given, or that the model holds: constants of a graph only where code asks for them."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from nxdpp.pipeline.stages import program_cache as programs
from nxdpp.tracing.graph.trace import trace
from tests.support.in_process import InProcessPipeline
from tests.support.traced_models import PlainLayer, PlainModel


class Scaled(PlainModel):
    """A model whose control flow depends on a number if ``decide`` is set."""

    def forward(self, x: torch.Tensor, factor: float, decide: bool = False) -> torch.Tensor:  # type: ignore[override]
        if decide and factor > 1:
            return -super().forward(x)
        return super().forward(x) * factor


def test_a_number_is_a_constant_only_in_control_flow() -> None:
    model, x = Scaled(), torch.ones(3, 4)
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    with patch.object(programs, "trace", wraps=trace) as traces:
        for traced, more, factors in ((1, {}, (2.0, 3.0, 4.5)), (4, {"decide": True}, (2.0, 0.5, 2.0))):
            for factor in factors:
                inputs: dict[str, Any] = {"x": x, "factor": factor, **more}
                assert torch.equal(pipeline.train(inputs, 1, backward=False)[0], model(**inputs))
            # With control flow one failed trace, and one for each value.
            assert traces.call_count == traced


class Weighted(PlainModel):
    """Has a number, and an object with a number, that training changes between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0
        self.unused = 0
        self.schedule = SimpleNamespace(scale=1.0)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden * self.schedule.scale + self.beta
        return changed


def test_a_number_that_changes_between_steps_is_exact() -> None:
    model = Weighted()
    pipeline = InProcessPipeline(model, 2, transformer_layer_cls=PlainLayer)
    x = torch.randn(4, 4)
    graphs = set()
    for beta, scale in ((0.0, 1.0), (0.5, 1.0), (0.5, 2.0), (0.0, 1.0)):
        model.beta, model.schedule.scale = beta, scale
        model.unused += 1
        assert torch.equal(torch.stack(pipeline.train({"x": x}, 1))[0], model(x))
        graphs.add(pipeline.programs.cut_graph({"x": x}, True))
    assert len(graphs) == 3
