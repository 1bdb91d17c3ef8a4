"""Random numbers of a rank's stages, apart from those of the program.

::

    generators of the program    shuffles, noise, augmentation      alike on all ranks, whatever a stage draws
    stream of a rank             dropout, a VAE's noise, in steps   other numbers on other stages and replicas

In a step torch's generators of the CPU and of the rank's device are seeded by a hash of their states, of the pipeline
rank and of the replica. Afterwards they are where the program left them. If a stage of the pipeline has drawn in the
first such step, the CPU's moves by one number in each, so that the next one has other seeds; otherwise it stays, as in
one process whose layers draw nothing. So one seed gives one training, a checkpoint needs no other state than the
program's, and the ranks of a tensor group draw alike. A layer that draws first in a later step, or in one replica, is
the exception: its rank counts these steps, in no checkpoint. With one stage and one replica the stage draws from the
generators of the program, as in one process. Python's, NumPy's and those of devices other than CUDA are left to layers.
"""

from hashlib import blake2b

import torch

from nxdpp.devices.device import Device

_cpu = torch.default_generator


class RandomStream:
    """The random numbers of one step, from ``begin`` to ``end``.

    Args:
        device: of the stages.
        place: the pipeline rank and the number of the replica.

    Attributes:
        digest: 64 bits, a hash of the generators of the program.
    """

    # Steps in which a stage of this rank was the first to draw: no other rank has moved its generator after them.
    _unexpected = 0

    def __init__(self, device: Device, place: tuple[int, int]) -> None:
        self._device, self._place = device, place
        self._seeded = b"", b""
        self._program = _cpu.get_state()
        # A lazy device draws in its graph, which a state set in each step would change.
        self._of_device = b"" if device.is_lazy else device.random_state()
        hashed = blake2b(self._program.numpy().data, digest_size=8, key=self._of_device[:64])
        self.digest = int.from_bytes(hashed.digest(), "little", signed=True)

    def begin(self) -> None:
        """Draw from the stream from now on."""
        seed = hash((self.digest, RandomStream._unexpected, *self._place)) % 2**63
        self._seeded = _cpu.manual_seed(seed).get_state().numpy().tobytes(), self._device.seeded_state(seed)
        if self._of_device:
            self._device.set_random_state(self._seeded[1])

    def has_drawn(self) -> bool:
        """Return whether a generator has moved since ``begin``."""
        of_device = self._device.random_state() if self._of_device else b""
        return (_cpu.get_state().numpy().tobytes(), of_device) != self._seeded

    def end(self, moves: bool) -> None:
        """Draw from the generators of the program again; with ``moves`` that of the CPU moves by one number."""
        try:
            RandomStream._unexpected += not moves and self.has_drawn()
        finally:
            _cpu.set_state(self._program)
            if self._of_device:
                self._device.set_random_state(self._of_device)
        if moves:
            torch.empty((), dtype=torch.int64, device="cpu").random_()
