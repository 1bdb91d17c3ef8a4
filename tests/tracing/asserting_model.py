"""A model with assertions; here, because pytest rewrites those of test files."""

import torch

from tests.tracing.traced_models import PlainModel


class AssertingModel(PlainModel):
    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.isfinite().all().item(), "the embedding has gone wrong"
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x > 0).all()
        assert x.size(1) == 4
        assert x.ndim == 2 and (x != 9).all()  # noqa: PT018
        return super().forward(x)
