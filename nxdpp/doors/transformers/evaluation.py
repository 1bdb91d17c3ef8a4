"""Evaluation of ``PipelineTrainer``: a window of batches is one pass through the stages; all ranks get its results.

::

    batches             0 1 2 3 │ 4 5 6 7 │ 8     windows: the microbatches of one pass
    prediction_step     ▲         ▲         ▲     runs the window; for its other batches it returns the results
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer
from transformers.trainer_pt_utils import nested_detach
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from nxdpp.doors.transformers.data import check_divided
from nxdpp.doors.transformers.data_randomness import DataRandomness
from nxdpp.doors.transformers.generating import GeneratedPredictions
from nxdpp.doors.transformers.last_batch import LastBatch, with_own_labels
from nxdpp.ground.transformers_names import BEGIN_LOADER, END_LOADER
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.waits import Wait

Prediction = tuple[torch.Tensor | None, Any, Any]
"""Loss, logits and labels of a batch, each on all ranks of the pipeline."""


class Windows:
    """The batches of ``loader``, read in windows and given one by one; other attributes come from the loader.

    accelerate asks it for the end of the data, in place of the loader, which has read ahead. Batches are read in
    ``fetching()``.

    Attributes:
        window: the batches of the present window that were not given yet, before each one is given.
        is_last: ``True`` in the last window.
        end_of_dataloader: ``True`` from the last batch on.
        remainder: rows of the last batch of all replicas; 0 for a full one, and -1 if the data has no length.
    """

    def __init__(
        self, loader: DataLoader[Any], size: int, fetching: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.loader = loader
        self.size = size
        self._fetching = fetching
        self.window: list[Any] = []
        self.is_last = False
        self.end_of_dataloader = False
        self.remainder = -1

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        with self._fetching():
            batches = iter(self.loader)
            ahead = list(islice(batches, self.size))
        self.remainder = getattr(self.loader, "remainder", -1)
        state = GradientState()
        BEGIN_LOADER.of(state)(self)
        try:
            while ahead:
                self.window = ahead
                with self._fetching():
                    ahead = list(islice(batches, self.size))
                self.is_last = not ahead
                while self.window:
                    self.end_of_dataloader = self.is_last and len(self.window) == 1
                    yield self.window[0]
                    self.window = self.window[1:]
        finally:
            END_LOADER.of(state)(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class EvaluatingTrainer(Trainer):
    """The evaluations of ``PipelineTrainer``, each collective over all ranks."""

    pipelined: NxDPPModel
    _randomness: DataRandomness
    _windows: Windows | None = None
    _predictions: deque[Prediction]
    _takes_items: bool | None = None
    _evaluated: int = 0
    _generation: GeneratedPredictions | None = None

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Evaluate as ``Trainer``, or with ``predict_with_generate`` as ``Seq2SeqTrainer``.

        A loss of routers is one of each replica's rows, of which the mean over rows is taken.

        ``generation`` are arguments of ``generate``. Raises ``ValueError`` for them without ``predict_with_generate``.
        """
        with self._generating(generation):
            metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return metrics

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as ``Trainer.evaluation_loop``, with the results of each replica counted once.

        Raises ``ValueError`` for a ``dataloader`` that gives all rows to each replica.
        """
        check_divided(dataloader)
        # A subclass's prediction_step may change its batch, so no other batch can run before it.
        is_own = type(self).prediction_step is not EvaluatingTrainer.prediction_step
        size = 1 if is_own else 2 * parallel_state.get_pipeline_model_parallel_size()
        windows = Windows(dataloader, size, self._randomness.fetching)
        self._windows, self._predictions = windows, deque()

        def gather(data: Any) -> Any:
            # Seq2SeqTrainer gives the loss of a short last batch the weight of a full one.
            is_loss = isinstance(data, torch.Tensor) and data.ndim == 1
            return gathered(data, windows, is_whole=self._generation is not None and is_loss)

        self.gather_function = gather
        try:
            of_windows = cast("DataLoader[Any]", windows)
            with self._randomness.of_call():
                output: EvalLoopOutput = super().evaluation_loop(
                    of_windows, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
            self._evaluated = output.num_samples or 0
            return output
        finally:
            self._windows = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as ``Trainer``, with the steps of an evaluation counted for each replica, not for each rank."""
        self._correct_speed(logs)
        super().log(logs, start_time)

    def predict(
        self,
        test_dataset: Dataset[Any],
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """Predict as ``Trainer``; all ranks get all predictions. Takes and raises as ``evaluate``."""
        with self._generating(generation):
            output: PredictionOutput = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        self._correct_speed(output.metrics or {})
        return output

    def _correct_speed(self, metrics: dict[str, float]) -> None:
        rows = self.args.eval_batch_size * parallel_state.get_data_parallel_size()
        for key in metrics:
            prefix, found, _ = key.partition("_steps_per_second")
            runtime = metrics.get(f"{prefix}_runtime", 0.0)
            if found and prefix != "train" and runtime:
                metrics[key] = round(math.ceil(self._evaluated / rows) / runtime, 3)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Prediction:
        """Run the window of ``inputs`` with its first batch, and return the results for ``inputs``."""
        if self._windows is None or self._windows.window[0] is not inputs:
            return self._predict([inputs], prediction_loss_only, ignore_keys)[0]
        if not self._predictions:
            self._predictions.extend(self._predict(self._windows.window, prediction_loss_only, ignore_keys))
        return self._predictions.popleft()

    def with_items(self, microbatches: list[dict[str, Any]], items: Any) -> list[dict[str, Any]]:
        """Return ``microbatches`` with the number of ``items`` of them all, if the model's loss depends on it."""
        if items is None or not self.model_accepts_loss_kwargs:
            return microbatches
        given = [{**microbatch, "num_items_in_batch": float(items)} for microbatch in microbatches]
        if self._takes_items is None:
            self._takes_items = self.pipelined.steps.takes_number_of_items(given[0])
        return given if self._takes_items else microbatches

    @contextmanager
    def _generating(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Generate the predictions of the block, if the arguments of the trainer say so."""
        if getattr(self.args, "predict_with_generate", False):
            self._generation = GeneratedPredictions(self, settings)
        elif settings:
            raise ValueError(
                f"{', '.join(settings)}: arguments of generate need predict_with_generate=True of "
                f"Seq2SeqTrainingArguments."
            )
        try:
            yield
        finally:
            self._generation = None

    def _predict(
        self, batches: list[dict[str, Any]], loss_only: bool, ignore_keys: list[str] | None
    ) -> list[Prediction]:
        if self._generation is not None and not loss_only:
            losses = [loss for loss, _, _ in self._predict(batches, True, ignore_keys)]
            prepared = [self._prepare_inputs(batch) for batch in batches]
            with self.accelerator.autocast():
                generated = self._generation.of(self.pipelined, prepared)
            return [(loss, *each) for loss, each in zip(losses, generated, strict=True)]
        if len({self._has_loss(batch) for batch in batches}) > 1:
            # A pass returns the losses of all its batches or of none.
            return [self._predict([batch], loss_only, ignore_keys)[0] for batch in batches]
        last = [self._last_rows(batch) for batch in batches]
        whole = [self._prepare_inputs(batch) for batch in batches]
        prepared = [
            rows.own(each) if rows is not None and rows.rows else each for each, rows in zip(whole, last, strict=True)
        ]
        has_loss = self._has_loss(prepared[0])
        labels = [self._labels(batch) if has_loss else None for batch in whole]
        of_items = [with_own_labels(each, rows) for each, rows in zip(prepared, last, strict=True)]
        items = [self._get_num_items_in_batch([batch], self.args.device) if has_loss else None for batch in of_items]
        fed = [self.with_items([batch], number)[0] for batch, number in zip(of_items, items, strict=True)]
        are_given = "num_items_in_batch" in fed[0]
        shares = [self._share(rows, are_given) for rows in last]
        if are_given:
            # The items are divided in place of the loss: a loss of routers is no part of their mean.
            prepared = [
                {**each, "num_items_in_batch": each["num_items_in_batch"] / (share or 1.0)}
                for each, share in zip(fed, shares, strict=True)
            ]
            shares = [float(share > 0) for share in shares]
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            if loss_only and not has_loss:
                return [(None, None, None)] * len(prepared)
            if loss_only:
                means = [loss.mean() for loss in self.pipelined.steps.eval_microbatches(prepared)]
                return [(mean * share, None, None) for mean, share in zip(means, shares, strict=True)]
            outputs = self.pipelined.steps.eval_microbatches(prepared, outputs=True)
        results: list[Prediction] = []
        for output, label, rows, share in zip(outputs, labels, last, shares, strict=True):
            loss = None
            if has_loss:
                loss = (output["loss"] if isinstance(output, dict) else output[0]).mean() * share
            logits = self._logits(output, has_loss, ignore_keys)
            results.append((loss, logits if rows is None else rows.filled(logits), label))
        return results

    def _last_rows(self, batch: Any) -> LastBatch | None:
        """Return the rows of ``batch`` if it is the last one, and does not divide over replicas."""
        windows = self._windows
        if windows is None:
            return None
        last = LastBatch.of(batch, windows.remainder, self._has_loss(batch))
        return last if windows.is_last and bool(windows.window) and windows.window[-1] is batch else None

    def _share(self, last: LastBatch | None, are_given: bool) -> float:
        """Return the factor of a loss, such that all replicas give the mean over rows, or over items that are given."""
        replicas = float(parallel_state.get_data_parallel_size()) if are_given else 1.0
        if last is None or not last.rows:
            return replicas if last is None else 0.0
        if self._generation is not None:
            return replicas if are_given else last.weight
        # Trainer weighs a loss by the rows of its replica.
        return last.total / last.rows if are_given else 1.0

    def _has_loss(self, inputs: Mapping[str, Any]) -> bool:
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        asked = inputs.get("return_loss")
        return bool(self.can_return_loss if asked is None else asked)

    def _labels(self, inputs: Mapping[str, Any]) -> Any:
        labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
        return labels[0] if len(labels) == 1 else labels

    def _logits(self, output: Any, has_loss: bool, ignore_keys: list[str] | None) -> Any:
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["cache", "past_key_values"]) if config else []
        if isinstance(output, dict):
            left_out = [*ignore_keys, *(["loss"] if has_loss else [])]
            logits: Any = tuple(value for name, value in output.items() if name not in left_out)
        else:
            logits = output[1:] if has_loss else output
        logits = nested_detach(logits)
        return logits[0] if len(logits) == 1 else logits


def gathered(data: Any, windows: Windows, is_whole: bool = False) -> Any:
    """Return ``data`` (B, ...) of all replicas, (replicas * B, ...), without the rows that fill up the last batch.

    ``is_whole`` keeps these rows. Collective over the replicas. ``data`` are tensors of equal shapes on all of them,
    also nested.
    """
    is_short = windows.end_of_dataloader and windows.remainder > 0 and not is_whole
    rows = windows.remainder if is_short else None
    return recursively_apply(lambda tensor: of_replicas(tensor)[:rows], data, error_on_other_type=True)


def of_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (B, ...) of all replicas, (replicas * B, ...); collective over them. A number is one row."""
    own = tensor[None] if tensor.ndim == 0 else tensor.contiguous()
    parts = [own]
    if parallel_state.get_data_parallel_size() > 1:
        parts = [torch.empty_like(own) for _ in range(parallel_state.get_data_parallel_size())]
        with Wait("outputs of the replicas", parallel_state.get_data_parallel_group()):
            dist.all_gather(parts, own, group=parallel_state.get_data_parallel_group())
    return torch.cat(parts)
