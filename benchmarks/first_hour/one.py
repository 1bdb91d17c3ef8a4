"""One rank over the device's backend, next to plain torch on the same device; and the waits of the host in a step."""

import copy
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

import nxdpp
from benchmarks.first_hour.place import Found, Rank, apart
from benchmarks.first_hour.waits import host_waits
from nxdpp import NxDPPModel, parallel_state
from nxdpp.optimizer import Zero1Optimizer

LAYERS, ROWS, MICROBATCHES = 4, 8, 4
STEPS = 5
"""Waits are counted in the last one: recomputations are compared in calls 1, 2, 4, 8 and 16 of a layer, so until 4."""
_RATE, _NORM = 0.1, 0.5


def run(rank: Rank, case: str) -> Found:
    """Run a case; its numbers are those of plain torch, or it has a problem."""
    device = rank.begin()
    try:
        way = WAYS.get(case)
        return OTHERS[case](rank, device) if way is None else _compared(rank, device, way)
    finally:
        parallel_state.destroy_model_parallel()


class Way(NamedTuple):
    """Way in which a case trains.

    Attributes:
        prepare: changes the wrapped model, which is on the device.
        dtype: dtype of autocast.
        scales: scale the loss.
        clips: clip the gradients.
        zero1: shard the state of the optimizer over the replicas, of which there is one.
        allowed: largest difference of losses from plain torch, relative.
    """

    prepare: Callable[[NxDPPModel, Rank], object] = lambda model, rank: None
    dtype: torch.dtype | None = None
    scales: bool = False
    clips: bool = False
    zero1: bool = False
    allowed: float = 0.0


def _compile(model: NxDPPModel, rank: Rank) -> None:
    nxdpp.apply_compile(model, backend="aot_eager" if rank.place.dry else "inductor")


WAYS = {
    "float32": Way(),
    "autocast to bfloat16": Way(dtype=torch.bfloat16, allowed=1e-3),
    "autocast to float16, scaled": Way(dtype=torch.float16, scales=True, allowed=1e-3),
    "clipped": Way(clips=True, allowed=1e-6),
    "shards": Way(lambda model, rank: nxdpp.fully_shard(model), allowed=1e-5),
    "shards, gathered for each microbatch": Way(
        lambda model, rank: nxdpp.fully_shard(model, reshard_after_forward=True), allowed=1e-5
    ),
    "ZeRO-1": Way(zero1=True, allowed=1e-6),
    "recomputed": Way(lambda model, rank: nxdpp.apply_checkpoint(model)),
    "compiled": Way(_compile, allowed=1e-3),
}


def _compared(rank: Rank, device: torch.device, way: Way) -> Found:
    ids = rank.place.ids(ROWS)
    expected = _plain(rank.place.llama(LAYERS).to(device), ids.to(device), way)
    losses, waits = _ours(rank, device, ids, way)
    difference = apart(torch.tensor(losses), torch.tensor(expected))
    problems = []
    if difference > way.allowed:
        problems.append(f"losses {losses}, and {expected} of plain torch: {difference:.1e} apart")
    if waits:
        problems.append(f"the host waits for the device in a steady step: {waits}")
    return Found({"apart": difference, "losses": losses, "host_waits": waits}, "; ".join(problems))


def _autocast(device: torch.device, way: Way) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=way.dtype, enabled=way.dtype is not None)


def _plain(model: nn.Module, ids: torch.Tensor, way: Way) -> list[float]:
    """Losses of steps of a loop without nxdpp."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    scaler = torch.amp.GradScaler(ids.device.type, enabled=way.scales)
    losses = []
    for _ in range(STEPS):
        total = torch.zeros((), device=ids.device)
        for part in ids.chunk(MICROBATCHES):
            with _autocast(ids.device, way):
                loss = model(input_ids=part, labels=part).loss / MICROBATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        if way.clips:
            nn.utils.clip_grad_norm_(model.parameters(), _NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def _ours(rank: Rank, device: torch.device, ids: torch.Tensor, way: Way) -> tuple[list[float], dict[str, int] | None]:
    """Losses of steps, and the waits of the host in the last call of ``run_train``."""
    scaler = nxdpp.GradScaler() if way.scales else None
    model = _wrapped(rank, grad_scaler=scaler, use_zero1_optimizer=way.zero1)
    way.prepare(model, rank)
    optimizer: torch.optim.Optimizer
    if way.zero1:
        optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, grad_clipping=False, lr=_RATE)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    losses = []
    for _ in range(STEPS):
        with host_waits(device.type) as waits, _autocast(device, way):
            loss = model.run_train(input_ids=ids, labels=ids)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if way.clips:
            model.clip_grad_norm_(_NORM)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert isinstance(loss, torch.Tensor), "the loss is broadcast"
        losses.append(float(loss))
    return losses, waits


def _wrapped(rank: Rank, **settings: Any) -> NxDPPModel:
    model = NxDPPModel(
        rank.place.llama(LAYERS), num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **settings
    )
    model.move_model_to_device()
    return model


def _checkpoint(rank: Rank, device: torch.device, in_background: bool = False) -> Found:
    """Save, train on, load; in the background the values are those of the call, though steps follow."""
    model, ids = _wrapped(rank), rank.place.ids(ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            model.run_train(input_ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad()

    train(1)
    with tempfile.TemporaryDirectory() as folder:
        before = copy.deepcopy({name: value.detach() for name, value in model.local_named_parameters()})
        nxdpp.save_checkpoint(folder, tag="1", model=model, optimizer=optimizer, async_save=in_background)
        train(2)
        nxdpp.load_checkpoint(folder, tag="1", model=model, optimizer=optimizer)
    different = [name for name, value in model.local_named_parameters() if not torch.equal(value, before[name])]
    return Found({"values": len(before)}, f"a checkpoint has other values of {different[:4]}" if different else "")


def _generate(rank: Rank, device: torch.device) -> Found:
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = rank.place.ids(2)[:, :8].to(device)
    plain = rank.place.llama(LAYERS, use_cache=True).to(device)
    ours = NxDPPModel(copy.deepcopy(plain).cpu(), num_microbatches=1)
    ours.move_model_to_device()
    found, expected = ours.generate(input_ids=ids, **given), plain.generate(input_ids=ids, **given)
    equal = torch.equal(found, expected)
    return Found({"tokens": found.tolist()}, "" if equal else f"tokens {found.tolist()}, and {expected.tolist()}")


OTHERS: dict[str, Callable[[Rank, torch.device], Found]] = {
    "checkpoint": _checkpoint,
    "checkpoint in the background": lambda rank, device: _checkpoint(rank, device, in_background=True),
    "generate": _generate,
}
CASES = [*WAYS, *OTHERS]
# Shards gather and reduce in streams of their own, and a save copies behind the steps.
WITH_SEVERAL_STREAMS = ["float32", "shards", "shards, gathered for each microbatch", "checkpoint in the background"]
