"""Private names of other libraries: found at their first use, and refused by name where they are gone."""

import warnings
from functools import cached_property
from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name
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
        self.name = path.rpartition(".")[2]

    @cached_property
    def found(self) -> Any:
        """The object. Raises ``NameGoneError`` where the installed version does not have it."""
        try:
            return resolve_name(self.path)
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

    def replace(self, value: Any) -> Any:
        """Put ``value`` in the place of the object, and return what was there; ``found`` stays the library's own."""
        assert self.found is not None
        owner = resolve_name(self.path.rpartition(".")[0])
        before = getattr(owner, self.name)
        setattr(owner, self.name, value)
        return before

    def gone(self) -> NameGoneError:
        """The error of a feature that needs the name."""
        return NameGoneError(f"{self._lost()}. This is refused with this version, and all else works; {self._remedy()}")

    def warn_if_gone(self) -> bool:
        """Warn of a check of the user's program that is not made without the name. Returns whether it has gone."""
        if not self.exists:
            warnings.warn(f"{self._lost()}: with this version it does not; {self._remedy()}", stacklevel=2)
        return not self.exists

    def _lost(self) -> str:
        return f"{self._library} {version(self._library)} has no {self.path}, with which nxdpp {self.use}"

    def _remedy(self) -> str:
        return f"pip install nxdpp takes a version of {self._library} that has it"

    @property
    def _library(self) -> str:
        return self.path.partition(".")[0]


class PrivateAttribute(PrivateName):
    """An attribute of objects that a library does not promise, such as ``torch.nn.Module._call_impl``."""

    def of(self, owner: Any) -> Any:
        """Return the attribute of ``owner``. Raises ``NameGoneError`` where it has none."""
        try:
            return getattr(owner, self.name)
        except AttributeError:
            raise self.gone() from None

    def set(self, owner: Any, value: Any) -> None:
        """Give ``owner`` the attribute."""
        setattr(owner, self.name, value)

    def held_by(self, owner: Any) -> bool:
        """Return whether ``owner`` has the attribute."""
        return hasattr(owner, self.name)


class NeededAttribute(PrivateAttribute):
    """An attribute without which no step runs, such as ``torch.nn.Module._parameters``: ``of`` is C code."""

    def __init__(self, path: str, use: str) -> None:
        super().__init__(path, use)
        self.of = attrgetter(self.name)  # type: ignore[assignment, method-assign]  # most are read in every step
