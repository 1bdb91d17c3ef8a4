"""Changes in place by the user's modules and functions that are one node, of values that are read afterwards.

::

    def bump(x):                   a graph would leave out          x[:, :4] += 1
        x[:, :4] += 1              the unused node                  return x
    bump(x)                  ──▶   of bump, and read        ──▶     x = bump(x)
    x = self.layer(x)              x as it was before

A trace does not enter such code. Runs on fake tensors of the inputs' sizes tell what it changes.
"""

from collections.abc import Callable, Collection

from torch import fx, nn

from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.errors import TracingError, model_line
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.lost_changes import ROOT, changes_in_place
from nxdpp.tracing.values.metadata import is_metadata


def refuse_hidden_changes(
    graph: fx.Graph, module: nn.Module, layers: Collection[str], changed_by: Callable[[fx.Node], set[fx.Node]]
) -> None:
    """Raise ``TracingError`` for code of one node that changes an argument which a later node reads.

    ``changed_by`` has the arguments that a node changes in place, for the sizes at hand. Other code of torch and
    transformers is not asked, and of ``layers`` each stage finds it when they run first.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _is_asked(node, module, layers):
            continue
        read_later = {
            argument
            for argument in node.all_input_nodes
            if any(position[user] > position[node] and not is_metadata(user) for user in argument.users)
        }
        if read_later and read_later & changed_by(node):
            name = _name_of(node)
            raise TracingError(
                f"{name} changes a value in place outside the transformer layers, and forward reads it afterwards; a "
                f"graph would lose the change\n  at {model_line(node.stack_trace)}\n"
                f"Let {name} return the value, and use that from here on: x = {name}(x)."
            )


def _is_asked(node: fx.Node, module: nn.Module, layers: Collection[str]) -> bool:
    if changes_in_place(node):
        return False
    if node.op == "call_module":
        name = str(node.target).removeprefix(f"{ROOT}.")
        return name not in layers and _may_change(module.get_submodule(name))
    if node.op != "call_function":
        return False
    function = node.target.function if isinstance(node.target, OpaqueCall) else node.target
    if isinstance(function, nn.Module):
        return _may_change(function)
    return not is_framework(getattr(function, "__module__", None) or "builtins")


def _may_change(module: nn.Module) -> bool:
    """Return whether ``module`` has a user's code, or a module of torch that changes values in place."""
    return any(
        getattr(each, "inplace", False) is True or not is_framework(type(each).__module__)
        for each in listings.modules(module)
    )


def _name_of(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"self.{str(node.target).removeprefix(f'{ROOT}.')}"
    function = node.target.function if isinstance(node.target, OpaqueCall) else node.target
    return str(getattr(function, "__name__", type(function).__name__))
