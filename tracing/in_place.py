"""Changes in place that a graph would lose.

A traced value that is changed in place stands for the changed value from then on. Another name of the same memory,
a view of it or what it is a view of, does not: a graph that reads such a name afterwards need not run the change
at all, or may run it on another stage.
"""

import operator
from collections.abc import Iterator

from torch import fx

from nxdpp.tracing.errors import TracingError, model_line
from nxdpp.tracing.proxy import assign_item
from nxdpp.tracing.spine import ROOT

_VIEWS = frozenset(
    {"T", "chunk", "contiguous", "data", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem", "mT",
     "movedim", "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "t",
     "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"}
)  # fmt: skip


def refuse_lost_changes(graph: fx.Graph) -> None:
    """Raise ``TracingError`` for a change in place that is read later under another name, or outlives the step."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _changes_in_place(node) or not isinstance(node.args[0], fx.Node):
            continue
        _refuse_lasting_change(node)
        for alias in _aliases(node.args[0]):
            late = [user for user in alias.users if user is not node and position[user] > position[node]]
            if late:
                raise TracingError(
                    f"{node.name} changes a value in place, and {late[0].name} reads the same memory afterwards under "
                    f"another name\n  at {model_line(node.stack_trace)}\n"
                    f"Change the value itself (x[i] = y, x.method_()) or make a new one; or make the function that "
                    f"does this a single node (autowrap_functions), or its module a leaf (leaf_module_cls)."
                )


def _changes_in_place(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and (node.target is assign_item or node.kwargs.get("inplace") is True)


def _aliases(node: fx.Node) -> Iterator[fx.Node]:
    """The value, what it is a view of, and all views of that."""
    pending = [_viewed(node)]
    while pending:
        alias = pending.pop()
        yield alias
        pending += [user for user in alias.users if _is_view(user) and user.args[0] is alias]


def _viewed(node: fx.Node) -> fx.Node:
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _refuse_lasting_change(node: fx.Node) -> None:
    changed = _viewed(node.args[0]) if isinstance(node.args[0], fx.Node) else node
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
        return False
    if node.target is getattr:
        return node.args[1] in _VIEWS
    return node.target is operator.getitem or getattr(node.target, "__name__", "") in _VIEWS
