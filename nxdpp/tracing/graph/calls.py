"""Calls that the graph keeps as one node: functions, autograd Functions and ``forward`` of leaf modules."""

import copy
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction
from transformers import PreTrainedConfig

from nxdpp.ground.torch_names import BUFFERS, DYNAMO_CONFIG, PARAMETERS, pytree
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.graph.swap import all_swapped, in_this_thread
from nxdpp.tracing.modules import listings

# Levels of objects in objects that are searched for traced values.
_DEEPEST = 2
_UNSAVED = torch.empty(0)
_NOTHING = object()
_WITHOUT_ATTRIBUTES = (fx.Proxy, nn.Module, torch.Tensor, type, FunctionType, MethodType, PreTrainedConfig)


class OpaqueCall:
    """``function`` with its static arguments bound; called with the traced arguments in their order.

    An fx node holds tensors, numbers and strings, but no configuration and no closure. ``OpaqueCall`` holds these.
    """

    # The number of positional arguments, and the keywords, where no argument is a container.
    _flat: tuple[int, list[str]] | None = None
    # The arguments after the traced ones, where there are no keywords and no containers: a check of each layer's value.
    _rest: list[Any] | None = None

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        # Without a container among the arguments they are the leaves: pytree would take longer than a small call.
        if [*map(id, leaves)] == [*map(id, (*args, *kwargs.values()))]:
            self._flat = len(args), list(kwargs)
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__).strip("<>")
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Proxy)]
        self._leaves = [None if isinstance(leaf, fx.Proxy) else _freeze(leaf) for leaf in leaves]
        if self._flat == (len(leaves), []) and self._positions == [*range(len(self._positions))]:
            self._rest = self._leaves[len(self._positions) :]

    def __call__(self, *traced: Any) -> Any:
        """Call the function with the static arguments in their places."""
        if self._rest is not None:
            return self.function(*traced, *self._rest)
        args, kwargs = self.arguments(traced)
        return self.function(*args, **kwargs)

    def arguments(self, traced: Iterable[Any]) -> tuple[Any, Any]:
        """The positional arguments and keywords of the function, with ``traced`` in their places."""
        leaves = list(self._leaves)
        for position, value in zip(self._positions, traced, strict=True):
            leaves[position] = value
        if self._flat is None:
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            return args, kwargs
        count, keywords = self._flat
        return tuple(leaves[:count]), dict(zip(keywords, leaves[count:], strict=True))

    @property
    def declares_dict(self) -> bool:
        """``True`` if the function is annotated to return a ``dict``."""
        return getattr(self.function, "__annotations__", {}).get("return") in (dict, "dict")

    def bound(self) -> tuple[Any, Any]:
        """The static arguments and keywords, with ``...`` in the places of the traced arguments."""
        return self.arguments(... for _ in self._positions)

    def parameter_of(self, index: int) -> str | int | None:
        """The keyword or position at which the function gets traced argument ``index`` itself."""
        marks = [object() for _ in self._positions]
        args, kwargs = self.arguments(marks)
        return next((name for name, value in (*enumerate(args), *kwargs.items()) if value is marks[index]), None)


def _freeze(leaf: Any) -> Any:
    # forward may change its configuration during the call; the node keeps the configuration of this moment.
    return copy.copy(leaf) if isinstance(leaf, PreTrainedConfig) else leaf


def record_opaque_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
    """Add a node for ``function(*args, **kwargs)``, at least one of whose arguments is a proxy."""
    traced = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)]
    call = OpaqueCall(function, args, kwargs)
    return traced[0].tracer.create_proxy("call_function", call, tuple(traced), {}, name=call.__name__)


def has_proxy(args: Any, kwargs: Any, kind: type = fx.Proxy) -> bool:
    """Return whether a leaf of the arguments is a proxy, or of a different ``kind``."""
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves((args, kwargs)))


def _has_module(args: Any, kwargs: Any) -> bool:
    # A traced value would look through the stack for the answer to isinstance, and has all attributes.
    plain = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if not issubclass(type(leaf), fx.Proxy))
    return any(isinstance(getattr(leaf, "__self__", leaf), nn.Module) for leaf in plain)


def holds_proxy(module: nn.Module) -> bool:
    """Return whether an attribute, a buffer or a parameter of ``module`` or of a descendant is a proxy."""
    stores = (
        store for part in listings.modules(module) for store in (vars(part), BUFFERS.of(part), PARAMETERS.of(part))
    )
    return any(has_proxy(list(store.values()), {}) for store in stores)


def refuse_made(module: nn.Module, known: Container[nn.Module]) -> None:
    """Raise ``RuntimeError`` unless ``module``, which ``forward`` makes, is an ``nn.Sequential`` of ``known`` ones."""
    for part in listings.modules(module):
        is_made = part not in known and next(listings.parameters(part), None) is not None
        if is_made and type(part) is not nn.Sequential:
            raise RuntimeError(
                f"forward makes a {type(part).__name__} with parameters. Make it in __init__; only an nn.Sequential of "
                f"the model's modules may be made."
            )


def _object_with_proxy(value: Any, depth: int = _DEEPEST) -> Any:
    """Return an object among ``value`` that has a proxy among its attributes, or ``None``."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, _WITHOUT_ATTRIBUTES) or not hasattr(leaf, "__dict__"):
            continue
        parts = list(vars(leaf).values())
        if has_proxy(parts, {}) or (depth and _object_with_proxy(parts, depth - 1) is not None):
            return leaf
    return None


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, recorded as one node for each call with a proxy.

    A call with modules among its arguments, or with methods of modules (``apply_chunking_to_forward``), runs as it is,
    so that the tracer sees the layers among them. So does a function of transformers whose arguments have objects with
    traced values. Another function raises ``TypeError``.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not has_proxy(args, kwargs) or _has_module(args, kwargs):
            return function(*args, **kwargs)
        holder = _object_with_proxy((args, kwargs))
        if holder is None:
            return record_opaque_call(function, args, kwargs)
        if is_framework(getattr(function, "__module__", None)):
            return function(*args, **kwargs)
        raise TypeError(
            f"{function.__name__} is a single node and gets a {type(holder).__name__} with a traced value in it. Give "
            f"{function.__name__} the tensors themselves, or make the {type(holder).__name__} inside of it."
        )

    return call


def is_compiled(function: Any) -> bool:
    """Return whether no tracer can go through ``function``: it is compiled, or a script of TorchScript."""
    while isinstance(function, FunctionType):
        if function.__globals__.get("__package__") == DYNAMO_CONFIG.path.rpartition(".")[0]:
            return True
        # A decorator may be around it.
        function = getattr(function, "__wrapped__", None)
    return isinstance(function, torch.jit.ScriptFunction)


@contextmanager
def recorded_autograd_functions() -> Iterator[None]:
    """Record the call of an autograd Function with a proxy, so that its own backward runs.

    fx would trace only its ``forward``. The Functions' ``forward`` is replaced and not ``apply``, which code may hold
    under a name of its own (``scale = Scale.apply``), and which calls the ``forward`` that its class has then.

    Raises ``RuntimeError`` for a Function with modules as arguments (a reversible network), which cannot be cut.
    """
    base: Any = torch.autograd.Function
    with ExitStack() as restored:
        record = partial(_record_function, restored, base.setup_context)
        for function in reversed(_subclasses(base)):  # A subclass may inherit its forward.
            record(function)
        # Code may also define a Function in a forward.
        restored.enter_context(_attribute(base, "__init_subclass__", classmethod(lambda cls: record(cls))))
        yield


def _subclasses(base: type) -> dict[type, None]:
    found: dict[type, None] = {}
    each: type
    for each in type(base).__subclasses__(base):
        found |= {each: None, **_subclasses(each)}
    return found


def _record_function(restored: ExitStack, without_context: Any, function: Any) -> None:
    """Let ``forward`` of one Function record calls with a proxy in this thread, until ``restored`` is closed."""
    forward, setup = function.forward, _Setup(function.setup_context, function.setup_context is not without_context)

    def record(*args: Any, **kwargs: Any) -> Any:
        # torch gives a forward its context first, unless the Function has setup_context.
        given = args if setup.is_defined else args[1:]
        # Code may also call the forward itself, whose operations then have gradients of their own.
        if not setup.end_apply() or not has_proxy(given, kwargs):
            return forward(*args, **kwargs)
        _refuse_modules(function, given, kwargs)
        if function.__module__ == CheckpointFunction.__module__ and function is not CheckpointFunction:
            # A checkpoint of torch 2.9 saves its arguments, unless the result has no gradient.
            return _UNSAVED.detach()
        with torch.set_grad_enabled(setup.gradients):
            return record_opaque_call(_Apply(function), given, kwargs)

    # torch binds the arguments of a Function with setup_context by the signature of its forward.
    recorder = wraps(forward)(in_this_thread(record, forward))
    restored.enter_context(_attribute(function, "forward", staticmethod(recorder)))
    restored.enter_context(_attribute(function, "setup_context", setup))


class _Setup:
    """``setup_context`` of a Function.

    ``apply`` asks for it before it turns gradients off and calls ``forward``: ``gradients`` tells whether they were on.
    """

    def __init__(self, function: Callable[..., Any], is_defined: bool) -> None:
        self.is_defined = is_defined
        self.gradients = True
        self._has_begun = False
        self._function = in_this_thread(self._unless_traced, function) if is_defined else function
        self._original = function
        self._begin_apply = in_this_thread(self._begin, lambda: None)

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        self._begin_apply()
        return self._function

    def end_apply(self) -> bool:
        """Return whether an ``apply`` has begun, which calls ``forward`` now."""
        has_begun, self._has_begun = self._has_begun, False
        return has_begun

    def _begin(self) -> None:
        self.gradients, self._has_begun = torch.is_grad_enabled(), True

    def _unless_traced(self, ctx: Any, inputs: Any, output: Any) -> Any:
        # An apply asks for it again, to call it.
        self._has_begun = False
        # A proxy has nothing to save.
        return None if has_proxy((inputs, output), {}) else self._original(ctx, inputs, output)


@contextmanager
def _attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Give a class an attribute; afterwards it has its own again, or inherits."""
    own = vars(owner).get(name, _NOTHING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _refuse_modules(function: Any, args: Any, kwargs: Any) -> None:
    if not has_proxy(args, kwargs, nn.Module):
        return
    if function is CheckpointFunction:
        raise RuntimeError(
            "forward calls checkpoint with use_reentrant=True, which runs modules itself; they cannot be cut. "
            "Call the layers plainly, and nxdpp.apply_checkpoint(model) once after wrapping."
        )
    raise RuntimeError(
        f"{function.__name__} is an autograd Function that runs the modules it is given, forward and backward, "
        f"itself; they cannot be cut"
    )


class _Apply:
    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def recorded_direct_calls(tracer: fx.Tracer, leaves: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Record ``leaf.forward(x)`` as ``leaf(x)``. The graph calls the whole module, so that its hooks run."""
    called = [leaf for leaf in leaves if type(leaf).forward is not nn.Module.forward]
    return all_swapped((vars(leaf), {"forward": _DirectCall(tracer, leaf)}) for leaf in called)


class _DirectCall:
    def __init__(self, tracer: fx.Tracer, leaf: nn.Module) -> None:
        self._tracer = tracer
        self._leaf = leaf
        self._forward: Any = leaf.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.call_module(self._leaf, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module (a fake copy) runs and is not traced.
        forward = self._forward
        # Activation checkpointing puts the method into a partial.
        return copy.deepcopy(forward, memo) if isinstance(forward, MethodType | partial) else forward
