"""Result of a step on one rank, and the losses and outputs that all ranks of the pipeline get."""

from dataclasses import dataclass
from typing import Any

import torch

from nxdpp.pipeline.outputs.shared_outputs import shared_outputs
from nxdpp.pipeline.prepared_step import PreparedStep
from nxdpp.pipeline.stages.cut_graph import fill_output
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch


@dataclass(frozen=True)
class StepResult:
    """A step that this rank has run.

    Attributes:
        step: the prepared step.
        values: for each microbatch the values that the program ends with; empty on ranks without the last stage.
        last_rank: rank of the last stage.
        device: the device of this rank's stages.
    """

    step: PreparedStep
    values: list[list[Any]]
    last_rank: int
    device: torch.device

    def losses(self) -> list[torch.Tensor]:
        """Return the loss of each microbatch. Raises ``ValueError`` for one without labels."""
        return self.step.loss.scaled([values[0] for values in self.values if values])

    def outputs(self) -> list[Any]:
        """Return the model's output of each microbatch."""
        return self._filled(self.values)

    def shared_losses(self) -> list[torch.Tensor]:
        """Return the losses on all ranks; collective over the pipeline."""
        with failure_watch.reported():
            losses: list[torch.Tensor] = self._shared(self.losses())
            return losses

    def shared_outputs(self) -> list[Any]:
        """Return the outputs on all ranks; collective over the pipeline."""
        with failure_watch.reported():
            return self._filled(self._shared(self.values))

    def _shared(self, own: Any) -> Any:
        return shared_outputs(own, self.last_rank, parallel_state.get_pipeline_control_group(), self.device)

    def _filled(self, values: list[list[Any]]) -> list[Any]:
        named = [dict(zip(self.step.program.results, each, strict=True)) for each in values]
        return [fill_output(self.step.cut.output, each) for each in named]
