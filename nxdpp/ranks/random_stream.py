"""Random numbers of a rank's stages, apart from those of the program.

::

    generators of the program    shuffles, noise, augmentation      alike on all ranks, whatever a stage draws
    stream of a rank             dropout, a VAE's noise, in steps   other numbers on other stages and replicas

In a step torch's generators of the CPU and of the rank's device are seeded by a hash of their states, of the pipeline
rank and of the replica. Afterwards they are where the program left them. If a stage of any replica has drawn in the
first step of a kind, the CPU's moves by one number in all of that kind, so that the next one has other seeds; otherwise
it stays, as in one process whose layers draw nothing. Kinds are training and evaluation, with the model in training
mode or not. So one seed gives one training, and the ranks of a tensor group draw alike.

A layer that draws first in a later step moves no generator: ranks would have to tell each other in each step. Its rank
counts such steps, which gives each its seed; a checkpoint has this count, and the kinds. So it is with evaluations over
several replicas, of which each may make its own. With one stage and one replica the stage draws from the generators of
the program, as in one process. Python's, NumPy's and those of devices other than CUDA are left to layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nxdpp.devices.device import Device

_cpu = torch.default_generator


@dataclass
class StreamState:
    """State from which the streams of a model's later steps follow, besides the generators; a checkpoint has it.

    Attributes:
        unmoved: the steps in which a stage of this rank drew, and the program's generators did not move.
        moves: for each kind of step whether the CPU's generator moves after it, equal on all ranks.
    """

    unmoved: int = 0
    moves: dict[str, bool] = field(default_factory=dict)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over the fields of another state."""
        self.unmoved, self.moves = saved["unmoved"], dict(saved["moves"])


_states: WeakKeyDictionary[nn.Module, StreamState] = WeakKeyDictionary()


def stream_state_of(module: nn.Module) -> StreamState:
    """Return the state of the streams of the model of which a rank has ``module``."""
    return _states.setdefault(module, StreamState())


class RandomStream:
    """The random numbers of one step, from ``begin`` to ``end``.

    Args:
        device: of the stages.
        place: the pipeline rank and the number of the replica.
        kind: of the step, equal on all ranks.
        state: of the model.

    Attributes:
        moves: whether the CPU's generator moves after a step of this kind; ``None`` in the first one.
        has_drawn: whether a generator has moved from ``begin`` to ``end``. It is known unless ``moves``.
        digest: 64 bits, a hash of the generators of the program.
    """

    has_drawn = False
    _seeded = b"", b""

    def __init__(self, device: Device, place: tuple[int, int], kind: str, state: StreamState) -> None:
        self._device, self._place, self._kind, self._state = device, place, kind, state
        self._program, self._of_device, self.digest = _generators(device)
        self.moves = state.moves.get(kind)

    @property
    def compared(self) -> int:
        """Number that all ranks of a tensor group must have: ``digest``, or 0 if no layer has drawn so far."""
        return self.digest if self.moves or self._state.unmoved else 0

    def begin(self) -> None:
        """Draw from the stream from now on."""
        seed = hash((self.digest, self._state.unmoved, *self._place)) % 2**63
        self._seeded = _cpu.manual_seed(seed).get_state().numpy().tobytes(), self._device.seeded_state(seed)
        if self._of_device:
            self._device.set_random_state(self._seeded[1])

    def end(self) -> None:
        """Draw from the generators of the program again."""
        try:
            if not self.moves:
                of_device = self._device.random_state() if self._of_device else b""
                self.has_drawn = (_cpu.get_state().numpy().tobytes(), of_device) != self._seeded
                self._state.unmoved += self.has_drawn and self.moves is not None
        finally:
            _cpu.set_state(self._program)
            if self._of_device:
                self._device.set_random_state(self._of_device)
        if self.moves:
            _move()

    def settle(self, moves: bool) -> None:
        """Decide, after the first step of a kind, whether the CPU's generator moves after those of this kind."""
        self._state.moves[self._kind] = moves
        if moves:
            _move()
        else:
            self._state.unmoved += self.has_drawn


class ProgramNumbers:
    """The generators of the program where layers of several tensor ranks draw from them: one stage of one replica.

    Attributes:
        compared: as of a ``RandomStream``.
    """

    compared = 0

    def __init__(self) -> None:
        self._before = 0
        self._has_drawn = False

    def begin(self, device: Device) -> None:
        """Begin a step whose stage is on ``device``."""
        *_, self._before = _generators(device)
        self.compared = self._before if self._has_drawn else 0

    def end(self, device: Device) -> None:
        """Note whether layers have drawn in the step."""
        self._has_drawn = self._has_drawn or _generators(device)[-1] != self._before


def _generators(device: Device) -> tuple[torch.Tensor, bytes, int]:
    """The states of the program's generators, of the CPU and of ``device``, and a hash of both."""
    # A lazy device draws in its graph, which a state set in each step would change.
    program, of_device = _cpu.get_state(), b"" if device.is_lazy else device.random_state()
    hashed = blake2b(program.numpy().data, digest_size=8, key=of_device[:64])
    return program, of_device, int.from_bytes(hashed.digest(), "little", signed=True)


def _move() -> None:
    torch.empty((), dtype=torch.int64, device="cpu").random_()
