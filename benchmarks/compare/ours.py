"""This runtime, through its public API."""

from collections.abc import Iterable

import torch
from torch import nn

from benchmarks.compare.contender import US, Contender
from benchmarks.compare.job import Job
from nxdpp import NxDPPModel


class Ours(Contender):
    """An ``NxDPPModel``."""

    def __init__(self, job: Job, family: str, chunks: int) -> None:
        super().__init__(US, family)
        self._model = NxDPPModel(
            job.make_model(),
            transformer_layer_cls=job.layer_class,
            num_microbatches=job.microbatches,
            schedule=family,
            virtual_pipeline_size=chunks,
        )
        self._inputs = job.inputs

    def step(self) -> torch.Tensor | None:
        """``run_train``."""
        loss = self._model.run_train(**self._inputs)
        assert not isinstance(loss, list), "one loss is asked for"
        return loss

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Those of this rank's stages."""
        return self._model.local_named_parameters()
