"""What is known of a module that was built without memory: the values that its tensors are to have."""

import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nxdpp.initialization import replay
from nxdpp.initialization.tape import Tape


class ConstructorRecord:
    """How to make each tensor that a constructor made, in any order, with the values that it would have.

    Attributes:
        origin: what random numbers the values are from, in words; the same where the values are the same.
    """

    def __init__(self, tape: Tape, seed: int, generator_state: torch.Tensor) -> None:
        self._tape = tape
        digest = hashlib.blake2b(generator_state.numpy().tobytes(), digest_size=8).hexdigest()
        self.origin = f"torch.initial_seed() {seed}, state {digest} of its generator"

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on the meta device and was made by the recorded constructor."""
        return tensor.is_meta and self._tape.number_of(tensor) is not None

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the constructor gave ``tensor``, or a part of its storage, any value; False after ``torch.empty``."""
        number = self._tape.number_of(tensor)
        return number is not None and self._tape.is_written(number)

    def materialise(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new plain tensor of the dtype, shape and strides of ``tensor``, with the values of the eager constructor.

        Meanwhile there is memory for it, and for what it was computed from. Elements that the constructor left
        undefined are zero. The state of torch's generators stays as it is. Not collective.

        Raises ValueError for a tensor that the record does not know.
        """
        if not self.knows(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} was not made by the constructor that "
                f"deferred_init recorded"
            )
        return replay.compute(self._tape, self._tape.view(tensor)).to(device)


@dataclass(frozen=True)
class _Part:
    """A recorded module, and which object each of its tensors was, in which version, when the constructor ended."""

    record: ConstructorRecord
    tensors: dict[str, tuple[int, int]]


_parts: weakref.WeakKeyDictionary[nn.Module, _Part] = weakref.WeakKeyDictionary()


def record_of(module: nn.Module) -> ConstructorRecord | None:
    """The record that came with ``module``, or with a part of it, from ``deferred_init``; None without one.

    Raises:
        ValueError: where parts of it come from different calls.
        RuntimeError: where a tensor that has no values yet was replaced (``model.half()``) or written to since.
    """
    found = {name: part for name, each in module.named_modules() if (part := _parts.get(each)) is not None}
    if len({id(part.record) for part in found.values()}) > 1:
        raise ValueError("parts of the module come from several calls of deferred_init: build the whole in one call")
    for name, part in found.items():
        _check_unchanged(part, module.get_submodule(name), name)
    return next((part.record for part in found.values()), None)


def remember(record: ConstructorRecord, module: nn.Module) -> None:
    """Make ``record`` what ``record_of`` finds for ``module`` and for its parts, while those live."""
    for part in module.modules():
        tensors = {key: (id(tensor), tensor._version) for key, tensor in _own(part) if record.knows(tensor)}
        _parts[part] = _Part(record, tensors)


def _check_unchanged(part: _Part, module: nn.Module, name: str) -> None:
    for key, tensor in _own(module):
        if not tensor.is_meta or key not in part.tensors:
            continue
        identity, version = part.tensors[key]
        written = id(tensor) == identity and tensor._version != version
        if written or not part.record.knows(tensor):
            raise RuntimeError(
                f"{f'{name}.{key}' if name else key} was {'written to' if written else 'replaced'} after "
                f"deferred_init, which has recorded the constructor only: do it there, in a function that is given in "
                f"its place, such as deferred_init(lambda: LlamaForCausalLM(config).to(torch.bfloat16))"
            )


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
