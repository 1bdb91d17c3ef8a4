"""Sizes that the spine asks for while it is traced: ``range(seq_len)``, ``if seq_len > window``, ``len(x)``.

A graph is for inputs of any size until the code asks for one. ``Sizes`` then runs the nodes that the answer depends
on with fake tensors. The answer becomes a fact: inputs for which a fact does not hold need another graph.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import fx, nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, NO_DISPATCH_MODES, PARAMETERS, VERSION, pytree
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.modes import Modes, applied, applied_to_fakes, current_modes, modes_of
from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.graph.swap import all_swapped, swapped
from nxdpp.tracing.graph.uses import makes_mask, metadata_arguments
from nxdpp.tracing.sizes import fake_runs
from nxdpp.tracing.sizes.fake_runs import AskedDataError, TooManyGuessesError, takes_examples
from nxdpp.tracing.sizes.input_specs import COMPARISONS
from nxdpp.tracing.values import metadata
from nxdpp.tracing.values.metadata import reads

# All fakes are on the CPU, also one whose size data decide.
_DEVICE = ("device",)
_OF_FAKES = frozenset({"autocast cpu", "autocast cache"})
# Types of the errors that operations raise for shapes that they do not take. Fake tensors have subclasses for data.
_OF_SHAPES = (IndexError, RuntimeError, ValueError)
# Names of inputs with their shapes and dtypes.
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Fact:
    """``read`` of the value of ``node``, or ``read_for_any_data``, was ``answer`` when the graph was made."""

    node: fx.Node
    read: Callable[[Any], Any]
    answer: Any
    of_any_data: bool = False


class UnknownSizeError(Exception):
    """The answer depends on data, or on inputs of unknown shape."""


class UnknownInputError(UnknownSizeError):
    """The answer depends on an input of unknown shape."""


class WrongShapesError(UnknownSizeError):
    """An operation fails for inputs of these shapes, which may be others in a step."""


class DataInModuleError(UnknownSizeError):
    """The answer depends on data that the code of a module, or of a function that is one node, asks for."""


class Sizes:
    """Answers for inputs of one signature; inputs that are not in ``shapes`` have unknown shapes.

    ``guess`` stands for the elements of tensors, where an answer depends on them. By default such an answer is unknown.
    With ``in_modules`` it serves only the code of modules, not the code between them. ``modes`` are around the model,
    by default the modes of this thread.
    """

    def __init__(
        self,
        root: nn.Module,
        shapes: Shapes,
        guess: bool | None = None,
        modes: Modes | None = None,
        in_modules: bool = False,
    ) -> None:
        self._root = root
        self._shapes = shapes
        self._mode = fake_runs.GuessingMode(guess)
        self._in_modules = in_modules
        self._copies = fake_runs.FakeCopies()
        self._values: dict[fx.Node, Any] = {}
        self._changed: dict[fx.Node, set[fx.Node]] = {}
        self._modes = modes or current_modes()

    @cached_property
    def _device(self) -> torch.device:
        return metadata.device_of_model(self._root)

    def read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value of node)``. Raises ``UnknownSizeError`` if that depends on more than sizes."""
        # The tracer does not record in another thread.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._read, node, read).result()

    def hold(self, facts: tuple[Fact, ...]) -> bool:
        """Return whether ``facts`` are true for these shapes."""
        try:
            return all(self._answer(fact) == fact.answer for fact in facts)
        except UnknownSizeError:
            return False

    def _answer(self, fact: Fact) -> Any:
        read = self.read_for_any_data if fact.of_any_data else self.read
        return read(fact.node, fact.read)

    def read_for_any_data(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value of node)`` where modules ask data on the way: ``if not isfinite(x).all(): x = x.clamp(...)``.

        Modules, and functions that are one node, run with both answers. Raises ``UnknownSizeError`` unless they give
        values of the same structure and sizes, or where other code asks data.
        """
        first, second = self._guessing
        answer = first.read(node, read)
        if second.read(node, read) != answer:
            raise UnknownSizeError("data decide")
        for needed in _in_order(node):
            is_one = needed.op == "call_module" or isinstance(needed.target, OpaqueCall)
            if is_one and first.structure(needed) != second.structure(needed):
                raise UnknownSizeError(f"data decide what {needed.target} returns")
        return answer

    @cached_property
    def _guessing(self) -> tuple[Self, Self]:
        one, other = (type(self)(self._root, self._shapes, guess, self._modes, True) for guess in (True, False))
        return one, other

    def structure(self, node: fx.Node) -> tuple[list[Any], Any]:
        """Sizes and dtypes of the tensors in a value that was read, its other leaves, and their places."""
        leaves, places = pytree.tree_flatten(self._values[node])
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return kinds, places

    def _read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        self._mode.asks = not self._in_modules
        try:
            quiet = swapped(vars(fake_runs.LOG), {"disabled": True})
            unchanged = fake_runs.unchanged_generators()
            with quiet, unchanged, all_swapped(self._uncached), self._mode, applied_to_fakes(self._modes):
                for needed in _in_order(node):
                    if needed not in self._values:
                        before = self._versions(needed)
                        with applied(modes_of(needed)):
                            self._values[needed] = self._value(needed)
                        after = self._versions(needed)
                        self._changed[needed] = {each for each in before if before[each] != after[each]}
                if metadata.asks_for_device(node) and self._device.type != "cpu":
                    return read(metadata.answer_for(node, self._device, self._values.__getitem__))
                if read is is_none and makes_mask(node):
                    with NO_DISPATCH_MODES(), torch.no_grad():
                        return self._computed(node, {}) is None
                return read(self._values[node])
        except (UnknownInputError, DataInModuleError):
            raise
        except Exception as error:
            told = (
                str(error)
                if isinstance(error, UnknownSizeError | metadata.ElsewhereError | TooManyGuessesError | AskedDataError)
                else f"{type(error).__name__}: {error}"
            )
            failed = WrongShapesError if type(error) in _OF_SHAPES else UnknownSizeError
            raise failed(told) from error

    def _computed(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """The value of ``node`` on the CPU; ``known`` has the values of others.

        ::

            input_ids ── embed_tokens ── zeros of this shape ──┐
                 └────── shape ── arange ── positions ─────────┴── create_causal_mask

        Fake tensors have no elements, and for them transformers makes a mask that it leaves out in a step. An argument
        of which only the metadata are used is a tensor of zeros, in the memory of one element. Raises
        ``UnknownSizeError`` unless the value follows from sizes.
        """
        if metadata.is_metadata(node):
            return self._values[node]
        if node in known:
            return known[node]
        if node.op not in ("call_function", "call_method"):
            raise UnknownSizeError(f"it follows from {node.name}")
        stand_ins = metadata_arguments(node, self._root)

        def argument(other: fx.Node) -> Any:
            if other in stand_ins:
                return pytree.tree_map_only(torch.Tensor, _zeros, self._values[other])
            return self._computed(other, known)

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), argument)
        if node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            known[node] = node.target(*args, **kwargs)
        return known[node]

    def changed_by(self, node: fx.Node) -> set[fx.Node]:
        """The arguments whose tensors the code of ``node`` changes in place. Raises as ``read`` does."""
        self.read(node, is_none)
        return self._changed[node]

    def _versions(self, node: fx.Node) -> dict[fx.Node, list[int]]:
        """The versions of the tensors in each argument of ``node``."""
        # A question for a device needs no value.
        known = [argument for argument in node.all_input_nodes if argument in self._values]
        leaves = {argument: pytree.tree_leaves(self._values[argument]) for argument in known}
        return {
            argument: [VERSION.of(leaf) for leaf in each if isinstance(leaf, torch.Tensor)]
            for argument, each in leaves.items()
        }

    @cached_property
    def _uncached(self) -> fake_runs.Uncached:
        return fake_runs.uncached_functions(self._root)

    def _value(self, node: fx.Node) -> Any:
        if reads(node, _DEVICE):
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
            return self._run(self._root.get_submodule(str(node.target)), _mutable(args), _mutable(kwargs))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if any(isinstance(argument, torch.dtype) for argument in args) and node.target in COMPARISONS:
            self._refuse_other_autocast(node)
        if isinstance(node.target, OpaqueCall):
            return self._ask(node.target, args, kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            return self._ask(self._copies.module(module), args, kwargs)
        except UnknownSizeError:
            raise
        except Exception as error:
            if not takes_examples(module):
                raise
            if self._mode.guess is not None and self._in_modules:
                return fake_runs.run_on_examples(module, args, kwargs, self._mode.guess)
            raise DataInModuleError(f"{type(error).__name__}: {error}") from error

    def _ask(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the code of a node, which may ask data."""
        self._mode.asks = True
        try:
            return call(*args, **kwargs)
        except AskedDataError as error:
            raise DataInModuleError(str(error)) from error
        finally:
            self._mode.asks = not self._in_modules

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
        if name in MODULES.of(module):
            return self._copies.module(self._root.get_submodule(target))
        value = PARAMETERS.of(module).get(name, BUFFERS.of(module).get(name, vars(module).get(name)))
        return self._copies.tensor(value) if isinstance(value, torch.Tensor) else value


def _mutable(value: Any) -> Any:
    """``value`` with lists and dicts of its own, as the code of a stage gives them. fx's own cannot be changed."""
    if isinstance(value, list):
        return [_mutable(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mutable(item) for item in value)
    return {key: _mutable(item) for key, item in value.items()} if isinstance(value, dict) else value


def _in_order(node: fx.Node) -> list[fx.Node]:
    """``node`` and all nodes that its size depends on, in the order of the graph."""
    return sorted(reached([node], lambda each: () if reads(each, _DEVICE) else each.all_input_nodes))


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=fake.dtype).expand(fake.shape)


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
