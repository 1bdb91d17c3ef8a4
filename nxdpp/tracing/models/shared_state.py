"""Mappings that one layer fills for later layers: keys and values of attention that several layers share.

A stage would lose items that a layer writes into a mapping next to its output. The content of the mapping is
therefore a value of the graph, an input and an output of each layer::

    {} ── shared_state ── layers.0 ── contents ── shared_state ── layers.1 ── contents ── ...
               └─────────────────────────┘             └─────────────────────────┘

``shared_state`` makes a new mapping for each run of a layer, ``contents`` reads it after the layer. The content
crosses a stage boundary like any other value, with gradients.
"""

from collections import UserDict
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn

from torch import fx, nn

from nxdpp.ground.torch_names import pytree
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.fake_runs import takes_examples


class SharedState:
    """Make a mapping like ``original`` of given content."""

    def __init__(self, original: UserDict[Any, Any]) -> None:
        self.__name__ = "shared_state"
        self._empty = _like(original, {})

    def __call__(self, content: dict[Any, Any]) -> UserDict[Any, Any]:
        """A new mapping with ``content``."""
        return _like(self._empty, dict(content))


class SealedState:
    """Make a mapping like ``original`` that raises for any use, for a layer that does not use it."""

    def __init__(self, original: UserDict[Any, Any], layer: str) -> None:
        self.__name__ = "sealed_state"
        self._sealed = _like(original, _Untouchable(
            f"{layer} uses the {type(original).__name__} that layers share, although its attention declares that it "
            f"neither stores keys and values for other layers nor takes those of others"
        ))  # fmt: skip

    def __call__(self) -> UserDict[Any, Any]:
        """The mapping."""
        return self._sealed


def contents(output: Any, state: UserDict[Any, Any]) -> dict[Any, Any]:
    """The content of ``state`` after the layer that returned ``output`` has run."""
    return dict(state.data)


def call_sharing(
    tracer: fx.Tracer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Record ``module`` by ``call(args, kwargs)`` with the content of shared mappings as input and output.

    A mapping is a ``collections.UserDict``. The mapping in ``forward`` itself then raises for any use: it lacks the
    items that the layers put into theirs.
    """
    opened: list[tuple[Any, fx.Proxy]] = []

    def hand_over(leaf: Any) -> Any:
        # A traced value would look through the stack for the answer to isinstance.
        if not issubclass(type(leaf), UserDict):
            return leaf
        if not _takes_part(module):
            return tracer.create_proxy("call_function", SealedState(leaf, type(module).__name__), (), {})
        content = leaf.data.content if isinstance(leaf.data, _Untouchable) else dict(leaf.data)
        state = tracer.create_proxy("call_function", SharedState(leaf), (content,), {})
        opened.append((leaf, state))
        return state

    args, kwargs = pytree.tree_map(hand_over, (args, kwargs))
    output = call(args, kwargs)
    for mapping, state in opened:
        held = _Untouchable(
            f"forward uses a {type(mapping).__name__} that it has handed to {type(module).__name__}; its "
            f"content is known between layers alone"
        )
        held.content = tracer.create_proxy("call_function", contents, (output, state), {})
        mapping.data = held
    return output


class _Untouchable(MutableMapping[Any, Any]):
    """Content of a mapping that raises for any use."""

    content: Any = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise RuntimeError(self._reason)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = copy = _refuse


def _like(original: UserDict[Any, Any], data: Any) -> UserDict[Any, Any]:
    # copy.copy would copy the data too.
    twin = type(original).__new__(type(original))
    vars(twin).update(vars(original), data=data)
    return twin


def _takes_part(module: nn.Module) -> bool:
    """Return whether the layer may use the mapping. ``SealedState`` checks the answer of its attention layers."""
    attentions = [child for child in listings.modules(module) if hasattr(child, "is_kv_shared_layer")]
    return not attentions or any(child.is_kv_shared_layer or child.store_full_length_kv for child in attentions)


class UnfilledList(list[Any]):
    """An empty list for a module without parameters, which may read it; additions raise ``RuntimeError``."""

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise RuntimeError(
            "a module fills a list that it is given; its additions would be lost in a pipeline. Return the values, or "
            "share them in a collections.UserDict"
        )

    append = extend = insert = __iadd__ = __setitem__ = _refuse


def unfilled_list() -> UnfilledList:
    """An empty list, as a node of the graph."""
    return UnfilledList()


def with_unfilled_lists(
    tracer: fx.Tracer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a leaf, with a node in place of each empty list for a criterion (``auxiliary_logits=[]``).

    Raises ``RuntimeError`` for an empty list, dict or set as an argument of another leaf, whose additions would be
    lost.
    """

    def hand_over(value: Any) -> Any:
        if type(value) is not list or value or not takes_examples(module):
            return value
        return tracer.create_proxy("call_function", unfilled_list, (), {})

    args, kwargs = tuple(map(hand_over, args)), {name: hand_over(value) for name, value in kwargs.items()}
    for name, value in (*enumerate(args), *kwargs.items()):
        if type(value) in (list, dict, set) and not value:
            raise RuntimeError(
                f"{type(module).__name__} is given an empty {type(value).__name__} ({name!r}), as if to fill it; its "
                f"additions would be lost. Return the values, or share them in a collections.UserDict"
            )
    return args, kwargs
