"""Sampler of a data set's parts for the data-parallel replicas.

::

    8 samples, 2 replicas of 2 stages     replica 0 (both stages): 5 0 3 6     replica 1 (both stages): 2 7 1 4
"""

from collections.abc import Sized
from typing import TypeVar

from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from nxdpp.counted import counted
from nxdpp.ranks.rank_getters import get_data_parallel_rank, get_data_parallel_size

T = TypeVar("T")


def data_parallel_sampler(
    dataset: Dataset[T], shuffle: bool = True, seed: int = 0, drop_last: bool = True
) -> DistributedSampler[T]:
    """Return a sampler that gives this rank's replica its part of ``dataset``; not collective.

    All ranks of a replica, its stages and tensor-parallel ranks, get the same samples, as ``run_train`` needs. Replicas
    get disjoint parts of one size. Every rank calls it with the same arguments. ``DataLoader(dataset, batch_size,
    sampler=..., drop_last=True)`` takes it; ``batch_size`` is one replica's, a multiple of ``num_microbatches``.
    ``sampler.set_epoch(epoch)`` before each epoch gives a different order.

    Args:
        dataset: a data set of a known length: it has ``__len__`` and ``__getitem__``.
        shuffle: take the samples in an order drawn from ``seed`` and the epoch; ``False`` keeps their order.
        seed: seed of that order. Global random generators do not matter, and stay as they are.
        drop_last: leave out the last ``len(dataset) % replicas`` samples of the order, fewer than there are replicas.
            ``False`` gives some samples to two replicas instead, and a mean then counts them twice.

    Raises:
        RuntimeError: before ``initialize_model_parallel``.
        TypeError: for a stream or a data set without a length, and for arguments of a wrong type.
        ValueError: for fewer samples than replicas.
    """
    replica, replicas = get_data_parallel_rank(), get_data_parallel_size()
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True or False.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} must be a whole number, the same on every rank.")
    # A stream may report a length, but has no samples by index.
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not isinstance(dataset, Sized):
        raise TypeError(
            f"a {type(dataset).__name__} has no {'samples by index' if is_stream else 'length'}, and a sampler cannot "
            f"divide it. Divide the stream itself: itertools.islice(stream, parallel_state.get_data_parallel_rank(), "
            f"None, parallel_state.get_data_parallel_size()), here {replica} and {replicas}."
        )
    samples = len(dataset)
    if samples < replicas:
        raise ValueError(
            f"the data set has {counted(samples, 'sample')} for {counted(replicas, 'data-parallel replica')}, and each "
            "needs one. Give a larger data set, or train on fewer processes."
        )
    return DistributedSampler(dataset, replicas, replica, shuffle, seed, drop_last)
