"""The tracer of a spine: the modules whose ``forward`` is traced. Every other module is a single node."""

import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy
from torch import fx, nn
from torch.fx.proxy import TraceError

from nxdpp.tracing.code.frames import caller
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.graph.absent_values import Absence
from nxdpp.tracing.graph.calls import (
    holds_proxy,
    is_compiled,
    record_opaque_call,
    recorded,
    recorded_direct_calls,
    refuse_made,
)
from nxdpp.tracing.graph.checks import run_in_every_step, value_or_none
from nxdpp.tracing.graph.constructors import recorded_constructors, recorded_sizes
from nxdpp.tracing.graph.data_checks import is_check, recorded_checks, truth_that_continues
from nxdpp.tracing.graph.errors import StaleValueError, calling_line
from nxdpp.tracing.graph.swap import StableSet, sources, stable_attributes, swapped
from nxdpp.tracing.models.captured_outputs import call_capturing
from nxdpp.tracing.models.feature_methods import answer_of_features
from nxdpp.tracing.models.library_calls import recorded_dataclasses, recorded_einops, recorded_transformers
from nxdpp.tracing.models.shared_state import call_sharing, with_unfilled_lists
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.left_behind import LeftBehind
from nxdpp.tracing.modules.parameter_devices import devices_of_inputs, on_device_of_input
from nxdpp.tracing.modules.spine_modules import without_forward
from nxdpp.tracing.sizes.answering_tracer import AnsweringTracer
from nxdpp.tracing.sizes.checked_answers import answer_with_items
from nxdpp.tracing.sizes.input_specs import constant_of
from nxdpp.tracing.sizes.sizes import Shapes, UnknownSizeError
from nxdpp.tracing.values.in_place import change_argument, note_module
from nxdpp.tracing.values.items_of_dicts import refuse_changed_items
from nxdpp.tracing.values.lost_changes import ROOT, unchanged_modules
from nxdpp.tracing.values.proxy import proxy_of, refuse_attributes
from nxdpp.tracing.values.type_answers import TracedType, traced_callable, traced_isinstance

_TORCH = re.compile(r"(torch|builtins|abc|typing)\b")
_PLAIN = frozenset({type(None), bool, int, float, str})


class SpineTracer(AnsweringTracer):
    """Trace only the spine.

    Embeddings, norms, heads, rotary modules and layers are single nodes. A pipeline does not cut them, and most code
    that cannot be traced is inside them.
    """

    proxy_buffer_attributes = True

    def __init__(self, spine: set[str], shapes: Shapes, guess: bool | None, absence: Absence, **options: Any) -> None:
        super().__init__(shapes, guess, **options)
        self.absence = absence
        self.may_be_absent: list[fx.Node] = []
        self._wrapped = options.get("autowrap_functions", ())
        own = (value for source in options.get("autowrap_modules", (math,)) for value in vars(source).items())
        self._wrapped_ids = {id(value) for name, value in own if not name.startswith("_") and callable(value)}
        self._wrapped_ids |= set(map(id, self._wrapped))
        self._spine = spine
        self._left_behind: LeftBehind | None = None
        self._thread = threading.get_ident()
        self.refusal: Exception | None = None
        self.finished = False
        self.first_input: fx.Proxy | None = None

    @contextmanager
    def surroundings(self, model: nn.Module, first_input: fx.Proxy | None) -> Iterator[None]:
        """Record tensors that ``model`` makes and wrapped functions that it calls."""
        self.first_input = first_input
        with ExitStack() as stack:
            helpers = without_forward(model, self._spine)
            stack.enter_context(unchanged_modules(self.spine_modules(model), helpers))
            stack.enter_context(stable_attributes(self.spine_modules(model)))
            stack.enter_context(recorded_constructors(self))
            stack.enter_context(recorded_sizes())
            stack.enter_context(devices_of_inputs(first_input))
            named = listings.named_modules(model)
            leaves = [module for name, module in named if name not in self._spine and module not in helpers]
            self._left_behind = LeftBehind(self, model, self._spine, leaves)
            stack.enter_context(self._left_behind.watched())
            stack.enter_context(recorded_direct_calls(self, leaves))
            # fx looks for wrapped functions in the globals of forward, and a decorator hides these.
            own = sources(self.spine_modules(model), _TORCH)
            stack.enter_context(recorded_checks(own))
            stack.enter_context(recorded_einops())
            stack.enter_context(recorded_dataclasses(own))
            stack.enter_context(recorded_transformers())
            # ``ops.f(x)`` takes ``f`` from the module that defines it.
            defining = [sys.modules.get(getattr(function, "__module__", "")) for function in self._wrapped]
            for source in {each for each in defining if each and each not in own and not is_framework(each.__name__)}:
                stack.enter_context(swapped(vars(source), self._single_nodes(source)))
            for source in own:
                functions = self._single_nodes(source)
                builtins = {"isinstance": traced_isinstance, "set": StableSet, "hasattr": self._left_behind.hasattr}
                builtins |= {"type": TracedType, "callable": traced_callable}
                stack.enter_context(swapped(vars(source), {**builtins, **functions}))
            yield
            if self.refusal is not None:
                raise self.refusal

    def _single_nodes(self, source: ModuleType) -> dict[str, Any]:
        """Return the functions of ``source`` that a trace does not enter, each recorded as one node."""
        return {
            name: _or_none(recorded(function))
            for name, function in vars(source).items()
            if id(function) in self._wrapped_ids or is_compiled(function)
        }

    def is_tracing_thread(self) -> bool:
        """Return whether this thread traces. fx changes modules for all threads, and others use theirs meanwhile."""
        return threading.get_ident() == self._thread

    def spine_modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules of ``model`` that are traced through."""
        return [model.get_submodule(name) for name in sorted(self._spine)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """A module is a leaf unless it contains a transformer layer."""
        return module_qualified_name.removeprefix(ROOT).removeprefix(".") not in self._spine

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a module. A module that ``forward`` makes (a loss) becomes a function of its arguments.

        A made module that holds traced values (the weights of classes) is traced through, and so is a made
        ``nn.Sequential`` of the model's modules (``self.layers[:2]``).
        """
        if not self.is_tracing_thread():
            return forward(*args, **kwargs)
        if m not in (self.submodule_paths or {}):
            if next(listings.parameters(m), None) is None:
                if holds_proxy(m):
                    return forward(*args, **kwargs)
                made = record_opaque_call(m, args, kwargs)
                note_module(m, args, kwargs, made)
                return made
            refuse_made(m, self.submodule_paths or {})
            return forward(*args, **kwargs)
        record = partial(super().call_module, m, forward)
        if self.is_leaf_module(m, self.path_of_module(m)):
            args, kwargs = with_unfilled_lists(self, m, args, kwargs)
            refuse_attributes(m, (args, kwargs))
            result = value_or_none(self._run(m, args, kwargs, record))
            note_module(m, args, kwargs, result)
            return result
        return record(args, kwargs)

    def _run(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Callable[..., Any]) -> Any:
        share = partial(call_sharing, self, m, call=record)
        if self._left_behind is None:
            return share(args, kwargs)
        name = self.path_of_module(m).removeprefix(f"{ROOT}.")
        output = call_capturing(self, m, args, kwargs, share)
        self._left_behind.after_run(name, output)
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A parameter or buffer as a traced value. Other threads get the tensor."""
        if not self.is_tracing_thread():
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The truth of a value that follows from the specs and sizes of the inputs.

        For another value it is the truth with which the code does not raise, or with which data select items.

        Raises ``TraceError`` for other code.
        """
        constant = constant_of(obj.node, self.root)
        if constant is not None:
            return bool(constant)
        try:
            return bool(self.fact(obj.node, bool))
        except UnknownSizeError as error:
            # The asking code is two frames up, above the proxy's __bool__.
            if (answer := truth_that_continues(obj, caller(1))) is not None:
                return answer
            if (answer := answer_with_items(obj)) is not None or (answer := answer_of_features(obj)) is not None:
                return answer
            raise self.refused(
                TraceError(
                    f"which code runs depends here on {obj.node.name}, which only the data tells ({error}); a graph "
                    f"has one way for all data"
                )
            ) from error

    def refused(self, error: Exception | str) -> Exception:
        """Return ``error``, a text for a ``RuntimeError``, which ends the trace although ``forward`` may catch it."""
        error = RuntimeError(error) if isinstance(error, str) else error
        self.refusal = self.refusal or error
        return error

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node, with the line of the model that it comes from. Raises ``StaleValueError`` after the trace."""
        if self.finished:
            raise StaleValueError("a value of another trace is used")
        node = super().create_node(*args, **kwargs)
        node.stack_trace = calling_line()
        if is_check(node):
            run_in_every_step(node)
        return node

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any, *others: Any, **more: Any
    ) -> Any:
        """Add a node. Another name of a tensor that a function changes in place has the new value too."""
        if self.first_input is not None:
            args, kwargs = on_device_of_input(target, args, kwargs, self.first_input)
        created = super().create_proxy(kind, target, args, kwargs, *others, **more)
        if kind == "call_function":
            change_argument(target, args, kwargs, created)
        return created

    def create_arg(self, a: Any) -> Any:
        """An argument of a node, a number of Python for NumPy's; ``StaleValueError`` for a value of another trace."""
        if isinstance(a, fx.Proxy):
            if a.tracer is not self:
                raise self.refused(StaleValueError("a value of another trace is used"))
            refuse_changed_items(a)
            return a.node
        if type(a) in _PLAIN:
            return a
        try:
            return super().create_arg(a.item() if isinstance(a, numpy.generic) else a)
        except NotImplementedError:
            name = type(a).__name__
            remedy = ""
            if not is_framework(type(a).__module__):
                remedy = f". Make {name} a dataclass that each layer makes anew, or hand on its tensors."
            if isinstance(a, numpy.ndarray):
                remedy = ". Make it a buffer in __init__: self.register_buffer(name, torch.from_numpy(array))."
            raise RuntimeError(
                f"a {name} is handed on between layers; a graph holds tensors, numbers and strings, and "
                f"tuples, lists, dicts and dataclasses of them{remedy}"
            ) from None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy of a node."""
        return proxy_of(node, self)


def _or_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, recorded; its result is ``None`` where the function returns that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return value_or_none(result) if isinstance(result, fx.Proxy) else result

    return call
