"""Random numbers of a parameter that follow from the seed and its name, whatever else is initialised, and where.

With one stream for the whole model, what a parameter is drawn from depends on how much was drawn before it, and so on
which parameters a rank holds. Here each has its own::

    seed, "layers.3.mlp.weight"  ─▶ stream ─▶ normal_(weight)  ─▶ uniform_(weight)
    seed, "layers.3.mlp.bias"    ─▶ stream ─▶ uniform_(bias)
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxdpp.initialization.written_tensors import written_tensors


class NamedStreams(TorchDispatchMode):
    """While entered, random numbers on the CPU come from a stream of the tensor that they are written to.

    What is drawn into a tensor without a name (``torch.randn(...)`` that is copied later) comes from a stream of the
    module that is being initialised. When another module's turn begins, the streams of tensors begin anew: a tensor
    that several modules write has what the last of them draws, whether the others were asked on this rank or not. An
    explicit ``generator`` is left alone, and so are Python's and NumPy's random numbers. On exit the default generator
    is as it was.

    Args:
        seed: as ``torch.initial_seed()`` gives it.
        names: the named tensors, by name.
        guarded: tensors that nobody may change meanwhile; what is written to them is dropped.
    """

    def __init__(self, seed: int, names: Mapping[str, torch.Tensor], guarded: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = ""
        self._seed = seed
        self._names = {_key(tensor): name for name, tensor in names.items()}
        self._guarded = {_key(tensor) for tensor in guarded}
        self._states: dict[tuple[str, str], torch.Tensor] = {}
        self._written: set[int] = set()
        self._has_drawn = False

    def begin(self, module: str) -> None:
        """From now on the module of this name is being initialised."""
        self._module = module
        self._states = {stream: state for stream, state in self._states.items() if stream[0] == "module"}

    def guard(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on nobody may change ``tensors``, either."""
        self._guarded.update(map(_key, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        if any(_key(tensor) in self._guarded for tensor in written):
            return written[0] if len(func._schema.returns) == 1 else None
        self._written.update(map(_key, written))
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if not draws:
            return func(*args, **kwargs)
        return self._draw(self._stream(written), func, args, kwargs)

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to ``tensor``'s memory."""
        return _key(tensor) in self._written

    @property
    def has_drawn(self) -> bool:
        """Whether any stream was used."""
        return self._has_drawn

    def _stream(self, written: list[torch.Tensor]) -> tuple[str, str]:
        name = self._names.get(_key(written[0])) if written else None
        return ("module", self._module) if name is None else ("tensor", name)

    def _draw(self, stream: tuple[str, str], func: Any, args: Any, kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            if stream in self._states:
                torch.set_rng_state(self._states[stream])
            else:
                torch.default_generator.manual_seed(_stream_seed(self._seed, *stream))
            result = func(*args, **kwargs)
            self._states[stream] = torch.get_rng_state()
            self._has_drawn = True
        finally:
            torch.set_rng_state(before)
        return result


def _stream_seed(seed: int, kind: str, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {kind} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _key(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    key: int = tensor.untyped_storage()._cdata
    return key
