"""Sizes that the spine asks for while it is traced: ``range(seq_len)``, ``if seq_len > window``, ``len(x)``.

A graph is for inputs of any size until the code asks for one. ``Sizes`` then runs the nodes that the answer depends
on with fake tensors. The answer becomes a fact: inputs for which a fact does not hold need another graph.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from nxdpp.tracing import listings
from nxdpp.tracing.devices import ElsewhereError, answer_for, asks_for_device, device_of_model
from nxdpp.tracing.function_caches import Uncached, uncached_functions, without_caches
from nxdpp.tracing.generators import unchanged_generators
from nxdpp.tracing.input_specs import COMPARISONS
from nxdpp.tracing.modes import Modes, applied, applied_to_fakes, current_modes, modes_of
from nxdpp.tracing.swap import swapped

# Fake tensors log the errors that end here as UnknownSizeError.
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
# Guesses in one run of the nodes that lead to an answer.
_MOST_GUESSES = 100
_OF_FAKES = frozenset({"autocast cpu", "autocast cache"})
# Names of inputs with their shapes and dtypes.
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Fact:
    """``read`` of the value of ``node`` was ``answer`` when the graph was made."""

    node: fx.Node
    read: Callable[[Any], Any]
    answer: Any


class UnknownSizeError(Exception):
    """The answer depends on data, or on inputs of unknown shape."""


class UnknownInputError(UnknownSizeError):
    """The answer depends on an input of unknown shape."""


class FakeCopies:
    """Fake copies of modules and tensors, with shapes and dtypes and without memory; needs a ``FakeTensorMode``.

    Each tensor has one copy. All copies are on the CPU, also of tensors on the meta device.
    """

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._originals: list[torch.Tensor] = []

    def module(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` with fake parameters, buffers and tensor attributes."""
        if module not in self._modules:
            for part in listings.modules(module):
                for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                    # Containers may hold results of the last run, which have a graph and cannot be copied.
                    for tensor in pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            self.tensor(tensor)
            self._modules[module] = copy.deepcopy(module, dict(self._memo))
        return self._modules[module]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like ``tensor``; the same one at each call."""
        if id(tensor) not in self._memo:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._memo[id(tensor)] = fake
            # No other tensor gets its id while it is kept.
            self._originals.append(tensor)
        copied: torch.Tensor = self._memo[id(tensor)]
        return copied


class _Guessing(FakeTensorMode):
    """Fake tensors whose every element is ``guess``."""

    def __init__(self, guess: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._guess = guess
        self._guesses = 0

    def __enter__(self) -> Self:
        self._guesses = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        # A loop that data end would not end with a guess.
        self._guesses += 1
        if self._guesses > _MOST_GUESSES:
            raise UnknownSizeError(f"more than {_MOST_GUESSES} answers depend on data")
        return self._guess


class Sizes:
    """Answers for inputs of one signature.

    Args:
        root: the module that the nodes' targets are names in; its parameters may be on the meta device.
        shapes: shapes and dtypes of the graph's inputs; other inputs have unknown shapes.
        guess: the elements of tensors, where an answer depends on them. By default such an answer is unknown.
        modes: the modes of torch around the model. By default those of this thread.
    """

    def __init__(self, root: nn.Module, shapes: Shapes, guess: bool | None = None, modes: Modes | None = None) -> None:
        self._root = root
        self._shapes = shapes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True) if guess is None else _Guessing(guess)
        self._copies = FakeCopies()
        self._values: dict[fx.Node, Any] = {}
        self._modes = modes or current_modes()

    @cached_property
    def _device(self) -> torch.device:
        return device_of_model(self._root)

    def read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value of node)``. Raises ``UnknownSizeError`` if that depends on more than sizes."""
        # The tracer does not record in another thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._read, node, read).result()

    def hold(self, facts: tuple[Fact, ...]) -> bool:
        """Return whether ``facts`` are true for these shapes."""
        try:
            return all(self.read(fact.node, fact.read) == fact.answer for fact in facts)
        except UnknownSizeError:
            return False

    def _read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        try:
            quiet = swapped(vars(_LOG), {"disabled": True})
            unchanged = unchanged_generators()
            with quiet, unchanged, without_caches(self._uncached), self._mode, applied_to_fakes(self._modes):
                for needed in _in_order(node):
                    if needed not in self._values:
                        with applied(modes_of(needed)):
                            self._values[needed] = self._value(needed)
                if asks_for_device(node) and self._device.type != "cpu":
                    return read(answer_for(node, self._device, self._values.__getitem__))
                return read(self._values[node])
        except UnknownInputError:
            raise
        except Exception as error:
            told = (
                str(error)
                if isinstance(error, UnknownSizeError | ElsewhereError)
                else f"{type(error).__name__}: {error}"
            )
            raise UnknownSizeError(told) from error

    @cached_property
    def _uncached(self) -> Uncached:
        return uncached_functions(self._root)

    def _value(self, node: fx.Node) -> Any:
        if _is_device(node):
            return torch.device("cpu")
        if node.op == "placeholder":
            if str(node.target) not in self._shapes:
                raise UnknownInputError(f"the shape of {node.target} is not known here; partition_batch may tell it")
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
            self._refuse_other_autocast(node)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _refuse_other_autocast(self, node: fx.Node) -> None:
        # The fake tensors are on the CPU.
        for modes in (self._modes, *(modes_of(needed) for needed in _in_order(node))):
            if any(
                name.startswith("autocast ") and name not in _OF_FAKES and value[0] for name, value in modes.changes
            ):
                raise UnknownSizeError(f"{node.args[0]} is compared, which is another dtype under autocast")

    def _attribute(self, target: str) -> Any:
        owner, _, name = target.rpartition(".")
        module = self._root.get_submodule(owner)
        if name in module._modules:
            return self._copies.module(self._root.get_submodule(target))
        value = module._parameters.get(name, module._buffers.get(name, vars(module).get(name)))
        return self._copies.tensor(value) if isinstance(value, torch.Tensor) else value


def _is_device(node: fx.Node) -> bool:
    """Return whether the node reads a device. All fakes are on the CPU, also one whose size data decide."""
    return node.op == "call_function" and node.target is getattr and node.args[1] == "device"


def _in_order(node: fx.Node) -> list[fx.Node]:
    """``node`` and all nodes that its size depends on, in the order of the graph."""
    needed = {node}
    pending = [node]
    while pending:
        last = pending.pop()
        new = [] if _is_device(last) else [argument for argument in last.all_input_nodes if argument not in needed]
        needed.update(new)
        pending += new
    return sorted(needed)


def shapes_of(inputs: Mapping[str, Any]) -> Shapes:
    """The shapes and dtypes of the tensors among ``inputs``."""
    return {name: (value.shape, value.dtype) for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def whole_number(value: Any) -> int:
    """A size for ``range()`` and indexing."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnknownSizeError(f"a {type(value).__name__} is not a size")
    return value


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def is_none(value: Any) -> bool:
    """Return whether ``value`` is ``None``."""
    return value is None


def number_of_items(value: Any) -> int:
    """The number of items that a loop over ``value`` reads; item ``i`` is ``value[i]``."""
    if not isinstance(value, tuple | list | torch.Tensor):
        raise UnknownSizeError(f"a {type(value).__name__} is not read by positions")
    return len(value)
