"""The model as the driver of a generation sees it: transformers' own ``generate``, whose forwards run on all ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from nxdpp.generation.caches import NAMES
from nxdpp.ground.transformers_names import REORDER_CACHE
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import extremes

_CACHE_FIELDS = (
    *("cache_implementation", "cache_config", "max_cache_len", "num_beams", "num_return_sequences", "do_sample"),
    *("prefill_chunk_size", "use_cache", "is_assistant"),
)

_FEATURES = ("get_image_features", "get_video_features")
"""Methods by which transformers' ``generate`` encodes images before the first forward."""

_DECODING = ("_sample", "_beam_search")

RunForward = Callable[[str, dict[str, Any]], Any]
"""Runs the module or method of a path with these arguments on all ranks, and returns its output."""


class DrivenModel:
    """Methods of a model of transformers, in front of the model's, which run a pipeline.

    Attributes:
        run_forward: of the model, whose path is ``""``, or of its encoder.
        prepare_cache: has the other ranks make a cache, by its settings, as this rank has made one.
        rank_device: the device of this rank. The first parameter may be on another rank.
        module_path: the name of this module in the model.
    """

    run_forward: RunForward
    prepare_cache: Callable[[dict[str, Any], dict[str, Any]], None]
    rank_device: torch.device
    module_path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model on all ranks."""
        if args:
            raise ValueError(
                "generate over a pipeline gives the inputs of a forward by name, and got some by position."
            )
        return self.run_forward(self.module_path, kwargs)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.rank_device

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder, whose forward runs on all ranks too."""
        encoder = super().get_encoder(*args, **kwargs)  # type: ignore[misc]  # of the model's class
        path = next((name for name, each in self.named_modules() if each is encoder), None)  # type: ignore[attr-defined]
        if path is None or encoder is self:
            return encoder
        return driven(encoder, self.run_forward, self.prepare_cache, self.rank_device, path)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        before = {name: model_kwargs.get(name) for name in NAMES}
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        made = {name: model_kwargs[name] for name in NAMES if model_kwargs.get(name) is not before[name]}
        if made:
            encoded = model_kwargs.get("encoder_outputs")
            settings = {name: getattr(generation_config, name, None) for name in _CACHE_FIELDS}
            self.prepare_cache(
                {
                    "settings": settings,
                    "mode": str(args[0].value),
                    "sizes": list(args[1:]),
                    "encoded": None if encoded is None else list(encoded[0].shape),
                },
                made,
            )

    def _valid_auto_compile_criteria(self, *args: Any) -> bool:
        # A compiled forward would be the module's own, without the other ranks.
        return False

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        # The other ranks would keep their kind of experts.
        return nullcontext()

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        if not synced_gpus or parallel_state.get_replica_size() == 1:
            return not this_peer_finished
        group = parallel_state.get_replica_control_group()
        return bool(extremes([not this_peer_finished], group, name="next token of the other replicas")[1][0])


def driven(
    module: nn.Module,
    run_forward: RunForward,
    prepare_cache: Callable[[dict[str, Any], dict[str, Any]], None],
    device: torch.device,
    path: str = "",
) -> Any:
    """Return a second object over the state of ``module``, with the methods of ``DrivenModel``."""
    kind = type(module)
    attributes: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "run_forward": staticmethod(run_forward),
        "prepare_cache": staticmethod(prepare_cache),
        "rank_device": device,
        "module_path": path,
    }
    attributes |= {name: _cacheless(getattr(kind, name)) for name in _DECODING if hasattr(kind, name)}
    if REORDER_CACHE.held_by(kind):
        attributes[REORDER_CACHE.name] = staticmethod(_refuse_reorder)
    base: Any = getattr(module, "base_model", module)
    prefix = next((f"{name}." for name, each in module.named_modules() if each is base and name), "")
    features = {
        name: staticmethod(wraps(getattr(base, name))(_by_name(run_forward, prefix + name)))
        for name in _FEATURES
        if hasattr(base, name)
    }
    if features:
        attributes["base_model"] = second_object(base, (type(base),), features)
    return second_object(module, (DrivenModel, kind), attributes)


def second_object(module: nn.Module, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
    """Return a second object over the state of ``module``."""
    made: Any = object.__new__(type(type(module).__name__, bases, attributes))
    made.__dict__ = module.__dict__
    return made


def _cacheless(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``decode`` without the cache in its output: a rank has only a part of it."""

    @wraps(decode)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = decode(*args, **kwargs)
        if not isinstance(result, dict) or not {*NAMES} & {*result.keys()}:
            return result
        return type(result)(**{name: value for name, value in result.items() if name not in NAMES})

    return run


def _by_name(run_forward: RunForward, path: str) -> Callable[..., Any]:
    return lambda **arguments: run_forward(path, arguments)


def _refuse_reorder(cache: Any, beams: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "generate over a pipeline cannot reorder the cache of this model, whose class has a _reorder_cache of its own: "
        "leave out num_beams, or give use_cache=False."
    )


def make_cache(module: Any, given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the caches, by name, that the driver has made for ``given``; on another rank."""
    made: dict[str, Any] = {}
    if given["encoded"] is not None:
        made["encoder_outputs"] = (torch.empty(given["encoded"], device="meta"),)
    settings = {name: value for name, value in given["settings"].items() if value is not None}
    is_assistant = settings.pop("is_assistant", False)
    config = GenerationConfig(**settings)
    config.is_assistant = is_assistant
    module._prepare_cache_for_generation(config, made, GenerationMode(given["mode"]), *given["sizes"])
    return {name: made[name] for name in NAMES if name in made}
