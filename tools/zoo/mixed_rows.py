"""Sweep of mixed rows: vision-language types, of which the first microbatch has no image and the others have some.

Each type is cut in three and trained in one process. Loss and every gradient are those of the unwrapped model on the
same microbatches, as in the training sweep. *Not built*: its model in one process takes no rows without an image, or
the zoo has no images for it.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from nxdpp.tracing.models.image_rows import split_images
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import MICROBATCHES, Batch, compare, microbatches_of
from tools.zoo.inputs.image_text import image_token
from tools.zoo.sweep import Verdict
from tools.zoo.with_loss import with_loss

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
TEXT = 50


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped model."""
    try:
        bare = build(task, model_type)
        batch = inputs(task, bare, 0)
        parts = without_images_at_first(bare, batch)
    except Exception as error:
        return Verdict("does not build", f"{type(error).__name__}: {error}")
    if parts is None:
        return Verdict("does not build", "no images that go with rows")
    joined = {name: torch.cat([part[name] for part in parts if name in part]) for name in batch}
    model = with_loss(task, bare)
    given = ARGUMENTS.get(model_type, {})
    return compare(model, copy.deepcopy(model), [joined], (3,), (True,), given, parts=[parts])


def without_images_at_first(model: Any, batch: Batch) -> list[dict[str, Tensor]] | None:
    """Return the microbatches of ``batch``, the first one without its images; ``None`` for a batch without images."""
    images = split_images(model, batch, MICROBATCHES)
    if not images[0]:
        return None
    parts = microbatches_of(batch)
    first = {name: value.clone() for name, value in parts[0].items() if name not in images[0]}
    first["input_ids"][first["input_ids"] == image_token(model.config)] = TEXT
    first["labels"] = first["input_ids"].clone()
    for name in {*_TOKEN_TYPES} & {*first}:
        first[name].zero_()
    return [first, *parts[1:]]
