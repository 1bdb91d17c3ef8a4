"""Preparation of a step from its batch: graph, program, and the part of each microbatch in the loss."""

from collections.abc import Sequence
from dataclasses import dataclass

from nxdpp.pipeline.batch import Batch
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.loss.normalization import LossNormalization, StepLoss
from nxdpp.pipeline.stages.cut_graph import CutGraph, EndsWith, RankStages
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.tracing.models.loss_terms import NUM_ITEMS


@dataclass(frozen=True)
class PreparedStep:
    """A step that all ranks can begin.

    Attributes:
        batch: its inputs.
        cut: the graph of its microbatches.
        program: the stages of this rank.
        loss: the microbatches, and the part of each in the loss.
        scales: factor of each microbatch's loss in the loss that is differentiated; ``None`` for the mean.
        has_loss: ``True`` if the program ends with the loss, ``False`` if it ends with the whole output.
    """

    batch: Batch
    cut: CutGraph
    program: RankStages
    loss: StepLoss
    scales: Sequence[float] | None = None
    has_loss: bool = True


class StepPreparation:
    """Preparation of the steps of one pipeline; not collective, but for the count of labels over replicas.

    Args:
        config: settings of the pipeline.
        programs: graphs and programs, by specs of inputs.
        normalization: of the loss.
    """

    def __init__(self, config: PipelineConfig, programs: ProgramCache, normalization: LossNormalization) -> None:
        self._config = config
        self._programs = programs
        self._normalization = normalization

    def trace(self, batch: Batch, training: bool) -> None:
        """Trace ``batch`` and build its program. Raises ``ValueError`` for a loss that cannot be normalized."""
        cut = self._graph(batch)
        ends_with = "loss" if training else self._programs.evaluation_ends_with(cut)
        self._programs.program(cut, ends_with)
        if ends_with == "loss":
            self._normalization.check(cut)

    def takes_number_of_items(self, batch: Batch) -> bool:
        """Return whether the loss of ``batch`` depends on the ``num_items_in_batch`` among its inputs."""
        return self._normalization.takes_number(self._graph(batch))

    def with_loss(self, batch: Batch) -> PreparedStep:
        """Prepare a training step that ends with the loss of ``batch``."""
        return self._losing(self._graph(batch), batch, train=True)

    def with_loss_and_output(self, batch: Batch) -> PreparedStep:
        """Prepare a training step that ends with the loss and the output of each sample."""
        cut = self._graph(batch)
        node = cut.loss_of_sample(self._config.output_loss_value_spec)
        loss = self._normalization.of_step(cut, batch.microbatches, batch.is_counted, batch.before, True, node)
        return self._prepared(batch, cut, "loss and output", loss)

    def with_named_loss(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation, which ends with the loss where the output names one."""
        cut = self._graph(batch)
        if self._programs.evaluation_ends_with(cut) == "loss":
            return self._losing(cut, batch, train=False)
        return self._prepared(batch, cut, "output", StepLoss(batch.microbatches))

    def with_losses(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation that ends with the loss of each microbatch, as the model returns it.

        Raises ``ValueError`` if the output names no loss.
        """
        cut = self._graph(batch)
        if self._programs.evaluation_ends_with(cut) != "loss":
            raise ValueError("the model returns no loss for these inputs: give labels, or evaluate its outputs.")
        return self._prepared(batch, cut, "loss", StepLoss(batch.microbatches))

    def with_output(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation that ends with the output of each microbatch."""
        return self._prepared(batch, self._graph(batch), "output", StepLoss(batch.microbatches))

    def _losing(self, cut: CutGraph, batch: Batch, train: bool) -> PreparedStep:
        loss = self._normalization.of_step(cut, batch.microbatches, batch.is_counted, batch.before, train)
        if loss.microbatches is not batch.microbatches and NUM_ITEMS not in cut.traced.inputs:
            # The model's control flow depends on the number of items, which is then part of the graph.
            cut = self._programs.cut_graph_of_all(loss.microbatches)
        return self._prepared(batch, cut, "loss", loss)

    def _prepared(self, batch: Batch, cut: CutGraph, ends_with: EndsWith, loss: StepLoss) -> PreparedStep:
        is_sum = self._config.gradient_reduction == "sum"
        scales = [1.0] * len(loss.microbatches) if is_sum else loss.scales
        return PreparedStep(batch, cut, self._programs.program(cut, ends_with), loss, scales, ends_with != "output")

    def _graph(self, batch: Batch) -> CutGraph:
        return self._programs.cut_graph_of_all(batch.distinct, batch.layout)
