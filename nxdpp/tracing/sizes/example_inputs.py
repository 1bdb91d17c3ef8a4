"""Example inputs for the trace at construction, before a step gives real ones."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.sizes.input_specs import UNKNOWN, InputSpec
from nxdpp.tracing.sizes.sizes import Shapes, shapes_of

# Inputs of these names have a known spec. Other inputs of a transformers model are tokens.
_SPECS = {
    "inputs_embeds": InputSpec(3, torch.float32),
    "input_features": InputSpec(3, torch.float32),
    "input_values": InputSpec(2, torch.float32),
    "pixel_values": InputSpec(4, torch.float32),
}
_TOKENS = InputSpec(2, torch.int64)
# The names of tokens among the inputs of a module around a transformers model.
_TOKEN_NAMES = re.compile(r"(.*_)?(ids|input_ids|labels|mask)")

_ROWS = 2
# Divisible by the block and chunk sizes of most models.
_LENGTH = 512
_IMAGE = 224
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_CHANNELS = 3


def example_specs(
    module: nn.Module, input_names: Sequence[str] | None, batch: Mapping[str, torch.Tensor] | None = None
) -> Mapping[str, InputSpec]:
    """Return the specs of the inputs of the first trace, which decides the stage of each parameter.

    The inputs come from ``batch`` or ``input_names``. By default they are the inputs of ``forward`` without a default.
    A Hugging Face model also has its main input and its labels. A module around Hugging Face models also has
    the main input and labels of the first one, if its ``forward`` names them or passes them on.
    """
    if batch is not None:
        return {name: InputSpec(value.ndim, value.dtype) for name, value in batch.items()}
    models = transformers_models(module)
    names = _input_names(module, models) if input_names is None else list(input_names)
    if isinstance(module, PreTrainedModel):
        # An input that a subclass requires need not be tokens.
        usual = names if input_names is not None else _main_inputs(module)
        return {name: _SPECS.get(name, _TOKENS if name in usual else UNKNOWN) for name in names}
    tokens = {name: _TOKENS if models and _TOKEN_NAMES.fullmatch(name) else UNKNOWN for name in names}
    return {**tokens, **{name: _SPECS[name] for name in names if models and name in _SPECS}}


def _input_names(module: nn.Module, models: Mapping[str, PreTrainedModel]) -> list[str]:
    parameters = inspect.signature(module.forward).parameters
    required = required_inputs(module)
    if isinstance(module, PreTrainedModel):
        usual = [name for name in _main_inputs(module) if name in parameters]
        return [*usual, *(name for name in required if name not in usual)]
    if not models:
        return required
    model = next(iter(models.values()))
    known = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        known.update(inspect.signature(model.forward).parameters)
    # A required input, such as a batch of another form, takes the place of the main input.
    return [*required, *(name for name in _main_inputs(model) if name in known and name not in required)]


def required_inputs(module: nn.Module) -> list[str]:
    """Names of the inputs of ``module.forward`` without a default."""
    return [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


def _main_inputs(model: PreTrainedModel) -> tuple[str, str]:
    return str(model.main_input_name), "labels"


def example_shapes(
    module: nn.Module, specs: Mapping[str, InputSpec], batch: Mapping[str, torch.Tensor] | None = None
) -> Shapes:
    """Return the shapes of ``batch``, or a likely shape for each input of known dimensions and dtype.

    Only code that asks for sizes while it is traced sees them. The graph then serves only inputs with the same answers.
    """
    if batch is not None:
        return shapes_of(batch)
    shapes = {}
    for name, spec in specs.items():
        if spec.dimensions is not None and spec.dtype is not None:
            shapes[name] = torch.Size(_sizes(module, name, spec.dimensions)), spec.dtype
    return shapes


def _sizes(module: nn.Module, name: str, dimensions: int) -> list[int]:
    models = [module, *transformers_models(module).values()]
    configs = [config for model in models for config in _configurations(getattr(model, "config", None))]
    if name == "pixel_values" and dimensions == 4:
        side = _first(configs, ("image_size",), _IMAGE)
        return [_ROWS, _first(configs, ("num_channels", "in_channels"), _CHANNELS), side, side]
    if name == "input_features" and dimensions == 3:
        # Two audio frames make one position of the encoder.
        frames = 2 * _first(configs, ("max_source_positions",), _LENGTH)
        return [_ROWS, _first(configs, ("num_mel_bins", "feature_size"), _LENGTH), frames]
    # Half of the model's positions: ProphetNet cannot run at its full length.
    length = min(_LENGTH, _first(configs, _POSITIONS, 2 * _LENGTH) // 2 or 1)
    # Audio models have one row for each code book.
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
