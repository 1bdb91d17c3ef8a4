"""Record of a deferred module's constructor, from which each tensor of the module is materialised.

``deferred_init`` remembers the record for the module and its parts; ``record_of`` finds it.
"""

import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.ground.torch_names import VERSION
from nxdpp.initialization import replay
from nxdpp.initialization.parts import whole_of
from nxdpp.initialization.tape import Tape


class ConstructorRecord:
    """Materialises tensors that a recorded constructor made, in any order.

    Replicas compare ``origin``, a text with the seed and generator state of the constructor.
    """

    def __init__(self, tape: Tape, seed: int, generator_state: torch.Tensor) -> None:
        self._tape = tape
        digest = hashlib.blake2b(generator_state.numpy().tobytes(), digest_size=8).hexdigest()
        self.origin = f"torch.initial_seed() {seed}, state {digest} of its generator"

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a meta tensor that the recorded constructor made."""
        return tensor.is_meta and self._tape.number_of(tensor) is not None

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the constructor wrote to the storage of ``tensor``; False after a mere ``torch.empty``."""
        number = self._tape.number_of(tensor)
        return number is not None and self._tape.is_written(number)

    def materialise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new plain CPU tensor with the dtype, shape, strides and values of the eager constructor's tensor.

        The tensors from which it is computed are in memory meanwhile. Elements that the constructor left undefined are
        zero. The states of torch's generators do not change. Not collective.
        """
        assert self.knows(tensor), "the constructor made the tensor"
        return replay.compute(self._tape, self._tape.view(tensor))


@dataclass(frozen=True)
class _RecordedModule:
    """A recorded module with the identity and version of each of its tensors at the end of the constructor."""

    record: ConstructorRecord
    tensors: dict[str, tuple[int, int]]


_parts: weakref.WeakKeyDictionary[nn.Module, _RecordedModule] = weakref.WeakKeyDictionary()


def record_of(module: nn.Module) -> ConstructorRecord | None:
    """The record of ``module`` or of a part of it; None if ``deferred_init`` made none of them.

    Raises ``ValueError`` if parts of ``module`` come from different calls, ``RuntimeError`` if a meta tensor was
    replaced (``model.half()``) or written to since the constructor.
    """
    found = {name: part for name, each in module.named_modules() if (part := _parts.get(each)) is not None}
    if len({id(part.record) for part in found.values()}) > 1:
        raise ValueError("parts of the module come from several calls of deferred_init: build the whole in one call")
    for name, part in found.items():
        _check_unchanged(part, module.get_submodule(name), name)
    return next((part.record for part in found.values()), None)


def remember(record: ConstructorRecord, module: nn.Module) -> None:
    """Register ``record`` for ``module`` and its parts, as long as they exist."""
    for part in module.modules():
        tensors = {key: (id(tensor), VERSION.of(tensor)) for key, tensor in _own(part) if record.knows(tensor)}
        _parts[part] = _RecordedModule(record, tensors)


def _check_unchanged(part: _RecordedModule, module: nn.Module, name: str) -> None:
    for key, tensor in _own(module):
        if not tensor.is_meta or key not in part.tensors:
            continue
        identity, version = part.tensors[key]
        # A part was taken after the constructor; its whole is the recorded tensor.
        tensor = whole_of(tensor)
        written = id(tensor) == identity and VERSION.of(tensor) != version
        if written or not part.record.knows(tensor):
            raise RuntimeError(
                f"{f'{name}.{key}' if name else key} was {'written to' if written else 'replaced'} after "
                f"deferred_init, which records only the constructor: change it in the recorded function, as in "
                f"deferred_init(lambda: LlamaForCausalLM(config).to(torch.bfloat16))"
            )


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
