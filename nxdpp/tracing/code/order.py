"""Order in which the code of a module above layers uses its parts, for parts that no graph holds."""

import ast
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn
from transformers import PreTrainedModel

from nxdpp.ground.torch_names import MODULES, PARAMETERS
from nxdpp.tracing.code.source import first_argument, tree_of


def parts_in_order(module: nn.Module) -> list[str]:
    """Return the names of the children and parameters of ``module`` that the code of its ``forward`` uses.

    They are in the order of their first use, also in the methods of ``module`` that ``forward`` calls. A read of an
    attribute of a child (``self.model.embed_tokens``) is no use of the child.
    """
    parts = {*MODULES.of(module), *PARAMETERS.of(module)}
    return list(dict.fromkeys(_used(type(module), type(module).forward, parts, frozenset())))


def _used(cls: type[nn.Module], function: object, parts: set[str], seen: frozenset[str]) -> Iterator[str]:
    function = inspect.unwrap(function) if callable(function) else None
    tree = tree_of(function.__code__) if isinstance(function, FunctionType) else None
    own = None if tree is None else first_argument(tree)
    for name in () if tree is None or own is None else _reads(tree, own):
        if name in parts:
            yield name
        elif name not in seen and _is_own(cls, name):
            yield from _used(cls, getattr(cls, name), parts, seen | {name})


def _reads(node: ast.AST, own: str) -> Iterator[str]:
    """Yield the attributes of ``own`` that code reads, in order: an argument comes before the call."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        children = [*node.args, *node.keywords, node.func]
    for child in children:
        if not (isinstance(node, ast.Attribute) and _is_part(child, own)):
            yield from _reads(child, own)
    if isinstance(node, ast.Attribute) and _is_part(node, own):
        yield node.attr


def _is_part(node: ast.AST, own: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own


def _is_own(cls: type[nn.Module], name: str) -> bool:
    """Return whether ``name`` is a method of a model's code. The common ones of its bases use no part in order."""
    method = getattr(cls, name, None)
    return isinstance(method, FunctionType) and getattr(PreTrainedModel, name, None) is not method
