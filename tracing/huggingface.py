"""What has to be different about a Hugging Face model while its spine is traced, and only then.

=====================================  ===============================================================
in the model                           while it is traced
=====================================  ===============================================================
the configuration of a spine module    a copy with ``use_cache=False`` and ``return_dict=True``
functions beside the spine's classes   one node each where given a traced value (masks, balancing losses)
``loss_function``                      one node
``device``                             the device of the first input (a freed module would say "meta")
``gradient_checkpointing``             off: the layers, which are single nodes, still see it when they run
=====================================  ===============================================================
"""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import fx, nn
from transformers import PreTrainedConfig, PreTrainedModel

from nxdpp.tracing.masks import SEVERAL_MASKS, recorded_masks
from nxdpp.tracing.opaque import recorded
from nxdpp.tracing.spine import SpineTracer, sources
from nxdpp.tracing.swap import swapped
from nxdpp.tracing.type_tests import traced_isinstance

_CAPTURES = ("output_hidden_states", "output_attentions", "output_router_logits")
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
# Framework code beside the models decides by predicates (``is_tracing``) that must be asked, not recorded.
_FRAMEWORKS = re.compile(r"(torch|builtins|abc|typing|transformers(?!\.models\.))\b")


class HuggingFaceTracer(SpineTracer):
    """The spine tracer for ``transformers.PreTrainedModel``, on transformers 5."""

    @contextmanager
    def surroundings(self, model: nn.Module, first_input: fx.Proxy | None) -> Iterator[None]:
        """Record constructors, and make the model's spine ready to be traced."""
        assert isinstance(model, PreTrainedModel)
        device = model.device if first_input is None else first_input.device
        with super().surroundings(model, first_input), _traceable(self.spine_modules(model), device):
            yield


def refuse_untraceable(model: PreTrainedModel, constants: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for what a trace would turn into silently wrong numbers."""
    for flag in (*_CAPTURES, "use_cache"):
        if constants.get(flag):
            raise ValueError(
                f"{flag}={constants[flag]!r}: what layers collect beside their output does not cross pipeline stages. "
                f"Leave {flag} out."
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
    """Raise ``ValueError`` for several sequences in a row where the unwrapped model's cache would hide them.

    transformers keeps the sequences of packed ``position_ids`` apart where there is neither a mask nor a cache.
    There is none in a pipeline, and in one process with ``use_cache=True`` there is.
    """
    positions = inputs.get("position_ids")
    if not isinstance(model, PreTrainedModel) or inputs.get("attention_mask") is not None:
        return
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return
    caching = [name for name, config in _configurations(model).items() if _makes_cache(config)]
    # Transformers asks the same of the values, with each microbatch.
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


def _configurations(model: PreTrainedModel) -> dict[str, PreTrainedConfig]:
    found = {"config": model.config}
    for name, value in vars(model.config).items():
        if isinstance(value, PreTrainedConfig):
            found[f"config.{name}"] = value
    return found


def _makes_cache(config: PreTrainedConfig) -> bool:
    # Configurations of encoders have use_cache too, for the decoders that they may be.
    decodes = getattr(config, "is_decoder", True) or config.is_encoder_decoder
    return bool(getattr(config, "use_cache", False) and decodes)


def _is_own(value: Any) -> bool:
    return isinstance(value, FunctionType) and value is not traced_isinstance and value not in SEVERAL_MASKS
