"""A loss outside of the model: a function that the graph calls after the model, as a single node on the last stage.

::

    loss_fn(output, labels)     inputs  x ──▶ forward ──▶ output ──┐
                                        labels ────────────────────┴──▶ loss_fn ──▶ loss

Its parameters after the first one are names of inputs. An input that ``forward`` has no parameter for goes only
to the function.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from torch import fx, nn
from torch.utils import _pytree as pytree

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.models.loss_leaves import explain, nodes_of, verify_leaves
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.values.input_dicts import close_inputs
from nxdpp.tracing.values.nested import flatten

T = TypeVar("T")

_ROOT = re.compile(r"[^\[.]*")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EXAMPLE = "loss_fn=lambda output, labels: F.cross_entropy(output, labels)"


@dataclass(frozen=True)
class LossFunction:
    """A function of the model's output and of inputs, which returns the loss of a microbatch.

    Attributes:
        function: called with the output, and with inputs by name.
        names: inputs that it takes.
        required: the ``names`` without a default.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    required: tuple[str, ...]

    @classmethod
    def of(cls, function: Any) -> Self:
        """Read the names from the signature. Raises ``TypeError`` or ``ValueError`` for a function without them."""
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"loss_fn={function!r:.80} must be a function of the model's output: {_EXAMPLE}.")
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            raise ValueError(
                f"loss_fn={type(function).__name__} has parameters, which would belong to no stage. Make it a part of "
                f"the model: a module that holds both and returns the loss."
            )
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            first, *others = inspect.signature(called).parameters.values()
        except ValueError as error:
            raise TypeError(f"loss_fn={function!r:.80} names no parameters. Name them: {_EXAMPLE}.") from error
        named = [parameter for parameter in others if parameter.kind in _NAMED]
        if first.kind not in _POSITIONAL or (others and not named):
            raise TypeError(
                f"loss_fn={function!r:.80} must take the output first, and then inputs by their names: {_EXAMPLE}."
            )
        required = tuple(parameter.name for parameter in named if parameter.default is parameter.empty)
        return cls(function, tuple(parameter.name for parameter in named), required)

    def lacking(self, inputs: Iterable[str]) -> tuple[str, ...]:
        """Names that the function needs and ``inputs``, opened or not, lack."""
        given = set(inputs)
        return tuple(name for name in self.required if name not in given)

    def of_module(self, module: nn.Module, inputs: Mapping[str, T]) -> dict[str, T]:
        """Return the ``inputs``, opened or not, that ``module`` takes."""
        own = self.names_alone(module)
        return {name: value for name, value in inputs.items() if _root(name) not in own}

    def names_alone(self, module: nn.Module) -> set[str]:
        """Names that the function takes and ``module.forward`` does not name."""
        return set(self.names) - inspect.signature(module.forward).parameters.keys()

    def loss(self, output: Any, inputs: Mapping[str, Any]) -> Any:
        """Call the function on the output for ``inputs``."""
        return self.function(output, **{name: inputs[name] for name in self.names if name in inputs})

    def add_to(
        self,
        graph: fx.Graph,
        output_spec: pytree.TreeSpec,
        inputs: Mapping[str, InputSpec],
        constants: Mapping[str, Any],
        module: nn.Module,
    ) -> fx.Node:
        """Add the call, and placeholders of its own inputs, to the graph of a model; return the call.

        Args:
            graph: ends with the leaves of the model's output.
            output_spec: their structure.
            inputs: specs of all traced inputs, the model's and the function's.
            constants: all other inputs.
            module: the model. Parameters of other ranks may move to the meta device later.
        """
        end = next(node for node in graph.nodes if node.op == "output")
        placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
        last = next(reversed(placeholders.values()), None)
        for name, spec in inputs.items():
            if name not in placeholders:
                with graph.inserting_before(next(iter(graph.nodes)) if last is None else last.next):
                    last = placeholders[name] = graph.placeholder(name)
                    last.meta["spec"] = spec
        closed = close_inputs({**{name: placeholders[name] for name in inputs}, **constants})
        output = pytree.tree_unflatten(list(end.args[0]), output_spec)
        given = {name: closed[name] for name in self.names if name in closed}
        call = LossCall(self.function, output, given, module)
        with graph.inserting_before(end):
            return graph.create_node("call_function", call, tuple(call.traced), name="loss_fn")


class LossCall(OpaqueCall):
    """A call of a loss function, whose traced arguments are nodes of a finished graph.

    It verifies what the function reads besides its arguments, see ``loss_leaves``.
    """

    def __init__(self, function: Callable[..., Any], output: Any, inputs: dict[str, Any], module: nn.Module) -> None:
        leaves, self._spec = flatten(((output,), inputs))
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__).strip("<>")
        self.traced = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        self._leaves = [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        self._module = module

    def __call__(self, *traced: Any) -> Any:
        """Call the function. Raises ``ValueError`` or ``RuntimeError`` for a tensor that no step would train."""
        before = nodes_of(traced)
        if before is None:
            return super().__call__(*traced)
        try:
            loss = super().__call__(*traced)
        except RuntimeError as error:
            explain(error, self._module)
            raise
        verify_leaves(loss, before, self._module)
        return loss


def _root(name: str) -> str:
    """The name of an input, from the name of a value in it: ``batch`` for ``batch['x']``."""
    found = _ROOT.match(name)
    assert found is not None, "any text matches"
    return found[0]
