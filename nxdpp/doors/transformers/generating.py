"""Evaluations of ``PipelineTrainer`` by generated tokens, as ``Seq2SeqTrainer`` does it: ``predict_with_generate``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import Trainer

from nxdpp.generation.batches import samples
from nxdpp.ground.transformers_names import DEFAULT_SETTINGS, FROM_MODEL_CONFIG

FIELDS = frozenset({"predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"})
"""Fields of ``Seq2SeqTrainingArguments`` that mean what they mean for ``Seq2SeqTrainer``."""


class GeneratedPredictions:
    """The generation of an evaluation of ``trainer``, with ``settings`` of ``generate``."""

    def __init__(self, trainer: Trainer, settings: Mapping[str, Any]) -> None:
        self._trainer = trainer
        args: Any = trainer.args
        given = {name: value for name, value in settings.items() if value is not None}
        if not {"max_length", "max_new_tokens"} & given.keys() and args.generation_max_length is not None:
            given["max_length"] = args.generation_max_length
        if "num_beams" not in given and args.generation_num_beams is not None:
            given["num_beams"] = args.generation_num_beams
        self._settings = given

    def of(self, pipelined: Any, batches: Sequence[Mapping[str, Any]]) -> list[tuple[torch.Tensor, Any]]:
        """Return the generated tokens (B, T) and the labels of each batch, both padded; collective over all ranks."""
        config = pipelined.original_module.generation_config
        inputs = [_inputs_of(batch) for batch in batches]
        draws = samples(pipelined.original_module, self._settings)
        if draws or not {"max_length", "max_new_tokens"} & self._settings.keys():
            # One process generates one batch after the other: random numbers and the default length follow that.
            tokens = []
            for each in inputs:
                tokens.append(pipelined.generate(**each, **self._settings))
                self._take_defaults(config)
        else:
            tokens = pipelined.generate(inputs, **self._settings)
            self._take_defaults(config)
        return [
            (self._padded(each, config), self._padded(batch["labels"], config) if "labels" in batch else None)
            for each, batch in zip(tokens, batches, strict=True)
        ]

    def _take_defaults(self, config: Any) -> None:
        """Give ``config`` the default of each field without a value, as ``Seq2SeqTrainer`` does after a batch."""
        FROM_MODEL_CONFIG.set(config, False)
        config.update(**DEFAULT_SETTINGS.of(config)(), defaults_only=True)

    def _padded(self, tensor: torch.Tensor, config: Any) -> torch.Tensor:
        length = tensor.shape[-1]
        most = config.max_length
        if length >= most and config.max_new_tokens is not None:
            most = config.max_new_tokens + 1
        if length >= most:
            return tensor
        return functional.pad(tensor, (0, most - length), value=self._pad_token())

    def _pad_token(self) -> int:
        """The token that ``Seq2SeqTrainer`` pads with; ``ValueError`` without one."""
        processing, config = self._trainer.processing_class, getattr(self._trainer.model, "config", None)
        found = getattr(processing, "pad_token_id", None)
        if found is None:
            found = getattr(processing, "eos_token_id", None)
        if found is None:
            found = getattr(config, "pad_token_id", None)
        if found is None:
            raise ValueError("evaluation by generated tokens pads rows: set pad_token_id in the model's configuration")
        return int(found)


def _inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a generation: without decoder inputs that were made of the labels."""
    made = batch.get("decoder_input_ids")
    labels = batch.get("labels")
    left_out = {"labels"}
    if made is not None and labels is not None and made.shape == labels.shape:
        left_out |= {"decoder_input_ids", "decoder_attention_mask"}
    return {name: value for name, value in batch.items() if name not in left_out}
