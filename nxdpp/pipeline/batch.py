"""Batch of a step: inputs are opened, checked, split into microbatches, and moved to the device of the stages.

::

    inputs ─ names ─ open ─ kinds, sizes ─ split ─▶ Batch

Tensors of names, shapes, dtypes and devices that were split before are split again without these checks.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from nxdpp.agreement.step_signature import InputShapes, LastUsed, input_shapes
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.input_names import check_input_names, forward_names
from nxdpp.pipeline.local.changes import ENTRIES, Change
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.loss.normalization import LossNormalization
from nxdpp.pipeline.microbatches.batch_dimension import dimensions_of, rows_of, shapes_of_rows, value_counts
from nxdpp.pipeline.microbatches.mixed_rows import warn_of_batch_norms
from nxdpp.pipeline.microbatches.rows import on_device, readable_opened
from nxdpp.pipeline.microbatches.split_batch import check_samples, opened_samples, split_batch
from nxdpp.pipeline.outputs.joined_outputs import join_outputs
from nxdpp.pipeline.stages.cut_graph import StepGraphs
from nxdpp.tracing.models.huggingface import refuse_packed_positions
from nxdpp.tracing.models.image_rows import names_of_images
from nxdpp.tracing.models.loss_terms import NUM_ITEMS
from nxdpp.tracing.values.input_dicts import close_inputs, levels, open_inputs

_is_nested = attrgetter("is_nested")
_requires_grad = attrgetter("requires_grad")
_data = attrgetter("data")


@dataclass(frozen=True)
class Batch:
    """Inputs of the microbatches of a step.

    Attributes:
        microbatches: the inputs of each, on the device of the stages.
        distinct: the microbatches that may differ in names, shapes, dtypes and other values: one of alike ones.
        is_counted: ``True`` if the user counted the items.
        compared: the inputs that all ranks of the pipeline have to give alike: of the batch or of each microbatch.
        before: the inputs of each microbatch before they were moved to the device.
        layout: equal for batches of tensors with equal names, shapes, dtypes and devices; ``None`` for other batches.
        shapes: of the first microbatch, where ``layout`` tells them.
        shares: the part of each microbatch in the rows of the batch, where these are not equal.
    """

    microbatches: list[dict[str, Any]]
    distinct: list[dict[str, Any]]
    is_counted: bool
    compared: Sequence[Mapping[str, Any]]
    before: list[dict[str, Any]]
    layout: Hashable = None
    shapes: InputShapes | None = None
    shares: Sequence[float] | None = None


@dataclass(frozen=True)
class _Split:
    """The split of tensors of one layout: the dimensions of rows, ``None`` for whole ones, and whether any is moved."""

    layout: Hashable
    along: list[int | None]
    is_moved: bool
    shapes: InputShapes


class Batches:
    """Batches of the steps of one pipeline; not collective.

    Args:
        part: of this rank, which is made ready for a step before its inputs are split.
        config: settings of the pipeline.
        normalization: of the loss.

    Attributes:
        module: the whole model.
        input_names: names of the inputs of every step; ``None`` for any.
    """

    def __init__(self, part: Part, config: PipelineConfig, normalization: LossNormalization) -> None:
        self.module = part.root
        self._part, self._config, self._normalization = part, config, normalization
        self.input_names = None if config.input_names is None else tuple(config.input_names)
        self._loss_function = config.loss_function
        self._changes = part.changes
        # With each of them forward may have a different signature.
        self._forwards = part.changes.watch(*ENTRIES, Change.FORWARD)
        self._of_rows: set[str] = set()
        self._rows_along_0: set[str] = set()
        self._norms_at, self._names_norms = -1, True
        self._known: LastUsed[Hashable, _Split] = LastUsed()

    def of_evaluation(self, inputs: Mapping[str, Any]) -> Batch:
        """Split the inputs of an evaluation, of any number of rows. Raises as ``of_inputs`` does."""
        count = self._config.num_microbatches
        if count == 1 or self._config.split_inputs_fn is not None or not isinstance(inputs, Mapping):
            return self.of_inputs(inputs)
        rows = rows_of(
            self._without_images(open_inputs(inputs)), self._config.batch_dimension, self._config.shared_inputs
        )
        return self.of_inputs(inputs, rows if rows and rows % count else None)

    def of_inputs(self, inputs: Mapping[str, Any], uneven: int | None = None) -> Batch:
        """Split the inputs of a step, the rows of which are ``uneven`` where microbatches may have different numbers.

        Raises ``ValueError`` or ``TypeError`` for inputs that cannot be used.
        """
        changes, device = self._changes.look(), self._changes.device
        layout = self._layout(inputs, device)
        layout = None if uneven else layout
        if layout is not None and changes == self._part.ready_at and (known := self._known.get(layout)) is not None:
            return self._split_as_before(inputs, device, known)
        self._check_names(inputs)
        self._part.make_ready()
        if device_of(device).is_lazy:
            inputs, layout = close_inputs(readable_opened(open_inputs(inputs), device)), None
        self._refuse_packed(open_inputs(inputs))
        return self._split(inputs, device, layout, uneven)

    def of_trace(self, inputs: Mapping[str, Any]) -> Batch:
        """Split ``inputs``, which may be on any device, of a part without values too."""
        self._check_names(inputs)
        self._part.check_modules()
        tensors = (value for value in open_inputs(inputs).values() if isinstance(value, torch.Tensor))
        device = next((tensor.device for tensor in tensors), self._changes.device)
        return self._split(inputs, device)

    def of_samples(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Take each sample as a microbatch. Raises ``ValueError`` or ``TypeError`` for samples that cannot be used."""
        rule = self._config.loss_normalization
        if rule != "microbatch":
            raise ValueError(
                f"loss_normalization={rule!r} makes one loss of all samples, and each sample has its own here. Use "
                f"loss_normalization='microbatch', or run_train."
            )
        check_samples(samples, self._config.num_microbatches)
        return self.of_microbatches(samples)

    def of_microbatches(self, microbatches: Sequence[Mapping[str, Any]]) -> Batch:
        """Take ``microbatches``, any number of them. Raises as ``of_samples`` does."""
        if self._config.loss_over == "batch":
            raise ValueError(
                "loss_over='batch' makes one loss of all rows of a batch, and each of these microbatches has its own. "
                "Use run_train and run_eval, or loss_over='microbatch'."
            )
        if not microbatches:
            raise ValueError("a step has at least one microbatch, and was given none.")
        for microbatch in microbatches:
            self._check_names(microbatch)
        self._part.make_ready()
        device = self._changes.device
        parts = [dict(readable_opened(each, device)) for each in opened_samples(microbatches, device)]
        for each in parts:
            self._refuse_packed(each)
        self._tell_of_norms(len(parts))
        before, is_counted = self._normalization.prepared(parts, {})
        moved = on_device(before, device)
        return Batch(moved, moved, is_counted, parts, before)

    def joined(self, outputs: list[Any], batch: Batch, graphs: StepGraphs) -> Any:
        """Return the output of ``batch`` for those of its microbatches; takes and raises as ``join_outputs``."""
        dimension, shared = self._config.batch_dimension, self._config.shared_inputs
        inputs = [self._without_images(each) for each in batch.before]
        counts = [value_counts(each, dimension, shared) for each in inputs]
        are_free = graphs.are_of_no_input(lambda: shapes_of_rows(inputs[0], dimension, shared))
        return join_outputs(outputs, counts, dimension, are_free)

    def _without_images(self, opened: Mapping[str, Any]) -> dict[str, Any]:
        """Return the opened inputs but those whose first dimension may be one of images."""
        images = set()
        for names in levels(opened):
            found = names_of_images(self.module, {key: opened[name] for key, name in names.items()})
            images |= {names[key] for key in found}
        return {name: value for name, value in opened.items() if name not in images}

    def _check_names(self, inputs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` or ``ValueError`` for names of inputs that neither the model nor ``loss_fn`` takes."""
        function = self._loss_function
        if self.input_names is not None or not isinstance(inputs, Mapping):
            check_input_names(self.module, inputs, self.input_names)
            return
        try:
            check_input_names(self.module, function.of_module(self.module, inputs) if function else inputs, None)
        except ValueError as error:
            if function is not None:
                raise ValueError(f"{error} loss_fn takes {list(function.names)}.") from None
            if {*inputs} <= {*forward_names(self.module).all}:
                raise
            raise ValueError(f"{error} An input of the loss only is one of loss_fn, which is not given.") from None

    def _layout(self, inputs: Mapping[str, Any], device: torch.device) -> Hashable:
        """The layout of ``inputs`` that are tensors, for stages on ``device``; ``None`` for others."""
        if self._forwards.has_moved:
            self._known.clear()
            self._forwards.settle()
        is_plain = type(inputs) is dict and {*map(type, inputs.values())} == {torch.Tensor}
        if not is_plain or self._config.split_inputs_fn is not None:
            return None
        if any(map(_is_nested, inputs.values())) or any(map(_requires_grad, inputs.values())):
            return None
        return device, *[(name, value.shape, value.dtype, value.device, value.layout) for name, value in inputs.items()]

    def _split_as_before(self, inputs: Mapping[str, Any], device: torch.device, known: "_Split") -> Batch:
        """Split ``inputs`` as a batch of the same layout."""
        if "position_ids" in inputs:
            self._refuse_packed(inputs)
        count = self._config.num_microbatches
        values = zip(inputs.values(), known.along, strict=True)
        # As split_inputs does: without the counter of changes that views share.
        columns = [[value] * count if n is None else map(_data, value.chunk(count, n)) for value, n in values]
        parts = [dict(zip(inputs, row, strict=True)) for row in zip(*columns, strict=True)]
        if self._normalization.by_keyword:
            parts, _ = self._normalization.prepared(parts, inputs)
        moved = on_device(parts, device) if known.is_moved else parts
        return Batch(moved, moved[:1], False, [inputs], parts, layout=known.layout, shapes=known.shapes)

    def _split(
        self, inputs: Mapping[str, Any], device: torch.device, layout: Hashable = None, uneven: int | None = None
    ) -> Batch:
        """Split ``inputs``, and note how, for batches of their ``layout``. Raises as ``split_batch`` does."""
        config = self._config
        count, function, shared = config.num_microbatches, config.split_inputs_fn, config.shared_inputs
        self._tell_of_norms(count)
        count = min(count, uneven) if uneven else count
        parts, are_alike = split_batch(
            *(self.module, inputs, count, function, device, shared, self._of_rows),
            *(config.batch_dimension, self._rows_along_0, uneven is not None),
        )
        before, is_counted = self._normalization.prepared(parts, inputs)
        moved = on_device(before, device)
        # A function may split equal batches in different ways.
        compared = [open_inputs(inputs)] if config.split_inputs_fn is None else parts
        shares = None
        if uneven:
            sizes = [len(rows) for rows in torch.arange(uneven, device="cpu").tensor_split(count)]
            shares = [size / uneven for size in sizes]
        if not are_alike or NUM_ITEMS in inputs:
            layout = None
        if layout is not None:
            dimensions = dimensions_of(inputs, config.batch_dimension)
            along = [None if parts[0][name] is value else dimensions[name] for name, value in inputs.items()]
            self._known[layout] = _Split(layout, along, moved is not before, input_shapes(moved[0]))
        distinct = moved[:1] if are_alike else moved
        return Batch(moved, distinct, is_counted, compared, before, layout=layout, shares=shares)

    def _tell_of_norms(self, microbatches: int) -> None:
        """Warn of batch norms once, in a training step of several ``microbatches``."""
        if (
            self._names_norms
            and microbatches > 1
            and torch.is_grad_enabled()
            and self._norms_at != self._changes.number
        ):
            self._norms_at = self._changes.number
            self._names_norms = not warn_of_batch_norms(self.module, microbatches)

    def _refuse_packed(self, opened: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for packed sequences that the model would not see as such."""
        for names in levels(opened):
            refuse_packed_positions(self.module, {key: opened[name] for key, name in names.items()})
