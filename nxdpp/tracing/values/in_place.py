"""Changes in place outside the layers, as nodes of a graph: each gives the changed value.

================================  =======================================================================
code                              node
================================  =======================================================================
``x[i] = y``                      ``assign_item(x, i, y)``
``x[i] *= y``                     ``assign_item_in_copy(x, i, x[i] * y)``
``x += y``                        an operator that makes a new value in the dtype of ``x``
``x.masked_fill_(mask, y)``       the method; every name of ``x`` has its result
``torch.relu_(x)``                the function; every name of ``x`` has its result
``nn.ReLU(inplace=True)(x)``      the module; every name of ``x`` has its result
================================  =======================================================================
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from nxdpp.tracing.values.metadata import is_metadata

_MODULE = "module_of_torch"
_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Constructors of tensors that code fills with values.
_NEW = frozenset({torch.empty, torch.empty_like, torch.full, torch.ones, torch.zeros})


def assign_item(value: Any, index: Any, item: Any) -> Any:
    """``value[index] = item`` as an expression, so that later uses depend on it."""
    value[index] = item
    return value


def assign_item_in_copy(value: Any, index: Any, item: Any) -> Any:
    """``value[index] = item`` in a copy of a tensor: the tensor itself is needed once more."""
    return assign_item(value.clone() if isinstance(value, torch.Tensor) else value, index, item)


ASSIGNMENTS = frozenset({assign_item, assign_item_in_copy})


def assignment(value: fx.Node, item: Any) -> Callable[[Any, Any, Any], Any]:
    """Return the function that assigns an item of ``value``.

    It copies where the backward of the item needs the value (``x[i] *= y``), and for a tensor that ``forward`` has just
    made: other stages may have copies of that.
    """
    is_new = value.target in _NEW and all(is_metadata(user) for user in value.users)
    return assign_item_in_copy if is_new or _follows_from(value, item) else assign_item


def _follows_from(value: fx.Node, item: Any) -> bool:
    source: Any = item.node if isinstance(item, fx.Proxy) else None
    if source is None or source.target not in IN_PLACE_OPERATORS:
        return False
    while isinstance(source, fx.Node) and source is not value and source.args:
        source = source.args[0]
    return source is value


class InPlaceOperator:
    """``x += y``: every name of ``x`` has the new value, in the dtype of ``x``. A number stays as it is."""

    def __init__(self, name: str) -> None:
        self.__name__ = f"i{name}"
        self._operation = getattr(operator, name)

    def __call__(self, value: Any, other: Any) -> Any:
        """Return the new value."""
        # The value is not changed in its memory: autograd forbids that for a tensor that a stage has received.
        changed = self._operation(value, other)
        return changed.to(value.dtype) if isinstance(value, torch.Tensor) else changed


IN_PLACE_OPERATORS = tuple(
    InPlaceOperator(name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul")
)


def in_place(function: InPlaceOperator) -> Callable[[Any, Any], Any]:
    """The method of a traced value for ``function``."""

    def change(self: Any, other: Any) -> Any:
        if is_metadata(self.node):
            return NotImplemented
        self.node = self.tracer.create_proxy("call_function", function, (self, other), {}).node
        return self

    return change


def in_place_method(owner: fx.Proxy, name: str) -> Callable[..., fx.Proxy]:
    """A method of a traced value that changes it in place: a call rebinds the value, and returns it."""

    def change(*args: Any, **kwargs: Any) -> fx.Proxy:
        owner.node = owner.tracer.create_proxy("call_method", name, (owner, *args), kwargs).node
        return owner

    return change


def change_argument(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: fx.Proxy) -> None:
    """Rebind the argument of a function that changes it in place (``torch.relu_(x)``, ``F.relu(x, inplace=True)``).

    Raises ``RuntimeError`` for a function that changes several, or one that it returns nothing of.
    """
    name = getattr(function, "__name__", "")
    if kwargs.get("out") is not None or (name.startswith("_foreach_") and name.endswith("_")):
        tracer: Any = changed.tracer
        raise tracer.refused(
            f"{name} changes tensors that it is given, outside the transformer layers. Use its result "
            f"(y = torch.mul(x, 2), without out), or a method of the tensor (x.mul_(2))."
        )
    if changes_argument(function, kwargs):
        owner = next((value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)), None)
        if owner is not None:
            owner.node = changed.node


def note_module(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """Rebind the argument of a module of torch that changes it in place (``nn.ReLU(inplace=True)``).

    Note a ``result`` that has the memory of the argument, as in ``nn.Identity``.
    """
    owner = next((value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)), None)
    effect = _effect(module)
    if owner is None or effect is None or not isinstance(result, fx.Proxy):
        return
    result.node.meta[_MODULE] = effect
    if effect == "in place":
        owner.node = result.node


def _effect(module: nn.Module) -> str | None:
    """``"view"`` or ``"in place"`` for a module of torch whose result has the memory of its argument."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        effects = {_effect(each) for each in module}
        return None if None in effects else "in place" if "in place" in effects else "view"
    if not type(module).__module__.startswith("torch.nn."):
        return None
    if getattr(module, "inplace", False) is True:
        return "in place"
    is_view = isinstance(module, _VIEWS) or (isinstance(module, _DROPOUTS) and not module.training)
    return "view" if is_view else None


def effect_by_module(node: fx.Node) -> str | None:
    """``"view"`` or ``"in place"`` for a node of such a module of torch, ``None`` for any other one."""
    effect: str | None = node.meta.get(_MODULE)
    return effect


def changes_argument(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch changes its first argument in place, and returns it."""
    name = getattr(function, "__name__", "")
    is_named_so = name.endswith("_") and not name.endswith("__") and not isinstance(function, InPlaceOperator)
    is_torch = (getattr(function, "__module__", None) or "torch").startswith("torch")
    return (is_named_so and is_torch) or kwargs.get("inplace") is True
