"""Random numbers under tensor parallelism, with NeuronX Distributed's names.

Ranks of one tensor group draw the same numbers from the default generator: for dropout outside of tensor-parallel
layers, whose activations are equal on all of them. Inside ``get_xla_rng_tracker().fork()`` each tensor rank draws
others, for activations that are divided over the ranks::

    model_parallel_xla_manual_seed(0)
    dropped = dropout(hidden)                     equal on all tensor ranks
    with get_xla_rng_tracker().fork():
        dropped = dropout(attention_scores)       another mask on each tensor rank
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nxdpp.devices.kinds import device_of
from nxdpp.parallel_layers import parallel_state

_MODEL_PARALLEL = "model-parallel-rng"
# Between the seed of the default generator and those of the tensor ranks, as in Megatron-LM.
_OFFSET = 2718

_State = tuple[torch.Tensor, bytes]


class XLARNGStatesTracker:
    """Named states of this rank's generators, each beside the default one."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, {}

    def get_states(self) -> dict[str, _State]:
        """Return the states by name: those of the CPU's and of the device's generator."""
        return dict(self._states)

    def set_states(self, states: dict[str, _State]) -> None:
        """Take over what ``get_states`` has returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that begins at ``seed``. Raises ``ValueError`` for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds.values():
            raise ValueError(
                f"a random state named {name!r}, or one with seed {seed}, was added before: call reset() first, or "
                f"give another name and seed."
            )
        before = _state()
        torch.manual_seed(seed)
        self._states[name], self._seeds[name] = _state(), seed
        _set_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state ``name`` in the block. Raises ``ValueError`` for one that was not added."""
        if name not in self._states:
            raise ValueError(
                f"there is no random state {name!r}: call model_parallel_xla_manual_seed(seed) or add({name!r}, seed)."
            )
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


_tracker = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """Return the tracker of this process; not collective."""
    return _tracker


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seed the default generators with ``seed``, and the tracker's with another seed on each tensor rank.

    Not collective; every rank gives the same ``seed``, before it builds the model: ``NxDPPModel`` compares initial
    weights. Call it after ``initialize_model_parallel``, in place of ``torch.manual_seed``. Raises ``RuntimeError``
    before that call.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _OFFSET + rank)


def _state() -> _State:
    return torch.get_rng_state(), device_of(parallel_state.local_device()).random_state()


def _set_state(state: _State) -> None:
    torch.set_rng_state(state[0])
    device_of(parallel_state.local_device()).set_random_state(state[1])
