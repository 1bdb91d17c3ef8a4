"""Changes to Hugging Face models while the spine above their layers is traced, undone afterwards.

The model is the root, or is inside it: under an adapter, a head, a loss.

=====================================  ===============================================================
in the model                           while it is traced
=====================================  ===============================================================
the configuration of a spine module    a copy with ``use_cache=False`` and ``return_dict=True``
functions next to the models' classes  one node each for calls with a traced value (masks, balancing losses)
``create_recurrent_attention_mask``    the same; ``None`` for inputs without a mask
static methods that draw numbers       one node each
an empty cache given to a layer        ``None``
functions of transformers elsewhere    the same, where the code above a model calls them
``create_masks_for_generate``          traced through: one node for each mask of its dictionary
``loss_function``                      one node
``device``                             the device of the first input (a freed module would give "meta")
``gradient_checkpointing``             off; the layers are single nodes and have their own flag when they run
methods that keep their results        called without their caches
``_maybe_slice_kv_shared_inputs``      returns its inputs where it would slice off nothing
=====================================  ===============================================================
"""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils, pytorch_utils
from transformers.utils import generic
from transformers.utils.generic import ModelOutput

from nxdpp.ground.transformers_names import SLICE_INPUTS
from nxdpp.tracing.graph.calls import recorded
from nxdpp.tracing.graph.data_checks import compilable_check
from nxdpp.tracing.graph.spine import SpineTracer
from nxdpp.tracing.graph.swap import StableSet, in_this_thread, sources, swapped
from nxdpp.tracing.graph.uses import may_draw
from nxdpp.tracing.models.caches import Caches, recorded_with_shapes, without_cache, without_empty_caches
from nxdpp.tracing.models.feature_methods import recorded_feature_methods
from nxdpp.tracing.models.transformers_models import returns_tuples, transformers_models
from nxdpp.tracing.values.type_answers import traced_isinstance

_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_ONE_MASK = ("create_causal_mask", "create_chunked_causal_mask", "create_sliding_window_causal_mask")
_RECURRENT_MASK = masking_utils.create_recurrent_attention_mask
# Gemma 4's layers that share keys and values compute only the positions whose logits are kept.
_SLICE = SLICE_INPUTS.name
# Predicates of framework code (``is_tracing``) must run while the model is traced.
_FRAMEWORKS = re.compile(r"(torch|builtins|abc|typing|transformers(?!\.models\.))\b")


class HuggingFaceTracer(SpineTracer):
    """The spine tracer for a ``transformers.PreTrainedModel``, or a module with some inside, on transformers 5."""

    @contextmanager
    def surroundings(self, model: nn.Module, first_input: fx.Proxy | None) -> Iterator[None]:
        """Record constructors and functions, and change the model's spine for tracing."""
        models = transformers_models(model, self._spine)
        device = next(iter(models.values())).device if first_input is None else first_input.device
        self._caches = Caches()
        self._inner = {inner: returns_tuples(inner) for inner in models.values() if inner is not model}
        spine = {name: model.get_submodule(name) for name in sorted(self._spine)}
        with ExitStack() as stack:
            stack.enter_context(super().surroundings(model, first_input))
            stack.enter_context(_traceable(self.spine_modules(model), models, device))
            stack.enter_context(recorded_feature_methods(self, spine))
            yield

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a module. The code around a transformers model gets no cache from it."""
        if not self.is_tracing_thread():
            return forward(*args, **kwargs)
        as_tuple = self._inner.get(m) if isinstance(m, PreTrainedModel) else None
        if as_tuple is None:
            if m in (self.submodule_paths or {}) and self.is_leaf_module(m, self.path_of_module(m)):
                args, kwargs = self._caches.for_layer(m, *without_empty_caches(m, args, kwargs))
            return super().call_module(m, forward, args, kwargs)
        if kwargs.get("use_cache"):
            kwargs = {**kwargs, "use_cache": False}
        output = without_cache(super().call_module(m, forward, args, kwargs))
        if as_tuple and kwargs.get("return_dict") is None and isinstance(output, ModelOutput):
            return output.to_tuple()
        return output


def refuse_untraceable(model: nn.Module, spine: Collection[str], constants: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for options of transformers models in ``spine`` with which a trace would be wrong."""
    if constants.get("use_cache"):
        raise ValueError(
            f"use_cache={constants['use_cache']!r}: a cache does not cross pipeline stages. Leave use_cache out."
        )
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if str(getattr(adapter, "peft_type", "")).endswith("ADALORA"):
            raise ValueError(
                "AdaLoRA adds a loss of the adapters of all layers, and moves ranks between them; each stage holds "
                "those of its own layers. Train with a LoraConfig."
            )
    for name, config in _configurations(model, spine).items():
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
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or inputs.get("attention_mask") is not None:
        return
    caching = [name for name, config in _configurations(model).items() if _makes_cache(config)]
    # transformers reads these values too, for each microbatch.
    if caching and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            f"position_ids have several sequences in a row, and {caching[0]}.use_cache is on: without a pipeline the "
            f"model would make a cache, and let these sequences attend to each other; a pipeline has no cache, and "
            f"keeps them apart. Set use_cache=False in {caching[0]} of the model, with which both keep them apart, or "
            f"give a mask."
        )


def asks_for_positions(module: nn.Module) -> bool:
    """Return whether ``module`` is a rotary embedding that asks for the largest position: dynamic RoPE."""
    return "dynamic" in str(getattr(module, "rope_type", ""))


@contextmanager
def _traceable(spine: list[nn.Module], models: Mapping[str, PreTrainedModel], device: Any) -> Iterator[None]:
    copies: dict[int, PreTrainedConfig] = {}
    with ExitStack() as stack:
        for module in spine:
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                stack.enter_context(swapped(vars(module), {"config": _training_copy(config, copies)}))
            if getattr(module, "gradient_checkpointing", False):
                stack.enter_context(swapped(vars(module), {"gradient_checkpointing": False}))
            stack.enter_context(swapped(vars(module), _recorded_static_methods(type(module))))
            if hasattr(module, _SLICE):
                stack.enter_context(swapped(vars(module), {_SLICE: _unless_whole(getattr(module, _SLICE))}))
        own = sources(_inside(spine, models), _FRAMEWORKS)
        for source in sources(spine, _FRAMEWORKS):
            functions = {
                n: _recorded_function(f)
                for n, f in vars(source).items()
                if _is_function(f) and (source in own or _is_theirs(f))
            }
            stack.enter_context(swapped(vars(source), functions))
        stack.enter_context(recorded_masks())
        stack.enter_context(swapped(vars(generic), {"is_tensor": _is_tensor}))
        # Methods that keep their results keep none for torch.compile. A trace would leave its values there.
        stack.enter_context(swapped(vars(pytorch_utils), {"is_torchdynamo_compiling": lambda: True}))
        for name, read in (("loss_function", _recorded_loss), ("device", lambda pick, model: device)):
            stack.enter_context(patch.object(PreTrainedModel, name, _while_traced(name, read)))
        yield


def _recorded_static_methods(cls: type) -> dict[str, Any]:
    """The static methods of transformers that draw random numbers, and may ask data whether to, as one node each."""
    found = {name: value for owner in reversed(cls.__mro__) for name, value in vars(owner).items()}
    methods = {name: value.__func__ for name, value in found.items() if isinstance(value, staticmethod)}
    return {n: recorded_with_shapes(f) for n, f in methods.items() if _is_theirs(f) and may_draw(f)}


def _inside(spine: list[nn.Module], models: Mapping[str, PreTrainedModel]) -> list[nn.Module]:
    """The modules of ``spine`` that are in one of ``models``, by name."""
    if "" in models:
        return spine
    inside = {part for model in models.values() for part in model.modules()}
    return [module for module in spine if module in inside]


def _while_traced(name: str, read: Callable[[Callable[[Any], Any], Any], Any]) -> property:
    """The property ``name`` of ``PreTrainedModel``, read by ``read(getter, model)`` in this thread."""
    pick = getattr(PreTrainedModel, name).fget
    # A model that runs on fake tensors, in another thread, needs its own device.
    return property(in_this_thread(partial(read, pick), pick))


def _recorded_loss(pick: Callable[[Any], Any], model: Any) -> Any:
    return recorded(pick(model))


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
    functions: dict[str, Any] = {name: recorded_with_shapes(getattr(masking_utils, name)) for name in _ONE_MASK}
    by_layer_type = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    recorded_types = {key: _recorded(value) for key, value in by_layer_type.items()}
    with swapped(by_layer_type, recorded_types), swapped(vars(masking_utils), {**functions, "set": StableSet}):
        yield


def _recorded(functions: Any) -> Any:
    if isinstance(functions, dict):
        return {name: _recorded_function(function) for name, function in functions.items()}
    if isinstance(functions, partial):
        # ``makes_mask`` reads the Python module of the function.
        functions = update_wrapper(partial(functions), functions.func)
    return _recorded_function(functions)


def _recorded_function(function: Callable[..., Any]) -> Callable[..., Any]:
    record = recorded_with_shapes(function)
    if function is not _RECURRENT_MASK:
        return record
    parameters = inspect.signature(function)

    # Code asks whether this mask is None, and without a mask in the inputs it is.
    def call(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        return None if given["attention_mask"] is None else record(*args, **kwargs)

    return call


def _configurations(model: nn.Module, spine: Collection[str] | None = None) -> dict[str, PreTrainedConfig]:
    """The configurations of the transformers models in ``model``, and the ones inside of these, by their names."""
    found: dict[str, PreTrainedConfig] = {}
    for name, inner in transformers_models(model, spine).items():
        own = f"{name}.config" if name else "config"
        parts = {f"{own}.{n}": part for n, part in vars(inner.config).items() if isinstance(part, PreTrainedConfig)}
        found |= {own: inner.config, **parts}
    return found


def _makes_cache(config: PreTrainedConfig) -> bool:
    # Configurations of encoders have use_cache too, because they may become decoders.
    decodes = getattr(config, "is_decoder", True) or config.is_encoder_decoder
    return bool(getattr(config, "use_cache", False) and decodes)


def _is_function(value: Any) -> bool:
    traced_through = (traced_isinstance, compilable_check, masking_utils.create_masks_for_generate)
    return isinstance(value, FunctionType) and value not in traced_through


def _is_tensor(value: Any, original: Callable[[Any], bool] = generic.is_tensor) -> bool:
    # A ModelOutput asks it of its first field; a run on fake tensors for the answer may take minutes (Mamba).
    return isinstance(value, fx.Proxy) or original(value)


def _is_theirs(function: Any) -> bool:
    return str(function.__module__).startswith("transformers.")
