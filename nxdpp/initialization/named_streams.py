"""A random stream for each parameter, whose seed is a hash of the model's seed and the parameter's name.

With one stream for the whole model, a parameter's numbers would depend on the other parameters of its rank. With its
own stream a parameter gets the same numbers under any partition::

    seed, "layers.3.mlp.weight"  ─▶ stream ─▶ normal_(weight)  ─▶ uniform_(weight)
    seed, "layers.3.mlp.bias"    ─▶ stream ─▶ uniform_(bias)
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nxdpp.ground.torch_names import SCHEMA, STORAGE_ADDRESS
from nxdpp.initialization.tape import EnteredMode, written_tensors


class NamedStreams(EnteredMode):
    """Dispatch mode that draws random numbers on the CPU from the stream of the tensor that they are written to.

    Numbers for a tensor without a name (``torch.randn(...)``, copied later) come from a stream of the current module.
    Each module restarts the streams of the tensors that it writes. So a tensor of several modules has the numbers of
    the last one, whatever modules a rank skips. An explicit ``generator`` and the random numbers of Python and NumPy
    are not changed. The state of the default generator stays as it is. Writes to ``guarded`` tensors are dropped.
    ``has_drawn`` tells whether a random number was drawn from a stream.
    """

    def __init__(self, seed: int, names: Mapping[str, torch.Tensor], guarded: list[torch.Tensor]) -> None:
        super().__init__()
        self._module = ""
        self._seed = seed
        self._names = {_key(tensor): name for name, tensor in names.items()}
        self._guarded = {_key(tensor) for tensor in guarded}
        self._states: dict[tuple[str, str], torch.Tensor] = {}
        self._written: set[int] = set()
        self.has_drawn = False

    def begin(self, module: str) -> None:
        """Make ``module`` the name of the current module, which is initialised from now on."""
        self._module = module
        self._states = {stream: state for stream, state in self._states.items() if stream[0] == "module"}

    def guard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drop writes to ``tensors`` from now on."""
        self._guarded.update(map(_key, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        if any(_key(tensor) in self._guarded for tensor in written):
            return written[0] if len(SCHEMA.of(func).returns) == 1 else None
        self._written.update(map(_key, written))
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if not draws:
            return func(*args, **kwargs)
        name = self.name_of(written[0]) if written else None
        return self._draw(("module", self._module) if name is None else ("tensor", name), func, args, kwargs)

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Return whether an operation has written to the memory of ``tensor``."""
        return _key(tensor) in self._written

    def name(self, tensor: torch.Tensor, name: str | None) -> str | None:
        """Give ``tensor`` a name, or take it away for ``None``; return the name that it had."""
        before = self._names.pop(_key(tensor), None)
        if name is not None:
            self._names[_key(tensor)] = name
        return before

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of ``tensor``, if it has one."""
        return self._names.get(_key(tensor))

    def _draw(self, stream: tuple[str, str], func: Any, args: Any, kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            if stream in self._states:
                torch.set_rng_state(self._states[stream])
            else:
                torch.default_generator.manual_seed(_stream_seed(self._seed, *stream))
            result = func(*args, **kwargs)
            self._states[stream] = torch.get_rng_state()
            self.has_drawn = True
        finally:
            torch.set_rng_state(before)
        return result


@contextmanager
def drawn_as(temporary: torch.Tensor, tensor: torch.Tensor) -> Iterator[None]:
    """Draw numbers for ``temporary`` from the stream of ``tensor``, to which they are copied later.

    A module that has a part of a tensor draws the whole tensor this way, a piece at a time. Without named streams it
    does nothing.
    """
    streams = NamedStreams.entered()
    before = [mode.name(temporary, mode.name_of(tensor)) for mode in streams]
    try:
        yield
    finally:
        for mode, name in zip(streams, before, strict=True):
            mode.name(temporary, name)


def _stream_seed(seed: int, kind: str, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {kind} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _key(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage, the same for all its views."""
    key: int = STORAGE_ADDRESS.of(tensor.untyped_storage())
    return key
