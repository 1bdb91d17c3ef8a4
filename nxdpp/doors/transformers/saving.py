"""Checkpoints of ``PipelineTrainer``: a Hugging Face directory, and the state of the training in it.

::

    checkpoint-20/   model.safetensors  config.json  tokenizer ...    by save_pretrained: any Trainer loads them
                     trainer_state.json  rng_state_0.pth ...          as Trainer writes them
                     pipeline_state/                                  by save_checkpoint: weights, optimizer, scheduler
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, TRAINING_ARGS_NAME
from transformers.utils import logging

from nxdpp.checkpoint.huggingface.load import load_pretrained
from nxdpp.checkpoint.huggingface.save import save_pretrained
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.doors.transformers.data_randomness import DataRandomness
from nxdpp.pipeline.model import NxDPPModel

STATE = "pipeline_state"

logger = logging.get_logger(__name__)


class SavingTrainer(Trainer):
    """The saves and loads of ``PipelineTrainer``, each collective over all ranks."""

    pipelined: NxDPPModel
    _randomness: DataRandomness

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is not None:
            raise ValueError("a pipeline saves its own weights: leave state_dict out.")
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        save_pretrained(self.pipelined, folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        drawn = None if self._randomness.stream is None else (self._randomness.stream, self._randomness.order)
        save_checkpoint(output_dir, STATE, self.pipelined, _inner(self.optimizer), self.lr_scheduler, drawn)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Trainer calls it before the first batch at the end of an epoch, and after it inside of one.
        super()._load_rng_state(checkpoint)
        self._randomness.begin_epoch()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / STATE).is_dir() and (folder / OPTIMIZER_NAME).is_file():
            raise ValueError(
                f"{folder} is a checkpoint of Trainer itself: its {OPTIMIZER_NAME} has no names of parameters, and "
                f"cannot be divided over stages. Start a training from its weights: from_pretrained({str(folder)!r})."
            )
        load_pretrained(self.pipelined, folder)

    def _load_best_model(self) -> None:
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        load_pretrained(self.pipelined, str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if (Path(checkpoint) / STATE).is_dir():
            drawn = load_checkpoint(checkpoint, STATE, self.pipelined, _inner(self.optimizer), self.lr_scheduler)
            if drawn is not None:
                # A checkpoint of version 0.4 has only the stream, three states.
                self._randomness.resume(*(drawn if len(drawn) == 2 else (drawn, None)))
        else:
            logger.warning(f"{checkpoint} has no {STATE}: the optimizer and the learning rate begin anew.")


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer in accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
