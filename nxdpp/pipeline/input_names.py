"""Names of the inputs of a step: which ones the model's forward takes, and which ones mistyped names mean.

::

    forward(self, input_ids, labels=None, **kwargs: Unpack[TransformersKwargs])
                  └─ parameters ───────┘  └─ typed keywords: num_items_in_batch, output_attentions, ... ─┘

Any other name vanishes in ``**kwargs``. It is refused where no forward of the model mentions it, and it is close
to a name that is not given, such as ``lables``. So is a part of such a name, such as ``mask``.
"""

import inspect
import logging
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from nxdpp.counted import counted
from nxdpp.tracing.code.names import is_framework, names_in
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.closest_name import closest
from nxdpp.tracing.sizes.example_inputs import required_inputs

_logger = logging.getLogger(__name__)

# Similarity, of 1.0, from which on a name in **kwargs is refused. That of "lables" and "labels" is 0.83.
_MISTYPED = 0.75
# Similarity from which on a name that is refused in any case gets a suggestion.
_SUGGESTED = 0.5
_NAMES_SHOWN = 12
# Least length of a part of a name: "ids" may be a column of a data set.
_PART = 4

# Names with which a module was called before, and that were not refused.
_passed: "WeakKeyDictionary[nn.Module, set[frozenset[str]]]" = WeakKeyDictionary()


class ForwardNames(NamedTuple):
    """Names that a forward takes.

    Attributes:
        parameters: its own, in their order.
        keywords: typed ones of its ``**kwargs``.
        takes_others: ``True`` for ``**kwargs``, typed or not.
    """

    parameters: tuple[str, ...]
    keywords: tuple[str, ...]
    takes_others: bool

    @property
    def all(self) -> tuple[str, ...]:
        """All names that are known."""
        return (*self.parameters, *self.keywords)


def forward_names(module: nn.Module) -> ForwardNames:
    """Return the names of the inputs of ``module.forward``."""
    parameters: list[str] = []
    keywords: tuple[str, ...] = ()
    takes_others = False
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_others = True
            keywords = _typed_keywords(module, parameter.annotation)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            parameters.append(parameter.name)
    return ForwardNames(tuple(parameters), keywords, takes_others)


def _typed_keywords(module: nn.Module, annotation: Any) -> tuple[str, ...]:
    """Return the keys of a ``TypedDict`` in ``Unpack[...]``, including its bases' keys."""
    if isinstance(annotation, str):
        function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
        try:
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except Exception:
            # A name that only type checkers import.
            return ()
    for kind in typing.get_args(annotation):
        if typing.is_typeddict(kind):
            return tuple(sorted(kind.__required_keys__ | kind.__optional_keys__))
    return ()


def check_names(module: nn.Module, names: Sequence[str], argument: str) -> None:
    """Raise ``ValueError`` for names that ``module.forward`` does not take, also for mistyped ones in ``**kwargs``.

    Logs a warning, once, for another name that a typed ``**kwargs`` lacks and that no forward of the model mentions.
    """
    taken = forward_names(module)
    unknown = [name for name in names if name not in taken.all]
    if not unknown:
        return
    passed = _passed.setdefault(module, set())
    if frozenset(names) in passed:
        return
    kind = type(module).__name__
    if not taken.takes_others:
        raise ValueError(
            f"{argument}: {kind}.forward takes no {unknown}{_meant(unknown, names, taken, _SUGGESTED)}; it takes "
            f"{list(taken.parameters)}."
        )
    mentioned = _mentioned(module)
    dropped = [name for name in unknown if name not in mentioned]
    mistyped = [name for name in dropped if _closest(name, names, taken, _MISTYPED)]
    if mistyped:
        raise ValueError(
            f"{argument}: {kind}.forward takes no {mistyped}{_meant(mistyped, names, taken, _MISTYPED)}; its **kwargs "
            f"would drop it without an error."
        )
    passed.add(frozenset(names))
    if taken.keywords and dropped:
        _logger.warning("%s: no forward of %s mentions %s: the model ignores it", argument, kind, ", ".join(dropped))


def check_input_names(module: nn.Module, inputs: Any, input_names: Sequence[str] | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``inputs`` has exactly ``input_names``, or names of the forward."""
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a dict by name, not a {type(inputs).__name__}: {{'input_ids': ...}}.")
    if input_names is not None:
        check_exact_names(list(inputs), input_names)
    else:
        _check_not_nested(module, inputs)
        check_names(module, list(inputs), "inputs")
        check_required(module, list(inputs), "inputs")


def _check_not_nested(module: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a batch that is given as one input, such as ``run_train(batch=batch)``."""
    taken = forward_names(module).all
    for name, value in inputs.items():
        is_batch = isinstance(value, Mapping) and bool(value) and all(key in taken for key in value)
        if is_batch and name not in taken and name not in _mentioned(module):
            raise ValueError(
                f"inputs: {type(module).__name__}.forward takes no {name!r}, and its entries {list(value)} are inputs: "
                f"give them by name, run_train(**{name})."
            )


def check_required(module: nn.Module, names: Sequence[str], argument: str) -> None:
    """Raise ``ValueError`` for inputs without a default of ``module.forward`` that ``names`` lack."""
    missing = [name for name in required_inputs(module) if name not in names]
    if missing:
        raise ValueError(f"{argument}: {type(module).__name__}.forward needs {missing}, too. Give {argument} with it.")


def check_exact_names(given: Sequence[str], expected: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``given`` are exactly the ``input_names`` of the constructor."""
    missing = sorted(set(expected) - set(given))
    extra = sorted(set(given) - set(expected))
    if missing or extra:
        meant = _meant(extra, given, ForwardNames(tuple(expected), (), False), _SUGGESTED)
        raise ValueError(
            f"the pipeline was made with input_names={list(expected)}; missing: {missing or 'none'}, "
            f"extra: {extra or 'none'}{meant}. Give exactly those, or leave input_names out to allow any."
        )


def check_not_positional(module: nn.Module, values: Sequence[Any]) -> None:
    """Raise ``TypeError`` for positional inputs, with the names of ``module``'s own."""
    if not values:
        return
    taken = forward_names(module).parameters
    if len(values) == 1 and isinstance(values[0], Mapping):
        call, order = "**batch", ""
    else:
        shown = ", ".join(taken[:_NAMES_SHOWN]) + (", ..." if len(taken) > _NAMES_SHOWN else "")
        order = f"{type(module).__name__}.forward takes, in this order: {shown}. " if taken else ""
        call = ", ".join(f"{name}=..." for name in taken[: len(values)]) or "NAME=..."
    raise TypeError(
        "run_train and run_eval take the model's inputs by name, and were given "
        f"{counted(len(values), 'positional one')}. {order}Write run_train({call})."
    )


def call_by_name(module: nn.Module, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Return, for a message, the arguments of ``run_train`` that replace the arguments of a call of ``module``."""
    taken = forward_names(module).parameters
    names = list(dict.fromkeys([*taken[: len(positional)], *named])) or list(taken[:1])
    return ", ".join(f"{name}=..." for name in names) or "**inputs"


def _closest(name: str, given: Sequence[str], taken: ForwardNames, similarity: float) -> str | None:
    """Return the name that ``name`` may have been meant for, among the ones not ``given``."""
    others = [other for other in taken.all if other not in given]
    words = name.lower().split("_")
    parts = (other for other in others if len(name) >= _PART and set(words) < set(other.split("_")))
    return closest(name.lower(), others, similarity) or next(parts, None)


def _meant(unknown: Sequence[str], given: Sequence[str], taken: ForwardNames, similarity: float) -> str:
    found = [meant for name in unknown if (meant := _closest(name, given, taken, similarity)) is not None]
    return f" (did you mean {', '.join(map(repr, dict.fromkeys(found)))}?)" if found else ""


def _mentioned(module: nn.Module) -> set[str]:
    """Names that a forward of ``module`` or of a module in it takes, or that the code of a forward or a method has.

    In the classes of frameworks only the code of ``forward`` counts.
    """
    names: set[str] = set()
    kinds: set[type] = set()
    for child in listings.modules(module):
        if "forward" in vars(child):
            names |= _names_of(child.forward)
        kinds |= set(type(child).__mro__)
    for kind in kinds - {object, nn.Module}:
        members = ["forward"] if is_framework(kind.__module__) else list(vars(kind))
        for member in members:
            names |= _names_of(vars(kind).get(member))
    return names


def _names_of(member: Any) -> set[str]:
    function = inspect.unwrap(member) if callable(member) else getattr(member, "__func__", None)
    code = getattr(function, "__code__", None)
    return set() if code is None else {*names_in(code), *code.co_varnames, *code.co_cellvars}
