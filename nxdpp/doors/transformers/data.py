"""Data loaders of a pipeline: all its ranks read the batches of their replica, in one order."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin, get_sampler, prepare_data_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import seed_worker

from nxdpp.doors.transformers.data_randomness import DataRandomness
from nxdpp.ground.transformers_names import DATA_LOADERS
from nxdpp.ranks import parallel_state
from nxdpp.ranks.group_values import from_rank_0


class FirstRanksOrder(Sampler[int]):
    """The order that ``sampler`` gives on rank 0, on all ranks; each iteration is collective over them.

    Such samplers draw from torch's generator, and the collators of replicas may have drawn different numbers from it.
    """

    def __init__(self, sampler: Sampler[int], randomness: DataRandomness) -> None:
        self.sampler = sampler
        self._randomness = randomness

    def __iter__(self) -> Iterator[int]:
        # All ranks draw the order, so that their generators stay equal.
        with self._randomness.drawing_order():
            order = list(self.sampler)
        return iter(from_rank_0(order))

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # samplers of map-style data sets have a length

    def set_epoch(self, epoch: int) -> None:
        """Give ``epoch`` to the sampler, if it takes one."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def replica_loader(
    accelerator: Accelerator, loader: DataLoader[Any], seed: int, randomness: DataRandomness
) -> DataLoader[Any]:
    """Return ``loader`` with the batches of this rank's replica, as accelerate divides them over processes.

    Batches stay in host memory: the labels are counted there. ``seed`` is for the workers, which draw alike on all
    ranks of a replica.
    """
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    if dist.get_world_size() > 1:
        _share_order(loader, accelerator.use_seedable_sampler, randomness)
        if loader.num_workers:
            loader.generator = torch.Generator().manual_seed(seed)
            if isinstance(loader.worker_init_fn, partial):
                loader.worker_init_fn = partial(seed_worker, num_workers=loader.num_workers, rank=replica)
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        num_processes=replicas,
        process_index=replica,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
    )
    DATA_LOADERS.of(accelerator).append(prepared)
    return prepared


def grouped_over_replicas(sampler: Any) -> Any:
    """Return ``sampler``; one that groups rows by length groups the rows of all replicas, as one process does."""
    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size *= parallel_state.get_data_parallel_size()
    return sampler


def check_divided(loader: Any) -> None:
    """Raise ``ValueError`` for a loader of a subclass that gives all rows to each replica; not collective."""
    replicas = parallel_state.get_data_parallel_size()
    is_prepared = not isinstance(loader, DataLoader) or isinstance(loader, DataLoaderStateMixin)
    if replicas == 1 or is_prepared or isinstance(loader.dataset, IterableDataset):
        return
    if not isinstance(get_sampler(loader), DistributedSampler):
        raise ValueError(
            f"a DataLoader of {type(loader.dataset).__name__} gives all its rows to each of {replicas} data-parallel "
            f"replicas. Return self.accelerator.prepare(loader) from get_train_dataloader and get_eval_dataloader."
        )


def _share_order(loader: DataLoader[Any], is_seedable: bool, randomness: DataRandomness) -> None:
    """Take the order of a sampler without a seed from rank 0."""
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return
    sampler = batches.sampler
    has_seed = isinstance(sampler, RandomSampler) and is_seedable
    if isinstance(sampler, Sampler) and not has_seed and not isinstance(sampler, SequentialSampler):
        batches.sampler = FirstRanksOrder(sampler, randomness)
