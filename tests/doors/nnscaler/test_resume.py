"""Steps equal half of them, a restart in new processes and the other half, to the bit."""

from pathlib import Path
from typing import Any

import torch

from nxdpp.nnscaler import (
    ComputeConfig,
    ParallelModule,
    build_optimizer,
    parallelize,
)
from tests.doors.nnscaler.trained_modules import Mlp, sample
from tests.support.run_ranks import run_ranks

HALF = 4
MICROBATCHES = 2
KINDS = {"plain": False, "ZeRO": True}


def _made(kind: str, seed: int, folder: Path) -> tuple[ParallelModule, Any]:
    """An MLP in two pipelines of two ranks, and its Adam. A restart takes the plan of before."""
    torch.manual_seed(seed)
    config = ComputeConfig(2, 4, use_end2end=True, use_zero=KINDS[kind], pas_config={"pipeline_nmicros": MICROBATCHES})
    module = parallelize(Mlp(), {"data": sample(0)}, "pp", config, gen_savedir=folder, instance_name=kind)
    assert isinstance(module, ParallelModule)
    return module, build_optimizer(module, torch.optim.Adam, lr=0.01)


def _train(rank: int, steps: range, module: ParallelModule, optimizer: Any) -> list[float]:
    losses = []
    for step in steps:
        samples = [sample(100 * step + 10 * (rank // 2) + number) for number in range(MICROBATCHES)]
        losses += [float(loss) for loss in module.train_step(samples)]
        losses.append(float(optimizer.clip_gnorm(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _whole_run(rank: int, folder: Path) -> dict[str, Any]:
    """Train, and save in the middle."""
    results = {}
    for kind in KINDS:
        module, optimizer = _made(kind, 0, folder)
        losses = _train(rank, range(HALF), module, optimizer)
        torch.save((module.state_dict(), optimizer.state_dict()), folder / f"{kind} {rank}.pt")
        losses += _train(rank, range(HALF, 2 * HALF), module, optimizer)
        results[kind] = losses, module.state_dict(), optimizer.state_dict()
    return results


def _resumed_runs(rank: int, folder: Path) -> dict[str, Any]:
    results = {}
    for kind in KINDS:
        module, optimizer = _made(kind, 5, folder)
        states = torch.load(folder / f"{kind} {rank}.pt", weights_only=True)
        module.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        results[kind] = (
            _train(rank, range(HALF, 2 * HALF), module, optimizer),
            module.state_dict(),
            optimizer.state_dict(),
        )
    return results


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for part in parts for tensor in _tensors(part)]


def test_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(4, _whole_run, tmp_path)
    resumed = run_ranks(4, _resumed_runs, tmp_path)
    for rank in range(4):
        for kind, (losses, *states) in resumed[rank].items():
            expected_losses, *expected = whole[rank][kind]
            assert losses == expected_losses[len(expected_losses) // 2 :]
            found, wanted = _tensors(states), _tensors(expected)
            assert len(found) == len(wanted) >= 5
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    # Replicas train on other samples, and have the same parameters.
    assert whole[0]["plain"][0] != whole[2]["plain"][0]
    for one, other in zip(_tensors(whole[0]["plain"][1]), _tensors(whole[2]["ZeRO"][1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
