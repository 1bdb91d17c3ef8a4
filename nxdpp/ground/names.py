"""Private names of other libraries: found at their first use, and refused by name where they are gone."""

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Any


class NameGoneError(RuntimeError):
    """The installed version of a library has no longer a private name that a feature needs."""


class PrivateName:
    """A function, class or module that a library does not promise, such as ``torch._C._len_torch_dispatch_stack``.

    Args:
        path: the name with its module.
        use: what nxdpp does with it, after "nxdpp"; the first words of a sentence for users.
    """

    def __init__(self, path: str, use: str) -> None:
        self.path = path
        self.use = use

    @cached_property
    def found(self) -> Any:
        """The object. Raises ``NameGoneError`` where the installed version does not have it."""
        parts = self.path.split(".")
        try:
            return _resolved(parts)
        except (AttributeError, ImportError):
            raise self.gone() from None

    @property
    def exists(self) -> bool:
        """``True`` if the installed version has the name."""
        try:
            return self.found is not None
        except NameGoneError:
            return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self.found(*args, **kwargs)

    def replace(self, value: Any) -> None:
        """Put ``value`` in its place. ``found`` is what was there before, if asked before."""
        *owner, name = self.path.split(".")
        setattr(_resolved(owner), name, value)

    def gone(self) -> NameGoneError:
        """The error of a feature that needs the name."""
        library = self.path.partition(".")[0]
        return NameGoneError(
            f"{library} {version(library)} has no {self.path}, with which nxdpp {self.use}. This is refused with "
            f"this version, and all else works; pip install nxdpp takes a version of {library} that has it"
        )


class PrivateAttribute(PrivateName):
    """An attribute of objects that a library does not promise, such as ``torch.nn.Module._parameters``.

    Attributes:
        of: a function that returns the attribute of an object.
    """

    def __init__(self, path: str, use: str) -> None:
        super().__init__(path, use)
        self.name = path.rpartition(".")[2]
        self.of: Callable[[Any], Any] = attrgetter(self.name)

    def set(self, owner: Any, value: Any) -> None:
        """Give ``owner`` the attribute."""
        setattr(owner, self.name, value)

    def held_by(self, owner: Any) -> bool:
        """Return whether ``owner`` has the attribute."""
        return hasattr(owner, self.name)


def _resolved(parts: Sequence[str]) -> Any:
    found: Any = import_module(parts[0])
    for position, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and hasattr(found, "__path__"):
            import_module(".".join(parts[:position]))
        found = getattr(found, part)
    return found
