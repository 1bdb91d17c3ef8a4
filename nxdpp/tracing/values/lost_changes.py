"""Changes that tracing would lose: in-place changes of a value with several names, and changes of module attributes.

A traced value that is changed in place is the changed value from then on. Another name of the same memory, a view or
its base, is not. The graph may read that name before the change runs, or on another stage.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.nn import functional

from nxdpp.ground.torch_names import BUFFERS, PARAMETERS, VERSION
from nxdpp.tracing.graph.errors import TracingError, model_line
from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.values.in_place import ASSIGNMENTS, IN_PLACE_OPERATORS, changes_argument, effect_by_module
from nxdpp.tracing.values.metadata import is_metadata, reads

_VIEWS = frozenset(
    {"H", "T", "adjoint", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "broadcast_to", "chunk",
     "contiguous", "cpu", "cuda", "data", "detach", "diagonal", "double", "dsplit", "expand", "expand_as",
     "expect_type", "expect_value", "flatten", "float", "getitem", "half", "hsplit", "imag", "int", "long", "mH", "mT",
     "moveaxis", "movedim", "narrow", "permute", "positive", "ravel", "real", "rearrange", "reshape", "reshape_as",
     "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose",
     "type", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex",
     "view_as_real", "vsplit"}
)  # fmt: skip
_METADATA = frozenset({"device", "dtype"})
# It changes no data.
_FOR_GRADIENTS = "requires_grad_"
# Attributes that transformers' models set for a later step of generation, and training never reads.
_FOR_GENERATION = frozenset({"rope_deltas"})
# The name under which a traced module is called. The finished graph has names without this prefix.
ROOT = "model"


# Methods of lists, dicts and sets that a statement of its own calls for their effect; no methods of tensors.
_OF_CONTAINERS = frozenset(
    {"append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
     "remove", "reverse", "setdefault", "update"}
)  # fmt: skip


def refuse_lost_changes(graph: fx.Graph) -> None:
    """Raise ``TracingError`` for a change that a graph would lose.

    It is one in place of memory that is read later under another name, or is kept; or one of a list or dict that a
    module returned.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _OF_CONTAINERS and not node.users:
            raise TracingError(
                f"forward changes a list or dict that a module returned ({node.target}), outside the transformer "
                f"layers; a graph would lose the change\n  at {model_line(node.stack_trace)}\n"
                f"Make a new one, such as [*values, new] or {{**values, name: new}}, or change it in the module."
            )
        changed = _changed(node) if changes_in_place(node) else None
        if changed is None:
            continue
        _refuse_lasting_change(node, changed)
        for alias in _aliases(changed):
            late = [user for user in _sharing(alias, changed) if position[user] > position[node] and _reads(user, node)]
            if late:
                raise TracingError(
                    f"{node.name} changes a value in place, and {late[0].name} reads the same memory afterwards under "
                    f"another name\n  at {model_line(node.stack_trace)}\n"
                    f"Change the value itself (x[i] = y, x.method_()) or make a new one; or let a function that is "
                    f"a single node (autowrap_functions), or a leaf module (leaf_module_cls), change and return it."
                )


def changes_in_place(node: fx.Node) -> bool:
    """Return whether ``node`` changes its first argument in place."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and name != _FOR_GRADIENTS
    if node.op != "call_function":
        return effect_by_module(node) == "in place"
    target: Any = node.target
    return target in ASSIGNMENTS or target in IN_PLACE_OPERATORS or changes_argument(target, node.kwargs)


def _aliases(node: fx.Node) -> Iterable[fx.Node]:
    """The base of which ``node`` is a view, and all views of the base."""
    return reached(
        [_viewed(node)],
        lambda alias: [user for user in _sharing(alias, node) if _is_view(user) and user.args[0] is alias],
    )


def _changed(node: fx.Node) -> fx.Node | None:
    """The value that ``node`` changes in place."""
    value = next(iter((*node.args, *node.kwargs.values())), None)
    return value if isinstance(value, fx.Node) else None


def _reads(user: fx.Node, node: fx.Node) -> bool:
    """Return whether ``user`` reads memory that ``node`` changes. ``x[i] += y`` assigns the changed item."""
    return not is_metadata(user) and not (user.target in ASSIGNMENTS and user.args[2] is node)


def _sharing(alias: fx.Node, changed: fx.Node) -> list[fx.Node]:
    """The users of ``alias`` without items that share nothing with ``changed``: ``x[0]`` and ``x[1]``, ``x["a"]``."""
    taken = _item_number(next((node for node in _path(changed) if node.args and node.args[0] is alias), alias))
    numbers = {user: _item_number(user) for user in alias.users}
    return [user for user, number in numbers.items() if None in (taken, number) or number == taken]


def _item_number(node: fx.Node) -> int | str | None:
    item = node.args[1] if node.target is operator.getitem else None
    return item if isinstance(item, int | str) else None


def _path(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and the values that it is a view of, up to the base."""
    yield node
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def _viewed(node: fx.Node) -> fx.Node:
    return list(_path(node))[-1]


def _refuse_lasting_change(node: fx.Node, changed: fx.Node) -> None:
    changed = _viewed(changed)
    if changed.op == "get_attr":
        name = str(changed.target).removeprefix(f"{ROOT}.")
        raise TracingError(
            f"forward changes {name}, a parameter or buffer, in place outside the transformer layers, and "
            f"several ranks have a copy of it\n  at {model_line(node.stack_trace)}\n"
            f"Make the buffer and the code that changes it a module of its own, which then runs as one node on one "
            f"stage."
        )


def _is_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWS
    if node.op != "call_function":
        return effect_by_module(node) == "view"
    if node.target is getattr:
        return node.args[1] in _VIEWS
    if node.target is functional.dropout:
        return node.kwargs.get("training") is False
    return node.target is operator.getitem or getattr(node.target, "__name__", "") in _VIEWS


@contextmanager
def unchanged_modules(modules: list[nn.Module], helpers: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Refuse changes of attributes of ``modules`` inside, and restore all attributes and buffers afterwards.

    Moving an attribute is allowed (``self.table = self.table.to(x.device)``): only the move itself is repeated in
    each step. ``helpers`` may keep what they compute; they are restored too. An error restores every attribute.

    Raises ``RuntimeError`` with the module's class and the attribute, at the line that sets it.
    """
    changed = (*modules, *helpers)
    stores = [store for module in changed for store in (vars(module), BUFFERS.of(module), PARAMETERS.of(module))]
    before = [dict(store) for store in stores]
    tensors = [(m, n, v, VERSION.of(v)) for m in modules for n, v in vars(m).items() if isinstance(v, torch.Tensor)]
    set_attribute = nn.Module.__setattr__

    def check(module: nn.Module, name: str, value: Any) -> None:
        if name in _FOR_GENERATION and type(module).__module__.startswith("transformers."):
            return set_attribute(module, name, value)
        if isinstance(value, fx.Proxy) and module in modules and not _is_moved(value.node, module, name, value):
            raise RuntimeError(
                f"forward sets {type(module).__name__}.{name} to a value that it computes; outside the transformer "
                f"layers that would be lost. Keep it in a variable of forward, or return it."
            )
        if module in modules and _is_number(value) and _is_number(old := vars(module).get(name)) and value != old:
            raise RuntimeError(
                f"forward changes {type(module).__name__}.{name} from {old} to {value}; that would happen at tracing "
                f"only, and every step would use one value. Make it a buffer of a module that changes it."
            )
        set_attribute(module, name, value)

    try:
        with patch.object(nn.Module, "__setattr__", check):
            yield
        for owner, name, tensor, version in tensors:
            if VERSION.of(tensor) != version:
                raise RuntimeError(
                    f"forward changes {type(owner).__name__}.{name}, a tensor that is neither buffer nor parameter, in "
                    f"place; that would happen at tracing only. Make it a buffer of a module that changes it."
                )
    except BaseException:
        for store, old in zip(stores, before, strict=True):
            store.clear()
            store.update(old)
        raise
    finally:
        for store, old in zip(stores, before, strict=True):
            for name in [name for name, value in store.items() if isinstance(value, fx.Proxy)]:
                if name in old:
                    store[name] = old[name]
                else:
                    del store[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_moved(node: Any, module: nn.Module, name: str, proxy: fx.Proxy) -> bool:
    """Return whether ``node`` is attribute ``name`` of ``module`` with another dtype or on another device."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        owner, _, attribute = str(node.target).rpartition(".")
        tracer: Any = proxy.tracer
        return attribute == name and tracer.root.get_submodule(owner) is module
    others = [argument for argument in node.all_input_nodes if argument is not node.args[0]]
    return (
        node.op == "call_method"
        and node.target == "to"
        and all(reads(argument, _METADATA) for argument in others)
        and _is_moved(node.args[0], module, name, proxy)
    )
