"""One step of a rank: graph, program and loss of its batch, what runs it, and the losses and outputs that ranks get."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from nxdpp.agreement.step_signature import StepSignature
from nxdpp.pipeline.batch import Batch
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.loss.batch_loss import LossOfBatch
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.microbatches.batch_dimension import rows_of, shapes_of_rows
from nxdpp.pipeline.outputs.shared_outputs import shared_outputs
from nxdpp.pipeline.runtime.engine import Engine
from nxdpp.pipeline.stages.cut_graph import EndsWith, RankStages, StepGraphs, fill_output
from nxdpp.pipeline.stages.loss import LossTransform
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.lowering.additions import Addition
from nxdpp.tracing.models.loss_terms import NUM_ITEMS


@dataclass(eq=False)
class Step:
    """One step of this rank: ``StepPreparation`` makes it, and ``Steps`` runs it.

    Attributes:
        batch: its inputs.
        graphs: of its microbatches.
        program: the stages of this rank.
        loss: the microbatches, and the part of each in the loss.
        has_loss: ``True`` if the program ends with the loss, ``False`` if it ends with the whole output.
        device: of the stages.
        train: ``False`` for an evaluation.
        average: ``True`` if gradients are averaged over the replicas, unless ``no_sync()`` leaves it out.
        last_rank: rank of the last stage.
        signature, digest: equal on all ranks of the pipeline, once they have verified it.
        hashes: of the inputs.
        engine: runs the actions.
        values: for each microbatch the values that the program ends with; empty on ranks without the last stage.
    """

    batch: Batch
    graphs: StepGraphs
    program: RankStages
    loss: StepLoss
    has_loss: bool = True
    device: torch.device = field(init=False)
    train: bool = field(init=False)
    average: bool = field(init=False)
    last_rank: int = field(init=False)
    signature: StepSignature = field(init=False)
    digest: int = 0
    hashes: Sequence[int] = ()
    engine: Engine = field(init=False)
    values: list[list[Any]] = field(default_factory=list)

    def whole(self, config: PipelineConfig) -> Mapping[str, Any] | None:
        """Return the opened inputs of the batch in one piece, whose loss could be the mean of the microbatches'.

        ``None`` for a batch that has been given in parts, and for losses that count items of all replicas.
        """
        parts, given = len(self.batch.microbatches), self.batch.compared
        if parts == 1 or len(given) != 1 or config.split_inputs_fn is not None:
            return None
        if NUM_ITEMS in given[0] or (self.loss.scales and parallel_state.get_replica_size() > 1):
            return None
        return given[0]

    def losses(self) -> list[torch.Tensor]:
        """Return the loss of each microbatch, on the last rank only. Raises ``ValueError`` for one without labels."""
        return self.loss.scaled([values[0] for values in self.values]) if self.values else []

    def shared_losses(self) -> list[torch.Tensor]:
        """Return the losses on all ranks; collective over the pipeline."""
        with failure_watch.reported():
            losses: list[torch.Tensor] = self.shared(self.losses())
            return losses

    def lone_losses(self) -> list[torch.Tensor] | None:
        """Return the loss of each microbatch, as the model returns it, where that is all; collective over the pipeline.

        Returns ``None`` on all ranks where the output is another value, and an empty list without the last stage.
        """
        if not all(cut.is_lone for cut in self.graphs.cuts):
            return None
        values = [each for (each,) in self.values]
        with failure_watch.reported():
            (are_losses,) = self.shared([all(isinstance(each, torch.Tensor) and not each.ndim for each in values)])
        return values if are_losses else None

    def outputs(self, everywhere: bool = True) -> list[Any]:
        """Return the model's output of each microbatch; ``everywhere`` on all ranks, collective over the pipeline."""
        with failure_watch.reported():
            values = self.shared(self.values) if everywhere else self.values
            outputs, names = [cut.output for cut in self.graphs.cuts], [each.results for each in self.program.graphs]
            return [
                fill_output(
                    outputs[graph], dict(zip(names[graph] if names else self.program.results, each, strict=True))
                )
                for graph, each in zip(self.graphs.numbers or [0] * len(values), values, strict=False)
            ]

    def shared(self, own: Any) -> Any:
        """Return the list ``own`` of the rank of the last stage on all ranks; collective over the pipeline."""
        return shared_outputs(own, self.last_rank, parallel_state.get_pipeline_control_group(), self.device)


class Participant:
    """Something that takes part in training steps; a verb does nothing unless a class says what it does.

    Attributes:
        additions: actions around the ones of stages.
        calls: what these actions do, for the compute action that each belongs to.
    """

    additions: Sequence[Addition] = ()
    calls: Mapping[ActionKind, Callable[[Action], None]] = MappingProxyType({})

    def add_program(self, program: fx.GraphModule) -> None:
        """Follow ``program``, which runs a stage, before its first step."""

    def before(self, step: Step) -> None:
        """Check and prepare this rank before the ranks agree on ``step``: after an error it can continue."""

    def after(self, step: Step) -> None:
        """Begin ``step``, on which the ranks have agreed; may be collective."""

    def finish(self, step: Step) -> None:
        """End ``step`` after its last action; may be collective."""

    def abandon(self) -> None:
        """Undo what a step that has failed has left behind."""

    def told(self) -> Mapping[str, Any]:
        """Return what metrics and the timeline have of this rank in the last training step, for JSON."""
        return {}


class StepPreparation:
    """Preparation of the steps of one pipeline; not collective, but for the count of labels over replicas.

    Args:
        config: settings of the pipeline.
        programs: graphs and programs, by specs of inputs.
        normalization: of the loss.
    """

    def __init__(self, config: PipelineConfig, programs: ProgramCache, normalization: LossNormalization) -> None:
        self._loss_spec = config.output_loss_value_spec
        self._is_sum = config.gradient_reduction == "sum"
        self._config, self._programs, self._normalization = config, programs, normalization
        self._loss_of_step: Callable[..., StepLoss] = (
            normalization.of_step if config.batch_loss is None else self._loss_of_batch
        )

    def trace(self, batch: Batch, training: bool) -> None:
        """Trace ``batch`` and build its program. Raises ``ValueError`` for a loss that cannot be normalized."""
        graphs = self._graphs(batch)
        ends_with: EndsWith = "loss" if training or self._names_loss(graphs) else "output"
        self._programs.program_of(graphs, ends_with)
        if ends_with == "loss":
            for cut in graphs.cuts:
                self._normalization.check(cut)

    def takes_number_of_items(self, batch: Batch) -> bool:
        """Return whether the loss of ``batch`` depends on the ``num_items_in_batch`` among its inputs."""
        return any(map(self._normalization.takes_number, self._graphs(batch).cuts))

    def with_loss(
        self, batch: Batch, transform: LossTransform | None = None, train: bool = True, graphs: StepGraphs | None = None
    ) -> Step:
        """Prepare a step that ends with the loss of ``batch``, of which ``transform`` is differentiated in training."""
        graphs = self._programs.graphs_of(batch.distinct, batch.layout) if graphs is None else graphs
        loss = self._loss_of_step(graphs, batch.microbatches, batch.is_counted, batch.before, train, (), batch.shares)
        loss = loss if batch.shares is None else self._by_rows(loss, batch)
        return self._prepared(batch, graphs, "loss", loss, transform)

    def with_loss_and_output(self, batch: Batch, transform: LossTransform | None) -> Step:
        """Prepare a training step that ends with the loss and the output of each sample."""
        graphs = self._graphs(batch)
        nodes = [cut.loss_of_sample(self._loss_spec) for cut in graphs.cuts]
        loss = self._normalization.of_step(graphs, batch.microbatches, batch.is_counted, batch.before, True, nodes)
        return self._prepared(batch, graphs, "loss and output", loss, transform)

    def with_named_loss(self, batch: Batch) -> Step:
        """Prepare an evaluation, which ends with the loss where the output names one or divides by counted items."""
        graphs = self._graphs(batch)
        is_fed = all(cut.is_lone and self._normalization.is_fed(cut) for cut in graphs.cuts)
        if is_fed or self._names_loss(graphs):
            return self.with_loss(batch, train=False, graphs=graphs)
        return self._prepared(batch, graphs, "output", StepLoss(batch.microbatches))

    def loss_of(self, step: Step) -> StepLoss:
        """Return the loss of an evaluation whose outputs are lone losses; collective over replicas that count items.

        Raises ``ValueError`` or ``TypeError`` on all ranks for a loss that a training step refuses.
        """
        batch = step.batch
        loss = self._normalization.of_step(
            step.graphs, batch.microbatches, batch.is_counted, batch.before, False, shares=batch.shares
        )
        return self._by_rows(loss, batch)

    def _by_rows(self, loss: StepLoss, batch: Batch) -> StepLoss:
        """Return ``loss`` with microbatches that weigh as much as their rows, if each has its mean."""
        is_mean = batch.shares is not None and self._normalization.is_of_microbatches and not batch.is_counted
        return replace(loss, scales=batch.shares) if is_mean else loss

    def with_losses(self, batch: Batch) -> Step:
        """Prepare an evaluation that ends with the loss of each microbatch, as the model returns it.

        Raises ``ValueError`` if the output names no loss.
        """
        graphs = self._graphs(batch)
        if not self._names_loss(graphs):
            raise ValueError("the model returns no loss for these inputs: give labels, or evaluate its outputs.")
        return self._prepared(batch, graphs, "loss", StepLoss(batch.microbatches))

    def with_output(self, batch: Batch) -> Step:
        """Prepare an evaluation that ends with the output of each microbatch."""
        return self._prepared(batch, self._graphs(batch), "output", StepLoss(batch.microbatches))

    def _loss_of_batch(self, graphs: StepGraphs, microbatches: list[dict[str, Any]], *_: Any) -> StepLoss:
        """Begin the loss over the whole batch, which may have microbatches without labels."""
        config = self._config
        first, dimension, shared = microbatches[0], config.batch_dimension, config.shared_inputs
        rows = rows_of(first, dimension, shared)
        are_free = graphs.are_of_no_input(lambda: shapes_of_rows(first, dimension, shared))
        module = graphs.cuts[0].partition.module
        own: dict[str, Any] = {"rows": rows, "module": module, "is_of_no_input": are_free}
        loss = LossOfBatch(microbatches, is_sum=True, batch_loss=config.batch_loss, **own)
        loss.begin()
        return loss

    def _prepared(
        self,
        batch: Batch,
        graphs: StepGraphs,
        ends_with: EndsWith,
        loss: StepLoss,
        transform: LossTransform | None = None,
    ) -> Step:
        is_new = loss.microbatches is not batch.microbatches
        if is_new and not all(NUM_ITEMS in cut.traced.inputs for cut in graphs.cuts):
            # The model's control flow depends on the number of items, which is then part of the graph.
            graphs = self._programs.graphs_of(loss.microbatches)
        if self._is_sum or transform is not None:
            loss = replace(loss, is_sum=self._is_sum, transform=transform)
        return Step(batch, graphs, self._programs.program_of(graphs, ends_with), loss, ends_with != "output")

    def _graphs(self, batch: Batch) -> StepGraphs:
        return self._programs.graphs_of(batch.distinct, batch.layout)

    def _names_loss(self, graphs: StepGraphs) -> bool:
        """Return whether the graphs of all microbatches name a loss, with which an evaluation then ends."""
        return all(cut.has_named_loss(self._loss_spec) for cut in graphs.cuts)
