"""Methods of a wrapped model, such as transformers': done for this rank's part, run as they are, or refused by name.

The wrapped module has parameters of other ranks on the meta device. A method that reads them, or that replaces modules,
would give a wrong answer without an error.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tracing.modules import listings

# Attributes that the pipeline has for itself, whatever the module inside has under these names.
_OF_THE_PIPELINE = ("part", "steps")
_BEFORE = "call it on the module before NxDPPModel(module)"

# Methods that would change modules or values which other ranks hold, or which the stages already have.
_ONLY_BEFORE = (
    "add_adapter", "add_weighted_adapter", "delete_adapter", "dequantize", "disable_input_require_grads", "post_init",
    "resize_position_embeddings", "resize_token_embeddings", "set_attn_implementation", "set_decoder", "set_encoder",
    "set_experts_implementation", "set_input_embeddings", "set_output_embeddings", "unload",
)  # fmt: skip
_REFUSED: Mapping[str, str] = dict.fromkeys(_ONLY_BEFORE, _BEFORE) | {
    "enable_input_require_grads": f"{_BEFORE}. gradient_checkpointing_enable() and apply_checkpoint do not need it",
    "from_pretrained": "nxdpp.load_pretrained(model, directory), on every rank, loads into this model",
    "init_weights": f"{_BEFORE}, or build the model with nxdpp.deferred_init, and call materialise()",
    "initialize_weights": f"{_BEFORE}, or build the model with nxdpp.deferred_init, and call materialise()",
    "load_adapter": f"{_BEFORE}, and load the values with nxdpp.load_pretrained(model, directory)",
    "merge_and_unload": f"{_BEFORE}, or after save_pretrained(directory) on the model of one process",
    "push_to_hub": "call save_pretrained(directory) on every rank, then upload the directory from one process: "
    "huggingface_hub.upload_folder(repo_id=..., folder_path=directory)",
    "tie_weights": f"{_BEFORE}. Weights that were tied then stay tied",
}

_MIXED = (
    "{}() of a pipelined model computes with parameters of several ranks, and a rank has the values of its own: make "
    "one layer of the modules that belong together (a layer and its average), so that one rank has both."
)


def wrapped_method(
    name: str, method: MethodType, module: nn.Module, tree: nn.Module, tied: Collection[Collection[str]]
) -> Callable[..., Any]:
    """Return what a pipelined model does for ``method``, called ``name``, of the module that it wraps.

    Args:
        name: of the attribute.
        method: of the whole model, or of its class.
        module: the whole model. Parameters of other ranks are on the meta device.
        tree: the modules of this rank.
        tied: names of each parameter and buffer of the whole model that has several.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _REFUSED:
            _refuse(name, "is not possible", _REFUSED[name])
        if name == "num_parameters":
            return _count(module, tree, tied, *args, **kwargs)
        if name == "get_memory_footprint":
            return _bytes_of(tree, *args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error) or not is_elsewhere(module, tree):
                raise
            raise RuntimeError(_MIXED.format(name)) from error
        return _checked(name, result, tree)

    return functools.wraps(method)(call)


class UnlessWrapped:
    """A method of a pipelined model that an attribute of the same name of the wrapped module hides."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, view: nn.Module | None, owner: type | None = None) -> Any:
        """Return the attribute of the wrapped module if it has one, otherwise the method of ``view``."""
        if view is not None and hasattr(vars(view).get("original_module"), self._method.__name__):
            return view.__getattr__(self._method.__name__)
        return self._method.__get__(view, owner)


def is_elsewhere(value: Any, tree: nn.Module) -> bool:
    """Return whether ``value`` is a module or a parameter that ``tree`` does not hold as a whole."""
    if not isinstance(value, nn.Module | nn.Parameter):
        return False
    held = set(map(id, listings.parameters(tree)))
    parameters = listings.parameters(value) if isinstance(value, nn.Module) else [value]
    return any(id(parameter) not in held for parameter in parameters)


def refuse_setting(view: nn.Module, name: str, value: Any) -> None:
    """Raise ``AttributeError`` for a ``value`` that ``view``, around the wrapped module, would keep without any use."""
    module = vars(view).get("original_module")
    if module is None or name == "local_module":
        return
    if name in _OF_THE_PIPELINE and name in vars(view):
        raise AttributeError(
            f"{name} is the pipeline's own: its {type(vars(view)[name]).__name__}. Set model.original_module.{name}, "
            f"an attribute of the {type(module).__name__} inside, on every rank."
        )
    if name in vars(view) or hasattr(type(view), name):
        return
    if isinstance(value, nn.Module | nn.Parameter):
        raise refused_member(name)
    if not name.startswith("_") and hasattr(module, name):
        raise AttributeError(
            f"{name} is an attribute of the {type(module).__name__} inside, and the stages would not see this value: "
            f"set it before NxDPPModel(module), or set model.original_module.{name} and call model.refresh(), both on "
            f"every rank."
        )


def refused_member(name: str) -> AttributeError:
    """Return the error for a module, parameter or buffer that is added to a pipelined model."""
    return AttributeError(
        f"{name} would be no part of the model: stages run the modules of the forward. Add it to the module before "
        f"NxDPPModel(module)."
    )


def _refuse(name: str, reason: str, remedy: str) -> NoReturn:
    raise RuntimeError(f"{name}() of a pipelined model {reason}: {remedy}.")


def _count(
    module: nn.Module,
    tree: nn.Module,
    tied: Collection[Collection[str]],
    only_trainable: bool = False,
    exclude_embeddings: bool = False,
) -> int:
    """Count the parameters of the whole model, each tied one once."""
    if parallel_state.get_tensor_model_parallel_size() > 1:
        _refuse("num_parameters", "counts parts of divided layers", "count before tensor_parallelize(module)")
    if only_trainable and is_elsewhere(module, tree):
        _refuse(
            "num_parameters",
            "does not know which parameters other ranks train",
            "add up sum(p.numel() for p in model.local_parameters() if p.requires_grad) of the ranks",
        )
    first_names = {name: min(names) for names in tied for name in names}
    embeddings = {f"{name}.weight" for name, each in listings.named_modules(module) if isinstance(each, nn.Embedding)}
    excluded = {first_names.get(name, name) for name in embeddings} if exclude_embeddings else set()
    sizes = {
        first_names.get(name, name): parameter.numel()
        for name, parameter in listings.named_parameters(module, remove_duplicate=False)
        if parameter.requires_grad or not only_trainable
    }
    return sum(size for name, size in sizes.items() if name not in excluded)


def _bytes_of(tree: nn.Module, return_buffers: bool = True) -> int:
    """Bytes of the parameters, and the buffers, of this rank."""
    tensors: list[torch.Tensor] = list(tree.parameters())
    if return_buffers:
        tensors += tree.buffers()
    return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)


def _checked(name: str, result: Any, tree: nn.Module) -> Any:
    """Return ``result``, unless another rank has its values."""
    is_foreign = isinstance(result, torch.Tensor) and result.is_meta and not isinstance(result, nn.Parameter)
    if is_foreign or is_elsewhere(result, tree):
        _refuse(
            name,
            "returns values that another rank holds",
            "local_module has this rank's modules, and nxdpp.gather_state_dict(model) all values on rank 0",
        )
    return result
