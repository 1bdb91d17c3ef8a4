"""What is known of a module that was built without memory: the values that its tensors are to have."""

import hashlib
import weakref

import torch
from torch import nn

from nxdpp.initialization import replay
from nxdpp.initialization.tape import Tape


class Recording:
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

        Raises ValueError for a tensor that the recording does not know.
        """
        if not self.knows(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} was not made by the constructor that "
                f"deferred_init recorded"
            )
        return replay.compute(self._tape, self._tape.view(tensor)).to(device)


_recordings: weakref.WeakKeyDictionary[nn.Module, Recording] = weakref.WeakKeyDictionary()


def recording_of(module: nn.Module) -> Recording | None:
    """The recording that came with ``module``, or with a part of it, from ``deferred_init``; None without one.

    Raises ValueError where parts of it come from different calls.
    """
    found = {id(recording): recording for part in module.modules() if (recording := _recordings.get(part))}
    if len(found) > 1:
        raise ValueError("parts of the module come from several calls of deferred_init: build the whole in one call")
    return next(iter(found.values()), None)


def remember(recording: Recording, module: nn.Module) -> None:
    """Make ``recording`` what ``recording_of`` finds for ``module`` and for its parts, while those live."""
    for part in module.modules():
        _recordings[part] = recording
