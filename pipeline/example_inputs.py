"""Shapes of inputs that nobody has given yet, for the trace at construction."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig

from nxdpp.tracing.input_specs import InputSpec
from nxdpp.tracing.sizes import Shapes, shapes_of

_ROWS = 2
# Divisible by the block and chunk sizes of most models that want their lengths so.
_LENGTH = 512
_IMAGE = 224
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_CHANNELS = 3


def example_shapes(
    module: nn.Module, specs: Mapping[str, InputSpec], batch: Mapping[str, torch.Tensor] | None = None
) -> Shapes:
    """The shapes of ``batch``; without one, a likely shape for each input whose dimensions and dtype are known.

    Only code that asks for sizes while it is traced sees them, and a graph that it made by them serves no inputs for
    which it would be another.
    """
    if batch is not None:
        return shapes_of(batch)
    shapes = {}
    for name, spec in specs.items():
        if spec.dimensions is not None and spec.dtype is not None:
            shapes[name] = torch.Size(_sizes(module, name, spec.dimensions)), spec.dtype
    return shapes


def _sizes(module: nn.Module, name: str, dimensions: int) -> list[int]:
    configs = list(_configurations(getattr(module, "config", None)))
    if name == "pixel_values" and dimensions == 4:
        side = _first(configs, ("image_size",), _IMAGE)
        return [_ROWS, _first(configs, ("num_channels", "in_channels"), _CHANNELS), side, side]
    if name == "input_features" and dimensions == 3:
        # Two frames of sound make one position of the encoder.
        frames = 2 * _first(configs, ("max_source_positions",), _LENGTH)
        return [_ROWS, _first(configs, ("num_mel_bins", "feature_size"), _LENGTH), frames]
    # Half of what a model has positions for: some, such as ProphetNet, cannot run at their full length.
    length = min(_LENGTH, _first(configs, _POSITIONS, 2 * _LENGTH) // 2 or 1)
    # Models of sound have a row for each code book.
    return [_ROWS * _first(configs, ("num_codebooks",), 1), *[length] * (dimensions - 1)]


def _configurations(config: object) -> Iterator[PreTrainedConfig]:
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _configurations(value)


def _first(configs: list[PreTrainedConfig], names: tuple[str, ...], default: int) -> int:
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and value > 0:
                return value
    return default
