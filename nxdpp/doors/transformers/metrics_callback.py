"""Metrics of a ``PipelineTrainer`` for ``python -m nxdpp watch``."""

import os
from numbers import Real
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nxdpp.doors.transformers.trainer import PipelineTrainer
from nxdpp.watching.metrics_file import OWN_NAMES, MetricsFile

# Logs that are no value of a step.
_LEFT_OUT = ("epoch", "total_flos", "num_input_tokens_seen")
_LEFT_OUT_ENDS = ("_runtime", "_per_second")


class MetricsCallback(TrainerCallback):
    """Callback that writes a ``MetricsFile`` of each step: ``trainer.add_callback(MetricsCallback(trainer))``.

    Every rank adds it. The numbers that ``Trainer`` logs, such as ``loss``, go to the steps in which it logs them, and
    those of an evaluation after the training to its last step. With
    ``include_num_input_tokens_seen`` the steps have their tokens.

    Args:
        trainer: the trainer that it is added to.
        folder: of the run, by default ``output_dir``.
        actions_every: as for ``MetricsFile``.
    """

    def __init__(
        self, trainer: PipelineTrainer, folder: str | os.PathLike[str] | None = None, actions_every: int = 10
    ) -> None:
        self._trainer, self._folder, self._actions_every = trainer, folder, actions_every
        self._file: MetricsFile | None = None
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Begin the file, after the steps of a resumed training."""
        self._file = MetricsFile(
            self._folder or str(args.output_dir),
            self._trainer.pipelined,
            done=state.global_step,
            steps=state.max_steps,
            actions_every=self._actions_every,
        )
        self._tokens = state.num_input_tokens_seen
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Write the line of an optimizer step."""
        if self._file is not None:
            tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
            self._file.write(tokens=tokens or None)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        """Add the logged numbers of a step, without the figures of the whole training at its end.

        Those of ``evaluate()`` after ``train()`` go to the last step.
        """
        told = {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, Real) and name not in (*OWN_NAMES, *_LEFT_OUT)
        }
        shown = {name: value for name, value in told.items() if not name.endswith(_LEFT_OUT_ENDS)}
        if self._file is not None and self._file.is_last and shown and "train_loss" not in told:
            self._file.add(**shown)
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """End the file."""
        if self._file is not None:
            self._file.close()
        return control
