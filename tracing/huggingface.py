"""Changes to a Hugging Face model while its spine is traced, undone afterwards.

=====================================  ===============================================================
in the model                           while it is traced
=====================================  ===============================================================
the configuration of a spine module    a copy with ``use_cache=False`` and ``return_dict=True``
functions beside the spine's classes   one node each for calls with a traced value (masks, balancing losses)
``create_masks_for_generate``          traced through: one node for each mask of its dictionary
``loss_function``                      one node
``device``                             the device of the first input (a freed module would give "meta")
``gradient_checkpointing``             off; the layers are single nodes and have their own flag when they run
``_maybe_slice_kv_shared_inputs``      returns its inputs where it would slice off nothing
=====================================  ===============================================================
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import fx, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from nxdpp.tracing.calls import recorded
from nxdpp.tracing.checks import traced_isinstance
from nxdpp.tracing.spine import SpineTracer
from nxdpp.tracing.swap import StableSet, sources, swapped

_CAPTURES = ("output_hidden_states", "output_attentions", "output_router_logits")
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_ONE_MASK = ("create_causal_mask", "create_chunked_causal_mask", "create_sliding_window_causal_mask")
# Gemma 4's layers that share keys and values compute only the positions whose logits are kept.
_SLICE = "_maybe_slice_kv_shared_inputs"
# Predicates of framework code (``is_tracing``) must run while the model is traced.
_FRAMEWORKS = re.compile(r"(torch|builtins|abc|typing|transformers(?!\.models\.))\b")


class HuggingFaceTracer(SpineTracer):
    """The spine tracer for ``transformers.PreTrainedModel``, on transformers 5."""

    @contextmanager
    def surroundings(self, model: nn.Module, first_input: fx.Proxy | None) -> Iterator[None]:
        """Record constructors and functions, and change the model's spine for tracing."""
        assert isinstance(model, PreTrainedModel)
        device = model.device if first_input is None else first_input.device
        with super().surroundings(model, first_input), _traceable(self.spine_modules(model), device):
            yield


def refuse_untraceable(model: PreTrainedModel, constants: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for options with which a trace would give wrong numbers."""
    for flag in (*_CAPTURES, "use_cache"):
        if constants.get(flag):
            raise ValueError(
                f"{flag}={constants[flag]!r}: values that layers collect beside their output do not cross pipeline "
                f"stages. Leave {flag} out."
            )
    for name, config in _configurations(model).items():
        for flag in _CAPTURES:
            if getattr(config, flag, False):
                raise ValueError(
                    f"{name}.{flag} is on: intermediate outputs are collected by hooks inside layers and do not "
                    f"cross pipeline stages. Set {flag}=False in the configuration."
                )
        for rate in _LAYER_DROPS:
            if getattr(config, rate, 0):
                raise ValueError(
                    f"{name}.{rate}={getattr(config, rate)}: layers dropped at random are not supported in a "
                    f"pipeline, whose stages are fixed. Set {rate}=0.0 in the configuration."
                )


def refuse_packed_positions(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for several sequences in a row of ``position_ids`` that the unwrapped model would merge.

    Without a mask and a cache transformers keeps packed sequences apart. A pipeline has no cache; one process with
    ``use_cache=True`` has one.
    """
    positions = inputs.get("position_ids")
    if not isinstance(model, PreTrainedModel) or inputs.get("attention_mask") is not None:
        return
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return
    caching = [name for name, config in _configurations(model).items() if _makes_cache(config)]
    # transformers reads these values too, for each microbatch.
    if caching and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            f"position_ids have several sequences in a row, and {caching[0]}.use_cache is on: without a pipeline the "
            f"model would make a cache, and let these sequences attend to each other; a pipeline has no cache, and "
            f"keeps them apart. Set model.config.use_cache=False, with which both keep them apart, or give a mask."
        )


@contextmanager
def _traceable(spine: list[nn.Module], device: Any) -> Iterator[None]:
    copies: dict[int, PreTrainedConfig] = {}
    with ExitStack() as stack:
        for module in spine:
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                stack.enter_context(swapped(vars(module), {"config": _training_copy(config, copies)}))
            if getattr(module, "gradient_checkpointing", False):
                stack.enter_context(swapped(vars(module), {"gradient_checkpointing": False}))
            if hasattr(module, _SLICE):
                stack.enter_context(swapped(vars(module), {_SLICE: _unless_whole(getattr(module, _SLICE))}))
        for source in sources(spine, _FRAMEWORKS):
            functions = {n: recorded(f) for n, f in vars(source).items() if _is_own(f)}
            stack.enter_context(swapped(vars(source), functions))
        pick_loss = vars(PreTrainedModel)["loss_function"].fget
        stack.enter_context(recorded_masks())
        loss_function = property(lambda model: recorded(pick_loss(model)))
        stack.enter_context(patch.object(PreTrainedModel, "loss_function", loss_function))
        stack.enter_context(patch.object(PreTrainedModel, "device", PropertyMock(return_value=device)))
        yield


def _training_copy(config: PreTrainedConfig, copies: dict[int, PreTrainedConfig]) -> PreTrainedConfig:
    if id(config) in copies:
        return copies[id(config)]
    twin = copy.copy(config)
    copies[id(config)] = twin
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            setattr(twin, name, _training_copy(value, copies))
    if hasattr(twin, "use_cache"):
        twin.use_cache = False
    twin.return_dict = True
    return twin


def _unless_whole(slice_inputs: Callable[..., Any]) -> Callable[..., Any]:
    # Its code slices the masks too, and asks of each whether it is None, which only the data tells.
    parameters = inspect.signature(slice_inputs)
    sliced = list(parameters.parameters)
    sliced = sliced[: sliced.index("logits_to_keep")]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        keep = given["logits_to_keep"]
        if type(keep) is int and keep == 0:
            return tuple(given[name] for name in sliced)
        return slice_inputs(*args, **kwargs)

    return call


@contextmanager
def recorded_masks() -> Iterator[None]:
    """Record each mask that ``create_masks_for_generate`` makes as a node of its own."""
    functions: dict[str, Any] = {name: recorded(getattr(masking_utils, name)) for name in _ONE_MASK}
    by_layer_type = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    with ExitStack() as stack:
        stack.enter_context(swapped(by_layer_type, {key: _recorded(value) for key, value in by_layer_type.items()}))
        stack.enter_context(swapped(vars(masking_utils), {**functions, "set": StableSet}))
        yield


def _recorded(functions: Any) -> Any:
    if isinstance(functions, dict):
        return {name: recorded(function) for name, function in functions.items()}
    if isinstance(functions, partial):
        # ``makes_mask`` reads the Python module of the function.
        functions = update_wrapper(partial(functions), functions.func)
    return recorded(functions)


def _configurations(model: PreTrainedModel) -> dict[str, PreTrainedConfig]:
    parts = {f"config.{n}": part for n, part in vars(model.config).items() if isinstance(part, PreTrainedConfig)}
    return {"config": model.config, **parts}


def _makes_cache(config: PreTrainedConfig) -> bool:
    # Configurations of encoders have use_cache too, because they may become decoders.
    decodes = getattr(config, "is_decoder", True) or config.is_encoder_decoder
    return bool(getattr(config, "use_cache", False) and decodes)


def _is_own(value: Any) -> bool:
    traced_through = (traced_isinstance, masking_utils.create_masks_for_generate)
    return isinstance(value, FunctionType) and value not in traced_through
