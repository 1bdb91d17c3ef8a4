"""Sources of a module's initial weights: the user's function, transformers' ``_init_weights``, ``reset_parameters``."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from nxdpp.ground.torch_names import BUFFERS, PARAMETERS, RESET
from nxdpp.ground.transformers_names import INIT_WEIGHTS, IS_INITIALIZED

ParameterInitialiser = Callable[..., Any]

# transformers sets this attribute on tensors that are already initialised.
_DONE = IS_INITIALIZED.name


def check_param_init_fn(function: Any, module: nn.Module) -> None:
    """Raise ``TypeError`` unless ``function`` can be called with a module, or with a module and a device.

    Raises ``ValueError`` if ``module`` has no tensor on the meta device.
    """
    if function is None:
        return
    if not callable(function):
        raise TypeError(f"param_init_fn must be a function of a module, not {function!r:.80}.")
    if not (_takes(function, 1) or _takes(function, 2)):
        raise TypeError(
            f"param_init_fn is called as param_init_fn(module) or param_init_fn(module, device), and "
            f"{getattr(function, '__name__', function)}{inspect.signature(function)} takes neither."
        )
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "param_init_fn initialises a model on the meta device, but this one has values already. "
            "Build it under nxdpp.init_on_device(torch.device('meta')), or leave param_init_fn out."
        )


def call_param_init_fn(function: ParameterInitialiser, module: nn.Module) -> None:
    """Call ``function`` with ``module``, and with the CPU device if it takes a second argument."""
    if _takes(function, 1):
        function(module)
    else:
        function(module, torch.device("cpu"))


def reset_parameters(module: nn.Module) -> None:
    """Call the module's ``reset_parameters``, or torch's ``_reset_parameters``, if it has one."""
    for name in ("reset_parameters", RESET.name):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


def has_own_tensors(module: nn.Module) -> bool:
    """Return whether ``module`` itself, without its children, has parameters or buffers."""
    return any(tensor is not None for tensor in (*PARAMETERS.of(module).values(), *BUFFERS.of(module).values()))


class HuggingFaceInitialiser:
    """Calls ``_init_weights`` of the transformers models in ``root``.

    As in ``PreTrainedModel.initialize_weights``, children come before parents, and the innermost model initialises.
    """

    def __init__(self, root: nn.Module) -> None:
        self._turns = {name: (owner, module) for name, module, owner in _turns(root, "", None)}

    def knows(self, name: str) -> bool:
        """Return whether the module of this name is part of a transformers model."""
        return name in self._turns

    def run(self, wanted: Collection[str], done: Sequence[torch.Tensor], begin: Callable[[str], None]) -> None:
        """Initialise the modules ``wanted`` and their ancestors, except the tensors ``done``.

        ``begin`` is called first with the name of each module.
        """
        with _skipped(done):
            for name, (owner, module) in self._turns.items():
                if name in wanted or not name or any(inner.startswith(f"{name}.") for inner in wanted):
                    begin(name)
                    INIT_WEIGHTS.of(owner)(module)

    def run_one(self, name: str, done: Sequence[torch.Tensor]) -> None:
        """Initialise one module, except the tensors ``done``."""
        owner, module = self._turns[name]
        with _skipped(done):
            INIT_WEIGHTS.of(owner)(module)


def _turns(
    module: nn.Module, name: str, owner: PreTrainedModel | None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    if isinstance(module, PreTrainedModel):
        owner = module
    for key, child in module.named_children():
        yield from _turns(child, f"{name}.{key}" if name else key, owner)
    if owner is not None:
        yield name, module, owner


@contextmanager
def _skipped(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make the functions of ``transformers.initialization`` and ``torch.nn.init`` skip these tensors."""
    marked = [tensor for tensor in tensors if not getattr(tensor, _DONE, False)]
    for tensor in marked:
        setattr(tensor, _DONE, True)
    try:
        with guard_torch_init_functions():
            yield
    finally:
        for tensor in marked:
            delattr(tensor, _DONE)


def _takes(function: ParameterInitialiser, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # A builtin function without a signature.
        return count == 1
    return True
