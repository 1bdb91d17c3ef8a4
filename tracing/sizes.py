"""Sizes that the spine asks for while it is traced: ``range(seq_len)``, ``if seq_len > window``, ``len(x)``.

A graph holds for inputs of any size as long as nobody asks. Where the code does, the answer for the inputs at hand
is found by running what led to the question on fake tensors, and kept as a fact: the graph belongs to inputs for
which all its facts hold, and others need a graph of their own.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nxdpp.tracing.fake_copies import FakeCopies
from nxdpp.tracing.input_specs import COMPARISONS

# Names of inputs with their shapes and dtypes.
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Fact:
    """``read`` of the value of ``node`` was ``answer`` when the graph was made."""

    node: fx.Node
    read: Callable[[Any], Any]
    answer: Any


class UnknownSizeError(Exception):
    """What a fake tensor cannot tell: it depends on data, or on inputs whose shapes are not known."""


class Sizes:
    """Answers for inputs of one set of shapes.

    Args:
        root: the module that the nodes' targets are names in; its parameters may be on the meta device.
        shapes: of the graph's inputs; those that are missing are unknown.
    """

    def __init__(self, root: nn.Module, shapes: Shapes) -> None:
        self._root = root
        self._shapes = shapes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._copies = FakeCopies()
        self._values: dict[fx.Node, Any] = {}

    def read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value of node)``. Raises ``UnknownSizeError`` where that depends on more than sizes."""
        # In a thread of its own, where nothing is recorded and no mode of the caller's holds.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._read, node, read).result()

    def hold(self, facts: tuple[Fact, ...]) -> bool:
        """Whether ``facts`` are true for these shapes."""
        try:
            return all(self.read(fact.node, fact.read) == fact.answer for fact in facts)
        except UnknownSizeError:
            return False

    def _read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        try:
            with self._mode, torch.no_grad():
                for needed in _in_order(node):
                    if needed not in self._values:
                        self._values[needed] = self._value(needed)
                return read(self._values[node])
        except Exception as error:
            told = str(error) if isinstance(error, UnknownSizeError) else f"{type(error).__name__}: {error}"
            raise UnknownSizeError(told) from error

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            if str(node.target) not in self._shapes:
                raise UnknownSizeError(f"the shape of {node.target} is not known here; partition_batch may tell it")
            shape, dtype = self._shapes[str(node.target)]
            return torch.empty(shape, dtype=dtype)
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: self._values[argument])
        if node.op == "call_module":
            return self._copies.module(self._root.get_submodule(str(node.target)))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if any(isinstance(argument, torch.dtype) for argument in args) and node.target in COMPARISONS:
            raise UnknownSizeError(f"{node.args[0]} is compared, which is another dtype under autocast")
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _attribute(self, target: str) -> Any:
        owner, _, name = target.rpartition(".")
        module = self._root.get_submodule(owner)
        value = module._parameters.get(name, module._buffers.get(name, vars(module).get(name)))
        return self._copies.tensor(value) if isinstance(value, torch.Tensor) else value


def _in_order(node: fx.Node) -> list[fx.Node]:
    """``node`` and all that it depends on, in the order of the graph."""
    needed = {node}
    pending = [node]
    while pending:
        new = [argument for argument in pending.pop().all_input_nodes if argument not in needed]
        needed.update(new)
        pending += new
    return sorted(needed)


def shapes_of(inputs: Mapping[str, Any]) -> Shapes:
    """The shapes and dtypes of the tensors among ``inputs``."""
    return {name: (value.shape, value.dtype) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def whole_number(value: Any) -> int:
    """A size as it is read by ``int()``, ``range()`` and indexing."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnknownSizeError(f"a {type(value).__name__} is no size")
    return value


def number_of_items(value: Any) -> int:
    """How many items a loop over ``value`` takes, each of which ``value[i]`` gives too."""
    if not isinstance(value, tuple | list | torch.Tensor):
        raise UnknownSizeError(f"a {type(value).__name__} is not read by positions")
    return len(value)
