"""This runtime, through its public API."""

from collections.abc import Iterable

import torch
from torch import nn

from benchmarks.compare.contender import US, Contender
from benchmarks.compare.job import Job
from nxdpp import NxDPPModel
from nxdpp.pipeline.stage_runner import StageRunner
from nxdpp.schedules.families import find_family


class Ours(Contender):
    """An ``NxDPPModel``; raises ``NotImplementedError`` for a family that it does not run."""

    def __init__(self, job: Job, family: str, chunks: int) -> None:
        super().__init__(US, family)
        if find_family(family).splits_backward and not hasattr(StageRunner, "input_gradient"):
            raise NotImplementedError("the engine does not split backwards")
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
