"""Adapters of experts that are parameters (PEFT's ``target_parameters``) over shards train as PEFT in one process."""

from pathlib import Path
from typing import Any

import torch

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.adapted_models import ADAPTERS, adapted
from tests.support.run_ranks import run_ranks
from tests.support.whole_numbers import distance, state_of, whole

PARTS = 2
STEPS = 3
ROUNDING = 1e-5

Case = dict[str, Any]

CASES: tuple[Case, ...] = ({"adapters": ["default", "second"]}, {"resharding": True, "extra": "checkpoint"})


def model_of(case: Case, seed: int = 3) -> Any:
    """A Mixtral whose head is tied, with one adapter or two; all of them train."""
    model = adapted("lora of experts", seed)
    names = case.get("adapters", ["default"])
    for name in names[1:]:
        torch.manual_seed(seed)
        model.add_adapter(name, ADAPTERS["lora of experts"][1]())
    model.base_model.set_adapter(names)
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2 * PARTS, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2, eps=1e-4)


def in_one_process(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Losses, parameters and the last gradients of PEFT's training, which is saved to ``folder``."""
    model = model_of(case)
    optimizer = optimizer_of(model.parameters())
    numbers: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = {name: value.chunk(PARTS) for name, value in batch_of(step).items()}
        losses = [model(**{name: part[i] for name, part in parts.items()}).loss for i in range(PARTS)]
        (sum(losses) / PARTS).backward()
        numbers[f"loss {step}"] = sum(losses).detach() / PARTS
        optimizer.step()
    model.save_pretrained(folder)
    return numbers | state_of(_Listed(model))


class _Listed:
    """A model of one process, whose parameters are all on this rank."""

    def __init__(self, model: Any) -> None:
        self.local_named_parameters = model.named_parameters


def wrapped(case: Case, module: Any, shards: bool = True) -> Any:
    replicas = parallel_state.get_data_parallel_size()
    model = NxDPPModel(module, num_microbatches=PARTS // replicas, broadcast_and_average_loss=True)
    if case.get("extra") == "checkpoint":
        nxdpp.apply_checkpoint(model)
    if shards:
        nxdpp.fully_shard(model, reshard_after_forward=case.get("resharding"))
    return model


def train(rank: int, folder: Path) -> list[tuple[float, str]]:
    """For each case the greatest distance from one process; saved and loaded again, nothing differs."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    found = []
    for number, case in enumerate(CASES):
        module = model_of(case)
        model = wrapped(case, module)
        optimizer = optimizer_of(model.local_parameters())
        changes, known = model.part.changes, 0
        numbers: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            optimizer.zero_grad()
            part = {name: value.chunk(replicas)[replica] for name, value in batch_of(step).items()}
            numbers[f"loss {step}"] = model.run_train(**part)
            optimizer.step()
            # A step registers a parameter anew, and is steady.
            known, before = changes.look(), known
        assert known == before
        state = state_of(model)
        own = folder / str(number)
        theirs = in_one_process(case, own / f"theirs {rank}")
        found.append(distance(numbers | state, {name: theirs[name] for name in numbers | state}, 1e-3))
        nxdpp.save_pretrained(model, own / "adapters")
        nxdpp.save_checkpoint(own / "checkpoints", tag="last", model=model, optimizer=optimizer)
        if rank == 0:
            for path in (".", "second")[: len(case.get("adapters", "1"))]:
                saved, expected = tensors_in(own / "adapters" / path), tensors_in(own / "theirs 0" / path)
                found.append(distance(saved, expected, 1e-3))
        check_loaded(case, own, {name: value for name, value in state.items() if "gradient" not in name})
    return found


def check_loaded(case: Case, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Fail unless loads of the adapters, and of the checkpoint without shards, bring back the parameters."""
    module = model_of(case, seed=4)
    model = wrapped(case, module)
    for name in case.get("adapters", ["default"]):
        module.set_adapter(name)
        nxdpp.load_pretrained(model, folder / "adapters" / ("" if name == "default" else name))
    other = wrapped(case, model_of(case, seed=5), shards=False)
    nxdpp.load_checkpoint(folder / "checkpoints", tag="last", model=other)
    for loaded in (model, other):
        now = {name: whole(each.detach()) for name, each in loaded.local_named_parameters()}
        wrong = [name for name, tensor in now.items() if not torch.equal(tensor, expected[name])]
        assert not wrong, wrong


def test_targeted_experts_train_over_shards_as_in_one_process(tmp_path: Path) -> None:
    for rank in run_ranks(2, train, tmp_path):
        assert max(rank)[0] <= ROUNDING, max(rank)
