"""Ranks whose parts are not of the same model are found before their first step, and each remedy works."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.agreement.fingerprint import fingerprint
from nxdpp.agreement.step_signature import StepSignature
from nxdpp.agreement.step_verifier import StepIdentity, StepVerifier
from tests.support.run_ranks import run_ranks

SEED = "Give torch.manual_seed the same seed on every rank of a pipeline, before the model is built and wrapped."
SEEDS = (
    "  pipeline rank 0 (rank 0): torch.initial_seed() 5 when it wrapped the model\n"
    "  pipeline rank 1 (rank 1): torch.initial_seed() {}\n"
)


class Scaled(nn.Module):
    """A module with a number that its code reads, and one that names its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.rank = self.unread = 0
        self.verbose = self.rank_is_verbose = False
        self.calls: list[str] = []

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.verbose or self.rank_is_verbose or self.is_first:
            self.calls.append("forward")
        return self.scaled(hidden) if self.rank >= 0 else hidden

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class Model(nn.Module):
    """Two layers, and an embedding that is tied to the head."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.block = Scaled()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.block(hidden)
        return {"loss": self.head(hidden).square().mean()}


def wrap(seed: int, ties: bool = False, cuts: tuple[str, ...] = ("layers.0",), **attributes: float) -> NxDPPModel:
    torch.manual_seed(seed)
    model = Model(ties)
    for name, value in attributes.items():
        setattr(model.block, name, value)
    return NxDPPModel(model, nn.Linear, pipeline_cuts=cuts, leaf_module_cls=[Scaled])


def other_seed(rank: int) -> NxDPPModel:
    return wrap(5 + rank)


def other_seed_that_is_loaded_over(rank: int) -> NxDPPModel:
    wrapped = wrap(5 + rank)
    wrapped.load_state_dict({name: torch.ones_like(value) for name, value in wrapped.state_dict().items()})
    return wrapped


def other_copy(rank: int) -> NxDPPModel:
    wrapped = wrap(5, ties=True)
    if rank == 1:
        with torch.no_grad():
            wrapped.get_parameter("head.weight").add_(1)
    return wrapped


def other_copy_that_is_moved(rank: int) -> NxDPPModel:
    wrapped = other_copy(rank)
    wrapped.move_model_to_device()
    return wrapped


def frozen_copy(rank: int) -> NxDPPModel:
    wrapped = wrap(5, ties=True)
    wrapped.get_parameter("embed.weight").requires_grad_(rank == 1)
    return wrapped


def frozen_copy_by_the_remedy(rank: int) -> NxDPPModel:
    wrapped = frozen_copy(rank)
    wrapped.get_parameter("embed.weight").requires_grad_(False)
    return wrapped


def other_decay_of_a_copy(rank: int) -> NxDPPModel:
    wrapped = wrap(5, ties=True)
    groups = [{"params": [each], "weight_decay": rank / 2} for each in wrapped.parameters()]
    OPTIMIZERS.append(torch.optim.AdamW(groups, lr=1e-3))
    return wrapped


def same_decay_of_a_copy(rank: int) -> NxDPPModel:
    wrapped = wrap(5, ties=True)
    groups = [{"params": [each], "weight_decay": len(name)} for name, each in wrapped.named_parameters()]
    OPTIMIZERS.append(torch.optim.AdamW(groups, lr=1e-3))
    return wrapped


def double_on_one_rank(rank: int) -> NxDPPModel:
    wrapped = wrap(5)
    return wrapped.double() if rank == 1 else wrapped


def load_state_on_one_rank(rank: int) -> NxDPPModel:
    wrapped = wrap(5)
    if rank == 1:
        wrapped.load_state_dict({name: torch.ones_like(value) for name, value in wrapped.state_dict().items()})
    return wrapped


def load_state_on_one_rank_and_none_on_the_other(rank: int) -> NxDPPModel:
    wrapped = load_state_on_one_rank(rank)
    if rank == 0:
        wrapped.load_state_dict({}, strict=False)
    return wrapped


def other_attribute(rank: int) -> NxDPPModel:
    return wrap(5, scale=1.0 + rank)


def attributes_that_name_the_rank_or_are_not_read(rank: int) -> NxDPPModel:
    return wrap(5, rank=rank, rank_is_verbose=rank == 0, unread=rank)


OPTIMIZERS: list[torch.optim.Optimizer] = []

CASES: dict[Callable[[int], NxDPPModel], tuple[str, ...]] = {
    other_seed: (
        "pipeline rank 0 (rank 0) and pipeline rank 1 (rank 1) have built the model with different initial weights: "
        "3 of 3 differ, the first is embed.weight.\n",
        SEEDS.format(6),
        SEED,
        "nxdpp.load_pretrained(model, directory)",
    ),
    other_seed_that_is_loaded_over: (),
    other_copy: (
        "a tied weight has other values on pipeline rank 1 (rank 1) (head.weight) than on pipeline rank 0 (rank 0) "
        "(embed.weight).\n",
        SEEDS.format(5),
        "Call move_model_to_device() on every rank",
    ),
    other_copy_that_is_moved: (),
    frozen_copy: (
        "a tied weight is frozen on pipeline rank 0 (rank 0) (embed.weight) and trained on pipeline rank 1 (rank 1) "
        "(head.weight): the copies would go apart. ",
        "Write model.get_parameter('head.weight').requires_grad_(False) on every rank.",
    ),
    frozen_copy_by_the_remedy: (),
    other_decay_of_a_copy: (
        "a tied weight has other options of its optimizer on pipeline rank 1 (rank 1) (head.weight) than on pipeline "
        "rank 0 (rank 0) (embed.weight): the copies would go apart.\n",
        "weight_decay=0.5)\nMake the groups of the optimizer by the names of model.named_parameters()",
    ),
    same_decay_of_a_copy: (),
    double_on_one_rank: (
        "all weights of pipeline rank 1 (rank 1) were converted from torch.float32 to torch.float64 since it wrapped "
        "the model, and those of pipeline rank 0 (rank 0) were not converted.",
        "model.double()",
    ),
    load_state_on_one_rank: (
        "pipeline rank 1 (rank 1) has loaded a state dict, and pipeline rank 0 (rank 0) has not",
        "load_state_dict({}, strict=False)",
    ),
    load_state_on_one_rank_and_none_on_the_other: (),
    other_attribute: (
        "pipeline rank 0 (rank 0): block.scale = 1.0\n",
        "pipeline rank 1 (rank 1): block.scale = 2.0\n",
        "different attributes, which forward reads: 1 differ.",
    ),
    attributes_that_name_the_rank_or_are_not_read: (),
}


def compare(rank: int) -> list[str]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    messages, verifiers = [], []
    step = StepIdentity(fingerprint(["a step"]), StepSignature((), (False, torch.bfloat16), True))
    for build in CASES:
        wrapped = build(rank)
        # The last message of a verifier may be in flight.
        verifiers.append(StepVerifier(parallel_state.get_pipeline_control_group()))
        try:
            verifiers[-1].check(step, step.digest, True, values=wrapped.part.compared.present(wrapped.part.tied))
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
        if not CASES[build]:
            wrapped.run_train(ids=torch.arange(4).view(2, 2))
            # Runs 2, 4, 8 and so on compare the copies again.
            assert (wrapped.part.unverified_values() is not None) == wrapped.part.any_ties
            wrapped.run_train(ids=torch.arange(4).view(2, 2))
            assert wrapped.part.unverified_values() is None
    dist.barrier()
    return messages


def test_a_part_of_another_model_is_found_and_the_remedies_work() -> None:
    first, second = run_ranks(2, compare)
    assert first == [""] * len(CASES)
    for message, words in zip(second, CASES.values(), strict=True):
        assert bool(message) == bool(words), message
        for part in words:
            assert part in message


def train_replicas(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    wrapped = wrap(3 + rank, cuts=(), scale=1.0 + rank)
    try:
        wrapped.run_train(ids=torch.arange(4).view(2, 2))
    except RuntimeError as error:
        error.add_note(f"gradients: {sum(parameter.grad is not None for parameter in wrapped.local_parameters())}")
        raise


def test_replicas_of_other_seeds_are_found_before_the_first_step() -> None:
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, train_replicas)
    message = str(raised.value)
    assert "data-parallel rank 1 (rank 1) has other attributes than data-parallel rank 0 (rank 0)" in message
    assert "torch.initial_seed() was 3 and 4 when they wrapped the model." in message
    assert "data-parallel rank 1 (rank 1): attribute block.scale = 2.0" in message
    assert "gradients: 0" in message
