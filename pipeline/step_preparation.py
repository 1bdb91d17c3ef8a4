"""Preparation of a step from the inputs of its batch.

::

    inputs ─ split ─▶ Batch ─ trace, cut ─▶ graph ─ count labels ─▶ PreparedStep: microbatches, scales, program
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.input_names import check_input_names
from nxdpp.pipeline.loss.normalization import LossNormalization, StepLoss
from nxdpp.pipeline.microbatches.rows import on_device, readable_opened
from nxdpp.pipeline.microbatches.samples import check_samples, opened_samples
from nxdpp.pipeline.microbatches.split_batch import split_batch
from nxdpp.pipeline.stages.cut_graph import CutGraph
from nxdpp.pipeline.stages.program import RankProgram
from nxdpp.pipeline.stages.program_cache import ProgramCache
from nxdpp.tracing.huggingface import refuse_packed_positions
from nxdpp.tracing.input_dicts import levels, open_inputs
from nxdpp.tracing.loss_terms import NUM_ITEMS


@dataclass(frozen=True)
class Batch:
    """Inputs of the microbatches of a step.

    Attributes:
        microbatches: the inputs of each, on the device of the stages.
        distinct: those that may differ in shapes.
        is_counted: ``True`` if the user counted the items.
        given: the inputs that all ranks of the pipeline have to give alike.
        before: the inputs of each microbatch before they were moved to the device.
    """

    microbatches: list[dict[str, Any]]
    distinct: list[dict[str, Any]]
    is_counted: bool
    given: Sequence[Mapping[str, Any]]
    before: list[dict[str, Any]]


@dataclass(frozen=True)
class PreparedStep:
    """A step that all ranks can begin.

    Attributes:
        cut: the graph of its microbatches.
        program: the stages of this rank.
        loss: the microbatches, and the part of each in the loss.
        given: as that of ``Batch``.
        scales: factor of each microbatch's loss in the loss that is differentiated; ``None`` for the mean.
        may_differ: ``True`` if each microbatch may have shapes of its own.
        has_loss: ``True`` if the program ends with the loss, ``False`` if it ends with the whole output.
    """

    cut: CutGraph
    program: RankProgram
    loss: StepLoss
    given: Sequence[Mapping[str, Any]]
    scales: Sequence[float] | None = None
    has_loss: bool = True
    may_differ: bool = False


class StepPreparation:
    """Preparation of the steps of one pipeline; not collective, but for the count of labels over replicas.

    Args:
        module: the whole model.
        config: settings of the pipeline.
        programs: graphs and programs, by specs of inputs.
        normalization: of the loss.
    """

    def __init__(
        self, module: nn.Module, config: PipelineConfig, programs: ProgramCache, normalization: LossNormalization
    ) -> None:
        self._module = module
        self._config = config
        self._programs = programs
        self._normalization = normalization
        self._input_names = None if config.input_names is None else tuple(config.input_names)
        self._loss_function = config.loss_function

    def check_names(self, inputs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` or ``ValueError`` for inputs of other names than the model, or ``loss_fn``, takes."""
        function = self._loss_function
        if function is None or self._input_names is not None or not isinstance(inputs, Mapping):
            check_input_names(self._module, inputs, self._input_names)
            return
        try:
            check_input_names(self._module, function.of_module(self._module, inputs), None)
        except ValueError as error:
            raise ValueError(f"{error} loss_fn takes {list(function.names)}.") from None

    def check_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` or ``TypeError`` for another number of samples, other names, or one loss of them all."""
        rule = self._config.loss_normalization
        if rule != "microbatch":
            raise ValueError(
                f"loss_normalization={rule!r} makes one loss of all samples, and each sample has its own here. Use "
                f"loss_normalization='microbatch', or train_step."
            )
        check_samples(samples, self._config.num_microbatches)
        for sample in samples:
            self.check_names(sample)

    def refuse_packed(self, inputs: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for packed sequences that the model would not see as such."""
        opened = open_inputs(inputs)
        for names in levels(opened):
            refuse_packed_positions(self._module, {key: opened[name] for key, name in names.items()})

    def split(self, inputs: Mapping[str, Any], device: torch.device) -> Batch:
        """Split ``inputs`` into microbatches, and move them to ``device``. Raises as ``split_batch`` does."""
        config = self._config
        parts, are_alike = split_batch(self._module, inputs, config.num_microbatches, config.split_inputs_fn, device)
        before, is_counted = self._normalization.prepared(parts, inputs)
        microbatches = on_device(before, device)
        # A function may split equal batches in different ways.
        given = [open_inputs(inputs)] if config.split_inputs_fn is None else parts
        return Batch(microbatches, microbatches[:1] if are_alike else microbatches, is_counted, given, before)

    def samples(self, samples: Sequence[Mapping[str, Any]], device: torch.device) -> Batch:
        """Take each sample as a microbatch, and move it to ``device``. Raises as ``opened_samples`` does."""
        parts = [dict(readable_opened(sample, device)) for sample in opened_samples(samples, device)]
        for sample in parts:
            self.refuse_packed(sample)
        before, is_counted = self._normalization.prepared(parts, {})
        microbatches = on_device(before, device)
        return Batch(microbatches, microbatches, is_counted, parts, before)

    def trace(self, batch: Batch, training: bool) -> CutGraph | None:
        """Trace ``batch`` and build its program. Returns the graph if the step ends with the loss."""
        cut = self._programs.cut_graph_of_all(batch.distinct, training)
        ends_with = "loss" if training else self._programs.evaluation_ends_with(cut)
        self._programs.program(cut, ends_with)
        return cut if ends_with == "loss" else None

    def training_step(self, batch: Batch) -> PreparedStep:
        """Prepare a step that ends with the loss of ``batch``, in the present mode; collective over the replicas."""
        return self._with_loss(self._graph(batch), batch, train=True)

    def takes_number_of_items(self, batch: Batch) -> bool:
        """Return whether the loss of ``batch`` depends on the ``num_items_in_batch`` among its inputs."""
        return self._normalization.takes_number(self._graph(batch))

    def training_microbatches(self, batch: Batch) -> PreparedStep:
        """Prepare the step of ``training_step`` for microbatches that may differ in sizes."""
        return replace(self.training_step(batch), may_differ=True)

    def evaluated_losses(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation that ends with the loss of each microbatch, as the model returns it.

        Raises ``ValueError`` if the output names no loss.
        """
        cut = self._graph(batch)
        if self._programs.evaluation_ends_with(cut) != "loss":
            raise ValueError("the model returns no loss for these inputs: give labels, or evaluate its outputs.")
        program = self._programs.program(cut, "loss")
        return PreparedStep(cut, program, StepLoss(batch.microbatches), batch.given, may_differ=True)

    def evaluation(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation, which ends with the loss where the output names one."""
        cut = self._graph(batch)
        if self._programs.evaluation_ends_with(cut) == "loss":
            return self._with_loss(cut, batch, train=False)
        program = self._programs.program(cut, "output")
        return PreparedStep(cut, program, StepLoss(batch.microbatches), batch.given, has_loss=False)

    def training_samples(self, batch: Batch) -> PreparedStep:
        """Prepare a step that ends with the loss and the output of each sample; collective over the replicas."""
        cut = self._graph(batch)
        node = cut.loss_of_sample(self._config.output_loss_value_spec)
        loss = self._normalization.of_step(cut, batch.microbatches, batch.is_counted, batch.before, True, node)
        program = self._programs.program(cut, "loss and output")
        return PreparedStep(cut, program, loss, batch.given, self._scales(loss), may_differ=True)

    def evaluated_samples(self, batch: Batch) -> PreparedStep:
        """Prepare an evaluation that ends with the output of each sample."""
        cut = self._graph(batch)
        program = self._programs.program(cut, "output")
        return PreparedStep(cut, program, StepLoss(batch.microbatches), batch.given, has_loss=False, may_differ=True)

    def _with_loss(self, cut: CutGraph, batch: Batch, train: bool) -> PreparedStep:
        loss = self._normalization.of_step(cut, batch.microbatches, batch.is_counted, batch.before, train)
        if loss.microbatches is not batch.microbatches and NUM_ITEMS not in cut.traced.inputs:
            # The model's control flow depends on the number of items, which is then part of the graph.
            cut = self._programs.cut_graph_of_all(loss.microbatches, self._module.training)
        return PreparedStep(cut, self._programs.program(cut, "loss"), loss, batch.given, self._scales(loss))

    def _scales(self, loss: StepLoss) -> Sequence[float] | None:
        return [1.0] * len(loss.microbatches) if self._config.gradient_reduction == "sum" else loss.scales

    def _graph(self, batch: Batch) -> CutGraph:
        return self._programs.cut_graph_of_all(batch.distinct, self._module.training)
