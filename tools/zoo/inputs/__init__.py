"""Batches that a tiny model trains on: three shapes, the second with padding."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.zoo.inputs import image_text, images, prompts, speech, spoken, text, time_series
from tools.zoo.inputs.shapes import PADDED, SHAPES
from tools.zoo.tasks import TASKS

__all__ = ["PADDED", "SHAPES", "inputs"]

_MAKERS: dict[str, Callable[[str, PreTrainedModel, int, torch.Generator], dict[str, Tensor]]] = {
    "text": text.batch,
    "images": images.batch,
    "prompts": prompts.batch,
    "speech": speech.batch,
    "spoken": spoken.batch,
    "image_text": image_text.batch,
    "time_series": time_series.batch,
}


def inputs(task: str, model: PreTrainedModel, shape_index: int, seed: int | None = None) -> dict[str, Tensor]:
    """Arguments of ``model``'s forward with labels, on the CPU, the same at each call with one ``seed``.

    Tokens are int64 ``(rows, tokens)``, of ``SHAPES[shape_index]``. Shape 1 alone has an ``attention_mask``: its rows
    end early, and labels are -100 from there on. Images are float32 ``(rows, channels, height, width)``.

    Raises ``ValueError`` if the forward takes no labels.
    """
    generator = torch.Generator().manual_seed(shape_index if seed is None else seed)
    return _MAKERS[TASKS[task].kind](task, model, shape_index, generator)
