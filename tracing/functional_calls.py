"""Calls of modules with other parameters: ``torch.func.functional_call(layer, {"weight": w}, x)``."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils import stateless

from nxdpp.tracing import listings
from nxdpp.tracing.parameter_devices import ParameterOfModel


@contextmanager
def refused_functional_calls() -> Iterator[None]:
    """Refuse calls of modules with other parameters or buffers than their own.

    The node of a module has the module's name alone, so each step would run it with its own. Raises ``RuntimeError``.
    """
    original = stateless._functional_call
    thread = threading.get_ident()

    def call(module: nn.Module, given: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            own: dict[str, torch.Tensor] = dict(listings.named_parameters(module, remove_duplicate=False))
            own |= dict(listings.named_buffers(module, remove_duplicate=False))
            given = {name: v.own if isinstance(v, ParameterOfModel) else v for name, v in given.items()}
            other = [name for name, value in given.items() if value is not own.get(name)]
            if other:
                raise RuntimeError(
                    f"functional_call runs {type(module).__name__} with another {other[0]} than its own; a stage would "
                    f"run it with its own. Move the call into the forward of a layer, or of a module without layers, "
                    f"which runs as one node."
                )
        return original(module, given, *args, **kwargs)

    with patch.object(stateless, "_functional_call", call):
        yield
