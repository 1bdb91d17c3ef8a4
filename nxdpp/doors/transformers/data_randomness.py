"""Random numbers of data sets, samplers and collators: a stream of their own, equal on all ranks.

Layers may draw from the generators of Python and NumPy, and move those of one rank. A collator that also draws, to mask
tokens for example, would make a different batch on each rank of a pipeline::

    generators of a rank      layers
    DataRandomness            batches: from the states of rank 0 at the first batch
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from nxdpp.doors.random_states import States, random_states, set_random_states
from nxdpp.ranks.group_values import from_rank_0


class DataRandomness:
    """The stream of random numbers that batches are made with.

    A training or an evaluation continues the stream of the one before. A generator that the program has changed in
    between, such as by a seed, begins anew from its state on rank 0.

    Attributes:
        stream: the states of the stream; ``None`` before the first batch. A checkpoint holds them.
        order: the states that the order of the training's epoch was drawn from. A checkpoint holds them.
    """

    def __init__(self) -> None:
        self.order: States | None = None
        self._resumed_order: States | None = None
        self.stream: States | None = None
        self._at_end: States | None = None
        self._calls = 0
        self._has_begun = False

    def resume(self, stream: States, order: States | None) -> None:
        """Continue with the ``stream`` and the ``order`` of a checkpoint; every rank calls it."""
        self.stream, self._resumed_order = stream, order
        self._has_begun = True

    def begin_epoch(self) -> None:
        """Draw a new order next: the checkpoint was at the end of an epoch."""
        self._resumed_order = None

    @contextmanager
    def drawing_order(self) -> Iterator[None]:
        """Draw an order in the block, in ``fetching()``: again that of the epoch in which a training resumes."""
        if self._calls > 1:
            # That of an evaluation inside of the training.
            yield
            return
        resumed, self._resumed_order = self._resumed_order, None
        if resumed is not None:
            set_random_states(resumed)
        self.order = random_states()
        yield
        if resumed is not None:
            assert self.stream is not None
            set_random_states(self.stream)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Mark a training or an evaluation; an evaluation may run inside a training."""
        if not self._calls:
            self._has_begun = False
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._at_end = random_states()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Draw from the stream in the block, which reads batches; the first block of a call is collective."""
        if dist.get_world_size() == 1:
            yield
            return
        own = random_states()
        if not self._has_begun:
            self._begin(own)
        assert self.stream is not None
        set_random_states(self.stream)
        try:
            yield
        finally:
            self.stream = random_states()
            set_random_states(own)

    def _begin(self, own: States) -> None:
        known, at_end = self.stream or own, self._at_end or own
        is_first = self.stream is None
        begun = [state if is_first or state != end else None for state, end in zip(own, at_end, strict=True)]
        begun = from_rank_0(begun)
        self.stream = tuple(state or old for state, old in zip(begun, known, strict=True))
        self._has_begun = True
