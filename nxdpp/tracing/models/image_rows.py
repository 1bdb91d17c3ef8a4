"""Split of a batch with images or videos into microbatches, for transformers' models with images among the tokens.

The first dimension of such inputs is a number of images or of patches, not of rows. The tokens tell the row::

    input_ids       (B, T)      row 0: <image> x 4        row 1: <image> x 4, <image> x 8
    image_grid_thw  (3, 3)      image 0                   image 1, image 2
    pixel_values    (P, D)      patches of image 0        patches of images 1 and 2
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nxdpp.tracing.modules import listings


@dataclass(frozen=True)
class _Kind:
    """Names of the inputs and of the token of images, or of videos."""

    token: tuple[str, ...]
    pixels: str
    grid: str
    of_each: tuple[str, ...]


_KINDS = (
    _Kind(
        ("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw", ("image_sizes", "image_merge_sizes")
    ),
    _Kind(
        ("video_token_id", "video_token_index"),
        "pixel_values_videos",
        "video_grid_thw",
        ("second_per_grid_ts", "video_merge_sizes"),
    ),
)
# Types whose images have a first dimension of rows, with a second one of images; and the inputs of that dimension.
_BY_ROWS = frozenset({"idefics2", "idefics3", "mllama", "smolvlm"})
_OF_ROWS = ("pixel_values", "pixel_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")


def split_images(module: nn.Module, inputs: Mapping[str, Any], microbatches: int) -> list[dict[str, Any]]:
    """Return, for each microbatch, its part of the inputs that hold images or videos; an empty dict without images.

    ``input_ids`` of shape (B, T) is among ``inputs``; the first microbatches have a row more where B is no multiple.
    ``module`` is a transformers model, or has one inside. Raises ``ValueError`` where the tokens do not tell the row of
    each image or have no values (meta device), and for a microbatch without images of a model that needs some.
    """
    tokens = inputs.get("input_ids")
    if microbatches == 1 or not isinstance(tokens, torch.Tensor) or not tokens.ndim:
        return [{} for _ in range(microbatches)]
    ends = list(accumulate(len(rows) for rows in tokens.tensor_split(microbatches)))[:-1]
    parts = _split(module, inputs, ends)
    for name in sorted({name for part in parts for name in part}):
        lacking = next((number for number, part in enumerate(parts) if name not in part), None)
        if lacking is not None and _is_required(module, name):
            raise ValueError(
                f"microbatch {lacking} of {microbatches} has no {name}, which {type(module).__name__} needs. Order the "
                f"rows so that each microbatch of {len(tokens) // microbatches} has some, or use fewer microbatches."
            )
    return parts


def names_of_images(module: nn.Module, inputs: Mapping[str, Any]) -> set[str]:
    """Return the names of ``inputs`` whose first dimension may be one of images or patches; not without tokens."""
    if "input_ids" not in inputs or next(_configurations(module), None) is None:
        return set()
    return {name for kind in _KINDS for name in (kind.pixels, kind.grid, *kind.of_each)}.intersection(inputs)


def first_rows(module: nn.Module, inputs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the first ``rows`` of ``inputs`` with their images only; without rows, all rows with no images.

    Tokens of images without them become other ones, so such rows are good for nothing but a run whose loss is not used.
    ``module`` is as for ``split_images``. Raises ``ValueError`` as it does, and for no images of a model that needs
    some.
    """
    tokens = inputs["input_ids"]
    own, others = _split(module, inputs, [rows])
    names = {*own, *others}
    if missing := [name for name in names.difference(own) if _is_required(module, name)]:
        raise ValueError(f"the first {rows} rows have no {missing[0]}, which {type(module).__name__} needs.")
    kept = {name: value for name, value in inputs.items() if name not in names}
    if rows:
        whole = {name: value for name, value in kept.items() if isinstance(value, torch.Tensor) and value.ndim}
        return kept | {name: value[:rows] for name, value in whole.items()} | own
    config = next(_configurations(module), None)
    of_images = [token for kind in _KINDS if (token := _token(kind, config)) is not None]
    other = next(number for number in range(len(of_images) + 1) if number not in of_images)
    return kept | {"input_ids": tokens.masked_fill(torch.isin(tokens, tokens.new_tensor(of_images)), other)}


def _split(module: nn.Module, inputs: Mapping[str, Any], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Return the images of the rows up to each of ``ends``, and of the remaining ones."""
    parts: list[dict[str, Any]] = [{} for _ in range(len(ends) + 1)]
    tokens = inputs["input_ids"]
    if not any(kind.pixels in inputs for kind in _KINDS):
        return parts
    config = next(_configurations(module), None)
    if config is not None and config.model_type in _BY_ROWS:
        token = _token(_KINDS[0], config)
        return parts if token is None else _of_rows_with_images(inputs, tokens.eq(token).any(dim=1), ends)
    for kind in _KINDS if config is not None else ():
        token = _token(kind, config)
        if isinstance(inputs.get(kind.pixels), torch.Tensor) and token is not None:
            if tokens.is_meta or getattr(inputs.get(kind.grid), "is_meta", False):
                raise ValueError(
                    f"the tokens tell the rows of {kind.pixels}, and input_ids or {kind.grid} are on the meta device. "
                    f"Give these inputs with values."
                )
            counts = (tokens == token).sum(dim=1).tolist()
            for name, sizes in _sizes(kind, config, inputs, counts, ends).items():
                for part, piece in zip(parts, inputs[name].split(sizes), strict=True):
                    if len(piece):
                        part[name] = piece
    return parts


def _is_required(module: nn.Module, name: str) -> bool:
    parameter = inspect.signature(module.forward).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _configurations(module: nn.Module) -> Iterator[PreTrainedConfig]:
    names = [name for kind in _KINDS for name in kind.token]
    for child in listings.modules(module):
        if isinstance(child, PreTrainedModel) and any(hasattr(child.config, name) for name in names):
            yield child.config
            return


def _token(kind: _Kind, config: Any) -> int | None:
    return next((value for name in kind.token if (value := getattr(config, name, None)) is not None), None)


def _of_rows_with_images(
    inputs: Mapping[str, Any], has_image: torch.Tensor, ends: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the images of each part with some; a model takes no part with empty places of images only."""
    rows = has_image.tensor_split(ends)
    if has_image.is_meta or all(own.any() for own in rows) or not has_image.any():
        return [{} for _ in rows]
    tensors = {name: inputs[name] for name in _OF_ROWS if isinstance(inputs.get(name), torch.Tensor)}
    given = {name: tensor.tensor_split(ends) for name, tensor in tensors.items()}
    return [
        {name: parts[number] for name, parts in given.items()} if own.any() else {} for number, own in enumerate(rows)
    ]


def _sizes(
    kind: _Kind, config: Any, inputs: Mapping[str, Any], counts: Sequence[int], ends: Sequence[int]
) -> dict[str, list[int]]:
    """Return the first dimension of each input of ``kind``, of rows up to each of ``ends`` and of the remaining ones.

    ``counts`` has the number of image tokens of each row.
    """
    grid = inputs.get(kind.grid)
    pixels = inputs[kind.pixels]
    if grid is not None:
        patches = grid.prod(dim=1).tolist()
        given = next((inputs[name] for name in kind.of_each if name.endswith("_merge_sizes") and name in inputs), None)
        sides = [config.vision_config.spatial_merge_size] * len(patches) if given is None else given.tolist()
        merged = [number // side**2 for number, side in zip(patches, sides, strict=True)]
        of_rows = _images_of_rows(merged, counts)
        if of_rows is None:
            # Each line of an image may have a token of its own (HunYuan-VL).
            are_equal = bool((grid == grid[:1]).all())
            of_rows = _equal_images_of_rows(len(patches), counts) if are_equal else _one_image(len(patches), counts)
    else:
        patches = [1] * len(pixels)
        of_rows = _equal_images_of_rows(len(pixels), counts)
    if of_rows is None or sum(patches) != len(pixels):
        raise ValueError(
            f"the tokens do not tell the rows of {kind.pixels} {list(pixels.shape)}: the rows have {list(counts)} "
            f"tokens of it. Give split_inputs_fn, a function of the inputs and num_microbatches that returns the "
            f"inputs of each microbatch, or use num_microbatches=1."
        )
    images = [int(own.sum()) for own in torch.tensor(of_rows).tensor_split(ends)]
    of_pixels = [sum(patches[end - number : end]) for number, end in zip(images, accumulate(images), strict=True)]
    others = [name for name in (kind.grid, *kind.of_each) if isinstance(inputs.get(name), torch.Tensor)]
    return {kind.pixels: of_pixels} | dict.fromkeys(others, images)


def _images_of_rows(lengths: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return the number of images of each row.

    Images of ``lengths`` tokens fill the ``counts`` of the rows in order.
    """
    remaining = list(lengths)
    of_rows = []
    for count in counts:
        taken = 0
        while count > 0 and remaining:
            count -= remaining.pop(0)
            taken += 1
        if count:
            return None
        of_rows.append(taken)
    return None if remaining else of_rows


def _equal_images_of_rows(images: int, counts: Sequence[int]) -> list[int] | None:
    """Return the number of images of each row, for images of equally many tokens, or one for each row."""
    total = sum(counts)
    if images and total and total % images == 0 and not any(count % (total // images) for count in counts):
        return [count * images // total for count in counts]
    return _one_image(images, counts)


def _one_image(images: int, counts: Sequence[int]) -> list[int] | None:
    """Return one image for each row, if there are as many as rows, and all rows or none have tokens of them."""
    return [1] * images if images == len(counts) and (all(counts) or not any(counts)) else None
