"""Methods of the spine that encode images, video or audio, recorded as one node with the modules that they use.

transformers' models for several modalities encode a tower's input in ``get_image_features`` and its like. Their code
depends on data: the number of images of a row, the grid of each image. It is not traced::

    pixel_values ─────────────┐
    get_attr vision_tower ────┼── get_image_features ── getattr pooler_output ── masked_scatter ── layers.0 ── ...
    get_attr projector ───────┘

The modules are values of the graph. The node runs on the stage of their parameters, the first one.
"""

import copy
import inspect
import operator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.counted import counted
from nxdpp.ground.torch_names import MODULES, PARAMETERS
from nxdpp.tracing.code.names import attributes_in
from nxdpp.tracing.graph.calls import OpaqueCall, has_proxy, record_opaque_call
from nxdpp.tracing.graph.swap import all_swapped
from nxdpp.tracing.sizes.checked_answers import check_in_every_step
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.values.lost_changes import ROOT

FEATURES = ("get_image_features", "get_video_features", "get_audio_features")
# Positions of tokens among images, read from the data: (A, B, T) for rotary positions along A axes, such as time,
# height and width.
_POSITIONS = ("get_rope_index",)
_POSITION_IDS = InputSpec(3, torch.int64)
# Types whose features are a list with a tensor for each row.
_LISTS_OF_FEATURES = frozenset({"idefics2", "idefics3", "smolvlm"})
_LIST = InputSpec(None, None, list)


def recorded_feature_methods(tracer: fx.Tracer, spine: dict[str, nn.Module]) -> AbstractContextManager[None]:
    """Record calls of the feature methods of ``spine``, the modules above layers by their names."""

    def is_below(name: str, path: str, module: nn.Module) -> bool:
        parts = [part for other, part in spine.items() if not path or other.startswith(f"{path}.")]
        return any(part is not module and hasattr(part, name) for part in parts)

    return all_swapped(
        (vars(module), {name: _MethodRecorder(tracer, path, module, name, spine)})
        for path, module in spine.items()
        for name in (*FEATURES, *_POSITIONS)
        if hasattr(type(module), name) and not is_below(name, path, module)
    )


@dataclass(eq=False)
class _MethodRecorder:
    """A method of ``_owner`` that adds a node for a call with a traced value."""

    _tracer: fx.Tracer
    _path: str
    _owner: nn.Module
    _name: str
    _spine: dict[str, nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not has_proxy(args, kwargs) or self._runs_layers():
            return getattr(type(self._owner), self._name)(self._owner, *args, **kwargs)
        names = _names_in(type(self._owner), self._name)
        parts = {
            key: self._part(key) for key in (*MODULES.of(self._owner), *PARAMETERS.of(self._owner)) if key in names
        }
        given = {key: value for key, value in kwargs.items() if value is not None}
        result: Any = record_opaque_call(FeatureMethod(self._owner, self._name), (parts, *args), given)
        if self._name in _POSITIONS:
            return self._with_spec(result, operator.getitem, 0, _POSITION_IDS), result[1]
        if getattr(getattr(self._owner, "config", None), "model_type", None) in _LISTS_OF_FEATURES:
            result.pooler_output = self._with_spec(result, getattr, "pooler_output", _LIST)
        if count := _deepstack(self._owner):
            features = self._tracer.create_proxy("call_function", getattr, (result, "deepstack_features"), {})
            checked = record_opaque_call(expect_length, (features, count), {})
            result.deepstack_features = [
                self._tracer.create_proxy("call_function", operator.getitem, (checked, index), {})
                for index in range(count)
            ]
        return result

    def _runs_layers(self) -> bool:
        """Return whether the method runs a module above layers, which is cut (CLIP): it is then traced through."""
        function = inspect.unwrap(getattr(type(self._owner), self._name))
        paths = {f"{self._path}.{key}" if self._path else key for key in attributes_in(function)}
        return not paths.isdisjoint(self._spine)

    def _with_spec(self, source: fx.Proxy, function: Any, argument: Any, spec: InputSpec) -> fx.Proxy:
        part = self._tracer.create_proxy("call_function", function, (source, argument), {})
        part.node.meta["spec"] = spec
        return part

    def _part(self, key: str) -> Any:
        path = f"{self._path}.{key}" if self._path else key
        if path in self._spine:
            return None
        return self._tracer.create_proxy("get_attr", f"{ROOT}.{path}", (), {})


class FeatureMethod:
    """A method of ``owner`` that runs with the modules and parameters that it is given."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner = owner
        self.__name__ = name
        self.__qualname__ = f"{type(owner).__qualname__}.{name}"
        self.__module__ = type(owner).__module__

    def __call__(self, parts: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call the method on a copy of the owner that has only ``parts``."""
        axes = _axes(self.owner) if self.__name__ in _POSITIONS else None
        if axes is not None and hasattr(args[0], "fake_mode"):
            # The code reads the tokens (B, T), and fake tensors have no data.
            tokens = args[0]
            return tokens.new_zeros((axes, *tokens.shape)), tokens.new_zeros((tokens.size(0), 1))
        twin = copy.copy(self.owner)
        modules = {key: value for key, value in parts.items() if isinstance(value, nn.Module)}
        others = {key: value for key, value in parts.items() if value is not None and key not in modules}
        vars(twin).update({MODULES.name: modules, PARAMETERS.name: others})
        for name in (*FEATURES, *_POSITIONS):
            vars(twin).pop(name, None)
        result = getattr(twin, self.__name__)(*args, **kwargs)
        if axes is not None:
            _check_axes(result[0], axes)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def expect_length(values: Any, length: int) -> Any:
    """Return ``values``. Raise ``RuntimeError`` unless they are ``length`` items."""
    if len(values) != length:
        raise RuntimeError(
            f"the vision tower gives features of {counted(len(values), 'layer')}; the trace took {length}, the indexes "
            "in deepstack_visual_indexes that the tower has. Change the configuration before the model is wrapped."
        )
    return values


def answer_of_features(question: fx.Proxy) -> bool | None:
    """Return the truth of the output of a feature method, and record a check; ``None`` for any other value.

    Code asks ``if outputs.get("image")`` for an output that has items (Step3-VL).
    """
    target = question.node.target
    if not isinstance(target, OpaqueCall) or not isinstance(target.function, FeatureMethod):
        return None
    check_in_every_step(question, bool, True)
    return True


def _deepstack(owner: nn.Module) -> int:
    """The number of layers of the vision tower whose features are added to the language model's layers (Qwen3-VL)."""
    vision = getattr(getattr(owner, "config", None), "vision_config", None)
    indexes = getattr(vision, "deepstack_visual_indexes", None) or ()
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None) or 0
    return len({index for index in indexes if 0 <= index < depth})


def _axes(owner: nn.Module) -> int:
    """The number of axes of rotary positions: one for each section of the head, three by default."""
    config = getattr(owner, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    section = (getattr(text, "rope_parameters", None) or {}).get("mrope_section")
    return len(section) if section else 3


def _check_axes(positions: torch.Tensor, axes: int) -> None:
    if positions.ndim != 3 or positions.size(0) != axes:
        raise RuntimeError(
            f"get_rope_index gives positions {list(positions.shape)}; the trace took them to be ({axes}, B, T), one "
            f"for each size in mrope_section. Set rope_parameters['mrope_section'] of the text configuration to a "
            f"size for each axis before the model is wrapped."
        )


def _names_in(cls: type, method: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the names that ``method`` of ``cls`` and the methods that it calls read as attributes."""
    function = inspect.unwrap(getattr(cls, method))
    if not isinstance(function, FunctionType):
        return set()
    names = set(attributes_in(function))
    called = {name for name in names if isinstance(getattr(cls, name, None), FunctionType)} - seen
    for name in called:
        names |= _names_in(cls, name, seen | called)
    return names
