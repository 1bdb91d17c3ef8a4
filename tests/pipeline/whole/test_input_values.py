"""Ranks of one pipeline that are given different batches raise an error; each remedy of the message is followed."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nxdpp import NxDPPModel, data_parallel_sampler, parallel_state
from nxdpp.agreement.fingerprint import fingerprint
from nxdpp.agreement.input_hash import InputHasher
from nxdpp.agreement.step_signature import StepSignature
from nxdpp.agreement.step_verifier import StepIdentity, StepVerifier
from tests.support.models import VOCABULARY, make
from tests.support.run_ranks import run_ranks

Loader = Callable[[TensorDataset], DataLoader[tuple[torch.Tensor, ...]]]


def rows(seed: int) -> TensorDataset:
    return TensorDataset(torch.randint(3, VOCABULARY, (16, 6), generator=torch.Generator().manual_seed(seed)))


def seed_of_the_rank(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(rows(7 + dist.get_rank()), batch_size=4)


def seed_of_the_replica(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(rows(7 + parallel_state.get_data_parallel_rank()), batch_size=4)


def unseeded_shuffle(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    # Each process of a real job begins with a seed of its own.
    torch.seed()
    return DataLoader(dataset, batch_size=4, shuffle=True)


def seeded_shuffle(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    torch.seed()
    return DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7))


def sampler_of_ranks(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def sampler_of_replicas(dataset: TensorDataset) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(dataset, batch_size=4, sampler=data_parallel_sampler(dataset))


HABITS: dict[Loader, Loader] = {
    seed_of_the_rank: seed_of_the_replica,
    unseeded_shuffle: seeded_shuffle,
    sampler_of_ranks: sampler_of_replicas,
}


def load(rank: int) -> list[str]:
    """The message of the verifier for each habit; then steps with each remedy, which raise nothing."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrapped = NxDPPModel(make("llama", layers=2), num_microbatches=2)
    verifier, hasher = StepVerifier(parallel_state.get_pipeline_control_group()), InputHasher("first")
    step = StepIdentity(fingerprint(["a step"]), StepSignature((), (False, torch.bfloat16), True))
    messages = []
    for habit, remedy in HABITS.items():
        (ids,) = next(iter(habit(rows(0))))
        inputs = hasher.of_step([{"input_ids": ids, "labels": ids}], is_first=True)
        try:
            verifier.check(step, step.digest, True, inputs)
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
        loader = remedy(rows(0))
        for _ in range(2):
            for (ids,) in loader:
                wrapped.run_train(input_ids=ids, labels=ids)
    return messages


def test_habits_of_data_parallel_programs_are_found_and_their_remedies_work() -> None:
    first, second, *last = run_ranks(4, load)
    assert first == second == [""] * len(HABITS)
    for found, previous, messages in ((2, 0, last[0]), (3, 1, last[1])):
        for message in messages:
            assert (
                f"pipeline rank 1 (rank {found}) was given other values of input_ids, labels than pipeline rank 0 "
                f"(rank {previous})." in message
            )
            for remedy in (
                "a seed of each rank (seed + rank): seed by parallel_state.get_data_parallel_rank()",
                "DataLoader(shuffle=True) without a seed: give it generator=torch.Generator().manual_seed(seed)",
                "DistributedSampler(dataset), which splits by ranks: use nxdpp.data_parallel_sampler(dataset)",
            ):
                assert remedy in message
