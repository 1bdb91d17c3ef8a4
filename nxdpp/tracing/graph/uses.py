"""Use that a node makes of its arguments (data or metadata), of random numbers and of buffers.

Functions that may draw from torch's random generators are found without a list of our own. torch tags each of its
operations that follows from a seed. A function written in Python may draw if its code names such an operation, or a
function of torch or transformers that does.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from nxdpp.ground.torch_names import BUFFERS, MODULES
from nxdpp.tracing.code.names import used_names
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.metadata import LIKE

_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda"})
# Methods that use only the metadata of their own tensor.
_OF_SELF = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "element_size", "get_device",
     "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
)  # fmt: skip
# Methods that use only the metadata of their arguments.
_OF_OTHERS = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
_KNOWN = re.compile(r"(torch|transformers|nxdpp)\b")
_MASK_MODULE = "transformers.masking_utils"
_MASK_REFERENCES = frozenset({"inputs_embeds", "input_embeds", "encoder_hidden_states", 1})
# The buffers of losses are weights of classes.
_CONSTANT_BUFFERS = frozenset({"torch.nn.modules.loss"})


def metadata_arguments(node: fx.Node, root: nn.Module) -> set[fx.Node]:
    """Arguments of which ``node`` uses only shape, dtype and device.

    A metadata placeholder can replace them. A wrong entry ends in an error, not in a wrong number: a placeholder
    raises when its data is read.
    """
    references = set(_references(node, root))
    others = [argument for argument in node.all_input_nodes if argument not in references]
    return references - set(others)


def draws_random_numbers(node: fx.Node, root: nn.Module) -> bool:
    """Return whether two runs of ``node`` may give two results, or change a buffer twice.

    Modules and functions of neither torch nor transformers may.
    """
    if any(_module_may_draw(child) for module in modules_of(node, root).values() for child in listings.modules(module)):
        return True
    if node.op == "call_method":
        return is_seeded(str(node.target))
    if node.op != "call_function":
        return False
    function: Any = node.target.function if isinstance(node.target, OpaqueCall) else node.target
    if isinstance(function, nn.Module):
        # A module that forward makes.
        return any(_module_may_draw(child) for child in listings.modules(function))
    if isinstance(node.target, OpaqueCall) and not _KNOWN.match(getattr(function, "__module__", None) or ""):
        return True
    return may_draw(function)


def modules_of(node: fx.Node, root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ``node`` runs, by name: its own, and the ones among its arguments."""
    names = [str(node.target)] if node.op == "call_module" else []
    names += [str(argument.target) for argument in node.all_input_nodes if is_module(argument, root)]
    return {name: listings.submodule(root, name) for name in names}


def is_module(node: fx.Node, root: nn.Module) -> bool:
    """Return whether ``node`` reads a module of ``root``, for a function that runs it."""
    if node.op != "get_attr":
        return False
    owner, _, name = str(node.target).rpartition(".")
    return name in MODULES.of(listings.submodule(root, owner))


def _module_may_draw(module: nn.Module) -> bool:
    known = _KNOWN.match(type(module).__module__)
    return not known or may_draw(type(module).forward) or may_change_buffers(module)


def is_from_torch(module: nn.Module) -> bool:
    """Return whether torch defines the class of ``module``, or of the module that it wraps."""
    return type(listings.unwrapped(module)).__module__.partition(".")[0] == "torch"


def makes_mask(node: fx.Node) -> bool:
    """Return whether ``node`` calls a mask function of transformers, whose result may be ``None``."""
    target = node.target
    return isinstance(target, OpaqueCall) and getattr(target.function, "__module__", "") == _MASK_MODULE


def may_change_buffers(module: nn.Module) -> bool:
    """Return whether a forward of ``module``, without its children, may change its own buffers.

    Modules of torch with running statistics, spectral norms and observers do. Modules of transformers change only
    buffers that no other module reads (a rotary table). Modules of other packages may.
    """
    if not any(buffer is not None for buffer in BUFFERS.of(module).values()):
        return False
    return type(module).__module__ not in _CONSTANT_BUFFERS and not type(module).__module__.startswith("transformers.")


def changed_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers of ``module`` and its descendants that its forward may change."""
    return [
        f"{path}.{name}" if path else name
        for path, child in listings.named_modules(module, remove_duplicate=False)
        if may_change_buffers(child)
        for name, buffer in BUFFERS.of(child).items()
        if buffer is not None
    ]


def _references(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    nodes = [argument for argument in node.args if isinstance(argument, fx.Node)]
    target: Any = node.target
    if target is getattr:
        return nodes[:1] if node.args[1] in _ATTRIBUTES else []
    if target in LIKE:
        return nodes[:1]
    if makes_mask(node):
        return [n for i, n in enumerate(nodes) if target.parameter_of(i) in _MASK_REFERENCES]
    if node.op == "call_method":
        if node.target in _OF_SELF:
            return nodes[:1]
        return nodes[1:] if node.target in _OF_OTHERS else []
    if node.op == "call_module" and "RotaryEmbedding" in type(root.get_submodule(str(node.target))).__name__:
        # The hidden states give only dtype and device of cos and sin.
        first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
        return [first] if isinstance(first, fx.Node) else []
    return []


_LIBRARIES = ("torch.", "transformers.")


@cache
def is_seeded(operation: str) -> bool:
    """Return whether torch has an operation of this name that draws random numbers."""
    packet = getattr(torch.ops.aten, operation, None)
    if not isinstance(packet, type(torch.ops.aten.add)):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in packet.overloads())


def may_draw(function: Callable[..., Any]) -> bool:
    """Return whether a function of torch may draw random numbers, with any arguments."""
    try:
        return _may_draw(function)
    except TypeError:  # not hashable
        return False


@cache
def _may_draw(function: Callable[..., Any]) -> bool:
    return any(is_seeded(name) for name in _names(function, set()))


def _names(function: Any, seen: set[Any]) -> Iterator[str]:
    """The names in the code of ``function`` and of the library functions that it names; its own without a code."""
    if not isinstance(function, FunctionType):
        yield getattr(function, "__name__", "")
        return
    if function in seen:
        return
    seen.add(function)
    for name in used_names(function):
        yield name
        used = function.__globals__.get(name) or getattr(functional, name, None)
        if isinstance(used, FunctionType) and (used.__module__ or "").startswith(_LIBRARIES):
            yield from _names(used, seen)
    # boolean_dispatch of torch chooses between two functions.
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, FunctionType):
                yield from _names(cell.cell_contents, seen)
