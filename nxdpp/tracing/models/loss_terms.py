"""Terms of a loss that divide by a number of labels, found in the graph.

::

    labels ── [..., 1:] ──┐
    logits ─────────── cross_entropy ── * 0.5 ── + ── loss          LossTerm(targets=getitem, ignore_index=-100)
                                  router loss ── * 0.1 ──┘

A mean over no label is not-a-number. The targets follow only from the inputs, so that every rank can count the labels
of each microbatch before it runs.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
import torch.nn.functional as F
from torch import fx, nn
from transformers.loss import loss_utils

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.checks import passes_on
from nxdpp.tracing.graph.search import ancestors, reached
from nxdpp.tracing.models.loss_function import LossCall
from nxdpp.tracing.values.in_place import IN_PLACE_OPERATORS

Loss = TypeVar("Loss", bound=Callable[..., Any])

NUM_ITEMS = "num_items_in_batch"
"""The input of transformers models that divides their summed loss."""

_IGNORED = -100
_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
# Losses of transformers: each is the mean over labels, or their sum divided by ``num_items_in_batch``.
_THEIRS = (loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification)
_in_place_of: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

# Operations whose result is not-a-number where one of their arguments is.
_KEEP_NAN = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.stack, torch.sum, torch.mean),
    *IN_PLACE_OPERATORS,
)
_METHODS_KEEP_NAN = {"add", "sub", "mul", "div", "sum", "mean", "to", "float", "double", "squeeze", "view", "reshape"}
_DIVISIONS = (operator.truediv, torch.div)

# Operations that are computed only from inputs to count labels.
_COUNTED = (
    *(operator.getitem, operator.ne, operator.eq, operator.ge, operator.gt, operator.lt, operator.le),
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.and_, operator.or_, operator.invert),
    *(torch.sum, torch.ne, torch.eq, torch.flatten, torch.clamp, torch.where, F.pad, getattr),
)
_METHODS_COUNTED = {
    *("view", "reshape", "flatten", "contiguous", "clone", "squeeze", "unsqueeze", "transpose", "permute", "t"),
    *("size", "numel", "dim", "long", "int", "float", "bool", "masked_fill", "ne", "eq", "ge", "gt", "lt", "le"),
    *("sum", "clamp", "clamp_min", "clip", "count_nonzero", "logical_and", "logical_not", "detach", "item"),
}
# A device or dtype, perhaps of a tensor of another stage, changes no label.
_CONVERSIONS = {"to", "type_as", "cuda", "cpu"}


class _UnknownError(Exception):
    """A value follows from more than the inputs."""


@dataclass(frozen=True)
class LossTerm:
    """A part of the loss that is divided by a number of labels; ``name`` of its function is for messages.

    ``targets`` is the node of the labels, or of their number. ``ignore_index`` is the label that does not count;
    ``None`` where ``targets`` is the number. ``shifted``: the first label of each row does not count. ``divisor`` is
    the argument ``num_items_in_batch``, a node or a number; ``None`` for a mean.
    """

    name: str
    targets: fx.Node
    ignore_index: int | None = _IGNORED
    shifted: bool = False
    divisor: Any = None

    @property
    def without_labels(self) -> str:
        """Text about a microbatch whose number of labels is 0."""
        if self.ignore_index is None:
            return f"{self.targets.name}, by which the model divides, is 0"
        place = " after the first of each row" if self.shifted else ""
        return f"all labels of {self.name}{place} are {self.ignore_index}"

    def count(self, inputs: Mapping[str, Any]) -> Any:
        """Return the number of labels among ``inputs``, a tensor or a number; ``None`` where they do not tell it."""
        try:
            targets = _value(self.targets, inputs)
        except _UnknownError:
            return None
        if self.ignore_index is None:
            is_one = isinstance(targets, torch.Tensor) and targets.numel() == 1 and not targets.is_meta
            return targets if is_one or isinstance(targets, int | float) else None
        # Targets of floating point are probabilities: all count.
        if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.is_meta:
            return None
        if type(targets) is torch.Tensor and targets.device.type == "cpu":
            # A third of the time of torch's operations.
            values = targets.numpy()
            return int(numpy.count_nonzero((values[..., 1:] if self.shifted else values) != self.ignore_index))
        counted = targets[..., 1:] if self.shifted else targets
        return (counted != self.ignore_index).sum()


def counts_of(term: LossTerm, microbatches: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return the number of labels of each microbatch whose inputs tell it. Waits for labels on a device, once."""
    found = zip(microbatches, map(term.count, microbatches.values()), strict=True)
    known = {number: items for number, items in found if items is not None}
    tensors = {number: items for number, items in known.items() if isinstance(items, torch.Tensor)}
    if tensors:
        values = torch.stack([items.reshape(()).double() for items in tensors.values()]).tolist()
        known |= zip(tensors, values, strict=True)
    return known


def in_place_of(theirs: Callable[..., Any]) -> Callable[[Loss], Loss]:
    """Declare a function to be a loss of transformers computed otherwise: same arguments, labels and divisor.

    Raises ``ValueError`` for a loss of transformers that this module does not know.
    """
    if not _is_one_of(theirs, _THEIRS):
        raise ValueError(f"{theirs.__name__} is not one of {', '.join(each.__name__ for each in _THEIRS)}")

    def declared(function: Loss) -> Loss:
        _in_place_of.append((function, theirs))
        return function

    return declared


def means(loss: fx.Node, module: nn.Module) -> list[LossTerm]:
    """Return the means over labels that ``loss`` is a sum or a product of: without labels it is not-a-number."""

    def keeps_nan(node: fx.Node) -> bool:
        is_method = node.op == "call_method" and node.target in _METHODS_KEEP_NAN
        return is_method or _is_one_of(node.target, _KEEP_NAN) or passes_on(node)

    nodes = reached([loss], lambda node: node.all_input_nodes if keeps_nan(node) else ())
    return [term for node in nodes for term in _terms(node, module) if term.divisor is None]


def labels_of_modules(loss: fx.Node, module: nn.Module) -> list[LossTerm]:
    """Return the inputs that a module, or a ``loss_fn``, takes to make ``loss``: it may be a mean over labels in them.

    It is one node, so its operations are not known.
    """
    nodes = reached([loss], lambda node: node.all_input_nodes if _is_known(node, module) else ())
    found = {
        argument: LossTerm(getattr(node.target, "__name__", str(node.target)), argument)
        for node in nodes
        if not _is_known(node, module)
        for argument in node.all_input_nodes
        if not any(each.op == "call_module" for each in ancestors(argument))
    }
    return list(found.values())


def _is_known(node: fx.Node, module: nn.Module) -> bool:
    if isinstance(node.target, LossCall):
        function = node.target.function
        return type(function) in _MODULES or _is_one_of(function, _FUNCTIONS)
    return node.op != "call_module" or type(module.get_submodule(str(node.target))) in _MODULES


def all_terms(loss: fx.Node, module: nn.Module) -> list[LossTerm]:
    """Return all means and sums over labels on which ``loss`` depends."""
    return [term for node in ancestors(loss) for term in _terms(node, module)]


def takes_number_of_items(loss: fx.Node, layers: tuple[str, ...]) -> bool:
    """Return whether ``loss`` depends on ``num_items_in_batch`` other than through ``layers``, which may ignore it."""
    inside = tuple(f"{layer}." for layer in layers)
    for node in ancestors(loss):
        is_layer = node.op == "call_module" and (str(node.target) in layers or str(node.target).startswith(inside))
        if not is_layer and any(arg.op == "placeholder" and arg.target == NUM_ITEMS for arg in node.all_input_nodes):
            return True
    return False


def _terms(node: fx.Node, module: nn.Module) -> Iterator[LossTerm]:
    call: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    args, kwargs = node.args, node.kwargs
    if isinstance(call, OpaqueCall):
        args, kwargs = call.arguments(node.args)
        call = call.function
    if _is_one_of(call, _DIVISIONS) and len(args) == 2 and isinstance(args[1], fx.Node):
        yield LossTerm("the division by a number", args[1], ignore_index=None)
        return
    name, targets, ignored, shifted, divisor = "", None, None, False, None
    # A subclass may treat a mean over nothing in its own way.
    if type(call) in _MODULES and call.reduction == "mean":
        name, ignored = type(call).__name__, call.ignore_index
        targets = _bound(call.forward, args, kwargs).get("target")
    elif _is_one_of(call, _FUNCTIONS):
        found = _bound(call, args, kwargs)
        is_mean = found.get("reduction", "mean") == "mean"
        if is_mean and found.get("size_average") is None and found.get("reduce") is None:
            name, targets, ignored = call.__name__, found.get("target"), found.get("ignore_index", _IGNORED)
    elif (theirs := _loss_of_transformers(call)) is not None:
        found = _bound(theirs, args, kwargs)
        name, ignored, divisor = call.__name__, found.get("ignore_index", _IGNORED), found.get(NUM_ITEMS)
        given = found.get("shift_labels")
        targets = found.get("labels") if given is None else given
        shifted = theirs is loss_utils.ForCausalLMLoss and given is None
    # A label to ignore may itself be traced: the length of a sequence.
    if isinstance(targets, fx.Node) and isinstance(ignored, int):
        yield LossTerm(name, targets, ignored, shifted, divisor)


def _loss_of_transformers(call: Any) -> Callable[..., Any] | None:
    known = (*((each, each) for each in _THEIRS), *_in_place_of)
    return next((theirs for function, theirs in known if call is function), None)


def _is_one_of(call: Any, functions: Iterable[Any]) -> bool:
    # A callable object of the user may be equal to others, and have no hash.
    return any(call is function for function in functions)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    return {**bound, **bound.pop("kwargs", {})}


def _value(node: fx.Node, inputs: Mapping[str, Any]) -> Any:
    """The value of ``node`` for ``inputs``. Raises ``_UnknownError`` where it needs more than these."""
    if node.op == "placeholder":
        if node.target not in inputs:
            raise _UnknownError
        return inputs[str(node.target)]
    if passes_on(node) or (node.op == "call_method" and node.target in _CONVERSIONS):
        return _value(node.args[0], inputs)  # type: ignore[arg-type]  # such a node has a node as first argument
    is_method = node.op == "call_method" and node.target in _METHODS_COUNTED
    if not is_method and not _is_one_of(node.target, _COUNTED):
        raise _UnknownError
    args: Any = fx.node.map_arg(node.args, lambda each: _value(each, inputs))
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda each: _value(each, inputs))
    function: Any = node.target
    return getattr(args[0], function)(*args[1:], **kwargs) if is_method else function(*args, **kwargs)
