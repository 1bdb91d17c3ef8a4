"""A loss outside of the model: a function that the graph calls after the model, as a single node on the last stage.

::

    loss_fn(output, labels)     inputs  x ──▶ forward ──▶ output ──┐
                                        labels ────────────────────┴──▶ loss_fn ──▶ loss

Its parameters after the first one are names of inputs. An input that ``forward`` has no parameter for goes only
to the function. A tensor that it reads besides its arguments, and that a step would not train, is refused::

    loss_fn = lambda output, labels: F.cross_entropy(output / temperature, labels)

    output ◀── div ◀── cross_entropy ◀── loss       a walk back from the loss, up to the arguments
               │
    temperature ┘                                   a leaf: trained only if it is a parameter of this rank

A parameter of another rank is on the meta device here. A parameter of no model is not averaged over the replicas, and
no method lists it. A tensor that was taken from the model before the wrapping is not the one that is trained.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from nxdpp.ground.torch_names import BASE, pytree
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.search import reached
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.input_specs import InputSpec
from nxdpp.tracing.values.input_dicts import close_inputs
from nxdpp.tracing.values.nested import flatten, leaves_of

T = TypeVar("T")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_EXAMPLE = "loss_fn=lambda output, labels: F.cross_entropy(output, labels)"


@dataclass(frozen=True)
class LossFunction:
    """A function of the model's output and ``names`` of inputs, some ``required``, that returns the loss."""

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
        # The name of an input is the beginning of the names of the values in it: batch['x'] is in batch.
        return {name: value for name, value in inputs.items() if re.split(r"[\[.]", name, maxsplit=1)[0] not in own}

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

        ``graph`` ends with the leaves of the model's output, whose structure is ``output_spec``. ``inputs`` has the
        specs of all traced inputs, the model's and the function's, and ``constants`` all other inputs. Parameters of
        other ranks may move to the meta device later.
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

    It verifies what the function reads besides its arguments.
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


_META = re.compile(r"\bmeta\b", re.IGNORECASE)
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device)
_REMEDY = (
    "Make it a part of the model: return it from forward beside the output, or compute the loss in a module that holds "
    "both, and leave loss_fn out"
)

PENALTY_OF_A_PART = (
    "loss_fn reads the parameters of this rank, and those of other ranks are not among them: a penalty would be one of "
    "this part of the model. Leave it out of loss_fn, and add it on each rank after run_train, to the gradients of its "
    "own parameters: (0.01 * sum(p.abs().sum() for p in model.parameters())).backward()"
)
"""A message, for a loss function that lists the parameters of a rank's part."""


def nodes_of(arguments: Iterable[Any]) -> frozenset[Any] | None:
    """The nodes of the autograd graph that made the arguments of a call.

    ``None`` for arguments without values, and for objects that may hold more tensors.
    """
    leaves = leaves_of(list(arguments))
    if not all(leaf is None or isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in tensors):
        return None
    # A change of a view in place makes new nodes up to its base.
    bases = [base for tensor in tensors if (base := BASE.of(tensor)) is not None]
    return frozenset(get_gradient_edge(each).node for each in (*tensors, *bases) if each.requires_grad)


def verify_leaves(loss: Any, before: frozenset[Any], module: nn.Module) -> None:
    """Raise ``ValueError`` for a leaf that is no parameter of this rank, and for a ``loss`` without a value.

    The nodes ``before`` made the arguments of its function. Parameters of other ranks in ``module``, the whole model,
    are on the meta device.
    """
    if not isinstance(loss, torch.Tensor):
        return
    leaves = _leaves(loss, before)
    if len(leaves) > 1:
        trained = [each for each in listings.parameters(module) if each.requires_grad]
        held = [each for each in trained if not each.is_meta]
        if {*map(id, held)} == {*map(id, leaves)} and len(held) < len(trained):
            raise ValueError(f"{PENALTY_OF_A_PART}.")
    for leaf in leaves:
        names = [name for name, parameter in listings.named_parameters(module) if parameter is leaf]
        if not names:
            raise ValueError(
                f"loss_fn reads a tensor {tuple(leaf.shape)} that requires a gradient, and it is neither an argument "
                f"nor a parameter of the stages here: no step would train it as one process does. {_REMEDY}; or detach "
                f"it."
            )
        if leaf.is_meta:
            raise ValueError(f"loss_fn reads {names[0]}, which another rank holds. {_REMEDY}.")
    if loss.is_meta:
        raise ValueError(f"loss_fn reads values of the model that another rank holds. {_REMEDY}.")


def explain(error: RuntimeError, module: nn.Module) -> None:
    """Raise ``ValueError`` for an ``error`` of a function that reads tensors of other ranks; otherwise return."""
    if _META.search(str(error)) and any(parameter.is_meta for parameter in listings.parameters(module)):
        raise ValueError(f"loss_fn reads values of the model that another rank holds. {_REMEDY}.") from error


def _leaves(loss: torch.Tensor, before: frozenset[Any]) -> list[torch.Tensor]:
    """Return the leaves from which ``loss`` is computed other than through the arguments of its function."""
    if not loss.requires_grad:
        return []

    def sources(node: Any) -> list[Any]:
        return [] if node in before else [source for source, _ in node.next_functions if source is not None]

    nodes: Iterable[Any] = reached([get_gradient_edge(loss).node], sources)
    return [n.variable for n in nodes if n not in before and type(n).__name__ == "AccumulateGrad"]
