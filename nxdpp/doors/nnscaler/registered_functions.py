"""``register_op``: functions that are one node of a traced graph. nxdpp divides modules, and no single operations."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_registered: dict[int, Callable[..., Any]] = {}


def register_op(
    annotation: str | Callable[..., str],
    name: str | None = None,
    code_impl_pattern: str = "import",
    emit_fn: Callable[..., str] | None = None,
    transform_rules: tuple[Any, ...] | None = None,
    input_gen_fn: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator of functions that a trace does not enter.

    An autograd Function is one node in any case.

    Args:
        annotation, name, transform_rules, input_gen_fn: how nnScaler partitions and profiles the operation. They have
            no effect: operations are not divided.
        code_impl_pattern: ``"import"`` or ``"source"``. It has no effect: there is no generated code.
        emit_fn: ``None``.

    Raises:
        TypeError: for an annotation that is neither text nor a function, and for a decorated value that is no function.
        ValueError: for another ``code_impl_pattern``, for ``emit_fn``, which would write the code that runs, and for a
            decorated function of a class.
    """
    if not (isinstance(annotation, str) or callable(annotation)):
        raise TypeError(f"annotation must be text, such as 'a b, b c -> a c', or a function, not {annotation!r:.80}")
    if code_impl_pattern not in ("import", "source"):
        raise ValueError(f"code_impl_pattern must be 'import' or 'source', not {code_impl_pattern!r}")
    if emit_fn is not None:
        raise ValueError("emit_fn writes generated code, and nxdpp runs the function itself: leave it out")

    def register(function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"register_op takes a function, not {function!r:.80}")
        name = getattr(function, "__qualname__", "").rpartition("<locals>.")[2]
        if not isinstance(function, type) and "." in name:
            raise ValueError(
                f"{name} is of a class, and a trace finds registered functions in Python modules: make it a function "
                f"of a module"
            )
        if not isinstance(function, type):
            _registered[id(function)] = function
        return function

    return register


def registered_functions() -> tuple[Callable[..., Any], ...]:
    """Return the functions that were registered."""
    return tuple(_registered.values())
