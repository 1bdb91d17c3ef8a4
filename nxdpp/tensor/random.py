"""Random numbers under tensor parallelism, with NeuronX Distributed's names.

Ranks of one tensor group draw the same numbers from the default generator: for dropout outside of tensor-parallel
layers, whose activations are equal on all of them. Inside ``get_xla_rng_tracker().fork()`` each tensor rank draws
different numbers, for activations that are divided over the ranks::

    model_parallel_xla_manual_seed(0)
    dropped = dropout(hidden)                     equal on all tensor ranks
    with get_xla_rng_tracker().fork():
        dropped = dropout(attention_scores)       a different mask on each tensor rank

A fork takes one number from the default generator, and begins at a seed of this number and the rank's own. So a layer
that ``torch.utils.checkpoint`` recomputes draws what it drew before: the checkpoint puts the default generator back,
and knows of no other state.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nxdpp.devices.kinds import device_of
from nxdpp.ranks import parallel_state

_MODEL_PARALLEL = "model-parallel-rng"
# Between the seeds of the default generator and of the tensor ranks, as in Megatron-LM.
_OFFSET = 2718

# Seeds are below.
_SEEDS = 2**63


class XLARNGStatesTracker:
    """Named seeds of this rank, each of which gives random numbers other than the default generator's."""

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget all names."""
        self._seeds = {}

    def get_states(self) -> dict[str, int]:
        """Return the seeds by name. The rest of the state is in the default generators."""
        return dict(self._seeds)

    def set_states(self, states: dict[str, int]) -> None:
        """Take over what ``get_states`` has returned."""
        self._seeds = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add ``name`` with ``seed``. Raises ``ValueError`` for a name or a seed that exists already."""
        if name in self._seeds or seed in self._seeds.values():
            raise ValueError(
                f"a random state named {name!r}, or one with seed {seed}, was added before: call reset() first, or "
                f"give another name and seed."
            )
        self._seeds[name] = seed

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw different numbers in the block, which follow from the default generator and the seed of ``name``.

        The default generator moves on by one number. Raises ``ValueError`` for a name that was not added.
        """
        if name not in self._seeds:
            raise ValueError(
                f"there is no random state {name!r}: call model_parallel_xla_manual_seed(seed) or add({name!r}, seed)."
            )
        number = int(torch.randint(_SEEDS - 1, (), device="cpu"))
        device = device_of(parallel_state.local_device())
        before = torch.get_rng_state(), device.random_state()
        _seed((self._seeds[name] + number) % _SEEDS)
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            device.set_random_state(before[1])


_tracker = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """Return the tracker of this process; not collective."""
    return _tracker


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seed the default generators with ``seed``, and the tracker's with a different seed on each tensor rank.

    Not collective; every rank gives the same ``seed``, before it builds the model: ``NxDPPModel`` compares initial
    weights. Call it after ``initialize_model_parallel``, in place of ``torch.manual_seed``. Raises ``RuntimeError``
    before that call.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    _tracker.reset()
    _seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _OFFSET + rank)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    device_of(parallel_state.local_device()).seed(number)
