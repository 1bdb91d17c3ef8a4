"""Remedy for an error of a trace: advice that can help with this error.

===========================================================  ====================================================
the error                                                    remedy
===========================================================  ====================================================
raised by the model's own code, or a missing input           other inputs
in code inside of layers that the model declares             these layers as transformer_layer_cls
named by this package, with a second sentence                that sentence
in a function that a module above layers calls               the function as a single node
in transformers' own code, with a plain tracer               the default tracer
in a module that only plain fx goes through                  the module as a leaf, or the default tracer
in a module above layers                                     the line in a function or module of its own
===========================================================  ====================================================
"""

import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from nxdpp.tracing.code import frames
from nxdpp.tracing.code.frames import Frame, file_of, module_of, runs, variable
from nxdpp.tracing.graph.constructors import DRAWN
from nxdpp.tracing.graph.errors import TRACING, is_machinery

_PROXY = re.compile(r"\b\w*Proxy\b")
_BAD_CALL = re.compile(r"missing \d+ required|unexpected keyword argument|multiple values for argument")
_OTHER_INPUTS = "The model itself raises this error for these inputs. Change those of the step, or of partition_batch."
_OF_ITS_OWN = (
    "Move this line into a function that autowrap_functions names, or into a module of its own: either becomes a "
    "single node."
)
_CONSTANTS = (
    "Make them in __init__ (self.register_buffer(name, tensor, persistent=False)), or move this line into a module of "
    "its own, which runs as a single node."
)
_OF_PARAMETERS = (
    "They follow from parameters (self.parameters()), of which each rank holds its own. A penalty of all weights is "
    "the optimizer's weight_decay, or a loss of each rank after run_train: (0.01 * sum(p.pow(2).sum() for p in "
    "model.parameters())).backward(). A parameter that forward names (self.head.weight) is a value of the graph."
)
_OF_TRANSFORMERS = (
    "Leave tracer_cls out, or give 'hf': a plain tracer has no sizes and no mask, for which code of transformers asks "
    "above its layers. The default tracer answers it."
)


def remedy(error: Exception, any_tracer: bool, around: Sequence[str] = ()) -> str:
    """Return advice for ``error``, raised by a trace; empty where the error has its own.

    ``any_tracer`` is ``True`` for a tracer that goes through modules other than the ones above layers. ``around`` are
    the names of declared layer classes that hold the layers of this trace.
    """
    places = frames.frames_of(error.__traceback__)
    last, at = places[-1]
    if _is_of_the_model(error, last, at):
        return _OTHER_INPUTS
    if around:
        return (
            f"The modules that transformer_layer_cls names are inside of the layers that the model declares, whose "
            f"code is traced then. Leave transformer_layer_cls out, or name these layers, which run as single nodes: "
            f"transformer_layer_cls={[*around]}. {_OF_TRANSFORMERS if any_tracer else ''}"
        )
    if TRACING in file_of(last) and re.search(r"[a-z)]\. [A-Z]", str(error)):
        return ""
    own = [frame for frame, _ in places if not is_machinery(file_of(frame))]
    return _remedy_for_line([frame for frame in own if not frames.function_name(frame).startswith("<")], any_tracer)


def remedy_for_constants(made: Sequence[Any], any_tracer: bool) -> str:
    """Return advice for tensors that ``forward`` makes where the tracer records none: constants of the graph."""
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in made):
        return _OF_PARAMETERS
    return f"Leave tracer_cls out, or make them in __init__. {_OF_ITS_OWN}" if any_tracer else _CONSTANTS


def drawn_input(error: Exception, module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the one of ``names``, inputs of ``module`` that were not given, which the line of ``error`` draws."""
    if DRAWN not in str(error):
        return None
    forward = inspect.unwrap(type(module).forward)
    for place in traceback.walk_tb(error.__traceback__):
        if runs(place[0], forward):
            text = linecache.getline(file_of(place[0]), place[1])
            return next((name for name in names if re.search(rf"\b{name}\s*=[^=]", text)), None)
    return None


def _is_of_the_model(error: Exception, last: Frame, at: int) -> bool:
    if _PROXY.search(str(error)):
        return False
    if isinstance(error, KeyError) or (isinstance(error, TypeError) and _BAD_CALL.search(str(error))):
        return True
    file = file_of(last)
    return frames.raises_now(last, at) and "/torch/" not in file and TRACING not in file


def _remedy_for_line(own: list[Frame], any_tracer: bool) -> str:
    if any_tracer and any(module_of(frame).startswith("transformers.") for frame in own):
        return _OF_TRANSFORMERS
    modules = [i for i, frame in enumerate(own) if isinstance(variable(frame, "self"), nn.Module)]
    if not modules:
        return _OF_ITS_OWN
    innermost = own[modules[-1]]
    called = own[modules[-1] + 1] if modules[-1] + 1 < len(own) else None
    if called is not None and (function := _function_of(called)) is not None:
        if any(value is function for value in frames.globals_of(innermost)):
            return f"Make {function.__qualname__} a single node: autowrap_functions=[{function.__qualname__}]."
        return (
            f"Make its functions single nodes: import {function.__module__}; autowrap_modules=[{function.__module__}]."
        )
    owner = variable(innermost, "self")
    if any_tracer:
        name = type(owner).__name__
        return (
            f"Leave tracer_cls out, which traces through the modules above transformer layers alone; or, if {name} "
            f"holds no layer, make it a leaf: leaf_module_cls=[{name}]. {_OF_ITS_OWN}"
        )
    return _OF_ITS_OWN


def _function_of(frame: Frame) -> FunctionType | None:
    """Return the function of a Python module that ``frame`` runs; ``None`` for a method and a nested function."""
    module = sys.modules.get(module_of(frame))
    for value in vars(module).values() if module is not None else ():
        function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
        if function is not None and runs(frame, function):
            return value  # type: ignore[no-any-return]  # unwrapped from a function
    return None
