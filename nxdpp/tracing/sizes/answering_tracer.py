"""Tracer that answers questions of traced code about a value by the specs and sizes of the inputs.

Each answer that the code has is a fact: the graph serves only inputs with the same facts.

For inputs of unknown shape the tracer may guess. A partition needs only the order of the modules. A trace with guesses
finds it before a step gives real inputs. Its graph is never run.
"""

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

from torch import fx, nn

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.modes import current_modes
from nxdpp.tracing.graph.uses import metadata_arguments
from nxdpp.tracing.sizes.checked_answers import check_in_every_step, is_checked
from nxdpp.tracing.sizes.sizes import (
    DataInModuleError,
    Fact,
    Shapes,
    Sizes,
    UnknownInputError,
    UnknownSizeError,
    is_none,
    is_tensor,
)
from nxdpp.tracing.values.metadata import METHODS


class Answers:
    """The answers of one run in order; the ones of an ``earlier`` run serve while the questions are the same."""

    def __init__(self, earlier: Self | None = None) -> None:
        self._given: list[tuple[Any, Any]] = []
        self._earlier = [] if earlier is None else earlier._given

    def get(self, question: Any, compute: Callable[[], Any]) -> Any:
        """The answer to ``question``, by default from ``compute``. Raises ``UnknownSizeError`` as that does."""
        position = len(self._given)
        if position < len(self._earlier) and self._earlier[position][0] == question:
            answer = self._earlier[position][1]
        else:
            try:
                answer = compute()
            except UnknownSizeError as error:
                answer = error
        self._given.append((question, answer))
        if isinstance(answer, UnknownSizeError):
            raise answer
        return answer


class AnsweringTracer(fx.Tracer):
    """Tracer with answers about values for inputs of ``shapes``, as far as they are known.

    ``guess`` is the answer to a question that no size gives, for a trace of the order of modules; ``None`` for none.
    ``facts`` are the answers that traced code has had, ``answers`` the ones that another trace may know.
    """

    def __init__(self, shapes: Shapes, guess: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.facts: list[Fact] = []
        self.answers = Answers()
        self._shapes = shapes
        self._guess = guess
        self._guessed = 0
        self._modes = current_modes()

    @property
    def guesses(self) -> bool:
        """``True`` for a trace of the order of modules, whose graph is never run."""
        return self._guess is not None

    def fact(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value)`` for inputs of the sizes at hand. The graph then belongs to inputs with the same answer.

        A tracer that guesses answers for inputs of unknown shapes too. Raises ``UnknownSizeError`` if the answer
        depends on more than sizes.
        """
        try:
            answer = self.read(node, read)
        except UnknownInputError as error:
            return self._guess_answer(node, read, error)
        except DataInModuleError as error:
            return self._fact_of_any_data(node, read, error)
        self.facts.append(Fact(node, read, answer))
        return answer

    def _fact_of_any_data(self, node: fx.Node, read: Callable[[Any], Any], unknown: UnknownSizeError) -> Any:
        if not is_checked(read):
            raise unknown
        try:
            question = (node.name, read, "any data")
            answer = self.answers.get(question, lambda: self._known_sizes.read_for_any_data(node, read))
        except UnknownSizeError:
            raise unknown from None
        check_in_every_step(self.proxy(node), read, answer)
        self.facts.append(Fact(node, read, answer, of_any_data=True))
        return answer

    def is_none(self, node: fx.Node) -> tuple[bool | None, bool]:
        """Return whether a value is ``None`` for inputs of the sizes at hand, and whether that is sure.

        It is a guess where it depends on data, and ``None`` where no guess is possible. A sure ``None`` becomes a fact
        of the graph.
        """
        answer = self._sure_truth(node, is_none)
        if answer is not None:
            return answer, True

        def guess() -> bool | None:
            for sizes in self._guesses:
                with suppress(UnknownSizeError):
                    return bool(sizes.read(node, is_none))
            return None

        return self.answers.get((node.name, "guess"), guess), False

    def is_tensor(self, node: fx.Node) -> bool:
        """Return whether a value is surely a tensor for inputs of the sizes at hand. It then is a fact of the graph."""
        return bool(self._sure_truth(node, is_tensor))

    def _sure_truth(self, node: fx.Node, read: Callable[[Any], bool]) -> bool | None:
        """``read(value)``, a fact where it is true; ``None`` where it depends on more than sizes."""
        try:
            answer = bool(self.read(node, read))
        except UnknownSizeError:
            return None
        if answer:
            self.facts.append(Fact(node, read, answer))
        return answer

    @cached_property
    def _guesses(self) -> list[Sizes]:
        return [Sizes(self.root, self._shapes, guess, self._modes) for guess in (True, False)]

    def _guess_answer(self, node: fx.Node, read: Callable[[Any], Any], unknown: UnknownInputError) -> Any:
        if self._guess is None:
            raise unknown
        self._guessed += 1
        answer = guessed_answer(node, read, self._guess, self.root)
        if answer is None or self._guessed > MOST_GUESSES:
            raise UnknownSizeError("no shapes of the inputs give the answer") from unknown
        return answer

    def read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """``read(value)`` for inputs of the sizes at hand. Raises ``UnknownSizeError`` as ``fact`` does."""

        return self.answers.get((node.name, read), lambda: self._known_sizes.read(node, read))

    def changed_by(self, node: fx.Node) -> set[fx.Node]:
        """The arguments that the code of ``node`` changes in place, where the sizes of the inputs tell."""
        with suppress(UnknownSizeError):
            return self._known_sizes.changed_by(node)
        return set()

    @cached_property
    def _known_sizes(self) -> Sizes:
        return Sizes(self.root, self._shapes, modes=self._modes)


# A loop that sizes end would not end with a guess.
MOST_GUESSES = 1000
_SIZE = 2
_ARITHMETIC = frozenset({operator.__name__, operator.add.__module__, math.__name__, "builtins"})
# Attributes of a tensor that have its elements.
_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})


def guessed_answer(node: fx.Node, read: Callable[[Any], Any], guess: bool, root: nn.Module) -> Any:
    """Return ``guess`` for a yes or no, a small number else; ``None`` where the elements of a tensor decide."""
    if read is bool:
        return None if _reads_elements(node, root) else guess
    if read.__name__ == "number_of_items" or read is len:
        return _SIZE
    if read.__name__ == "keys_of":
        return None
    return None if _reads_elements(node, root) else _SIZE


def _reads_elements(node: fx.Node, root: nn.Module) -> bool:
    """Return whether the value of ``node`` follows from the elements of a tensor, not only from its shape."""
    pending: list[tuple[fx.Node, bool]] = [(node, False)]
    seen: set[fx.Node] = set()
    while pending:
        current, is_item = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if _makes_a_tensor(current, is_item):
            return True
        is_attribute = current.target is getattr and current.args[1] not in _VIEWS
        if is_attribute or getattr(current.target, "__name__", current.target) in METHODS:
            continue
        only_metadata = metadata_arguments(current, root)
        is_item = current.target is operator.getitem
        pending += [(argument, is_item) for argument in current.all_input_nodes if argument not in only_metadata]
    return False


def _makes_a_tensor(node: fx.Node, is_item: bool) -> bool:
    # An item of a module's output may be a size, as may an input of the model and the result of a user's function.
    if node.op == "call_module":
        return not is_item
    if node.op == "call_method":
        return node.target not in METHODS
    if node.op != "call_function" or isinstance(node.target, OpaqueCall):
        return False
    if getattr(node.target, "__name__", None) in METHODS:
        return False
    return getattr(node.target, "__module__", None) not in _ARITHMETIC
