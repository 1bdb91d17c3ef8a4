"""Steps of a small Llama on one rank: over nxdpp on the CPU or on XLA, or in a plain loop of one XLA process.

A step is forward and backward of all microbatches, the optimizer, and the loss as a number on each rank.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.in_turn.turns import Turns
from nxdpp import NxDPPModel, parallel_state
from nxdpp.devices import xla
from nxdpp.devices.device import Device
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.p2p.transport import Transport

FIRST = 2
"""Steps that compile, before the measured ones."""


class Size(NamedTuple):
    """A Llama and its batch: ``microbatches`` of shape ``(microbatch, length)``."""

    hidden: int = 256
    layers: int = 4
    vocabulary: int = 256
    microbatches: int = 8
    microbatch: int = 2
    length: int = 128


@dataclass
class Copies:
    """Copies of one step: their number, bytes and seconds."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, tensor: torch.Tensor, seconds: float) -> None:
        """Count one copy."""
        self.count += 1
        self.bytes += tensor.nbytes
        self.seconds += seconds


@dataclass
class Step:
    """One measured step of a rank.

    Attributes:
        seconds: from the common start to the end of this rank.
        processor: processor seconds of all threads.
        busy: share of the step in which the device computed.
        waiting: seconds in which the rank waited for messages.
        outwards: copies to the host; only of a step apart.
        inwards: copies of messages to the device.
    """

    seconds: float = 0.0
    processor: float = 0.0
    busy: float = float("nan")
    waiting: float = 0.0
    outwards: Copies = field(default_factory=Copies)
    inwards: Copies = field(default_factory=Copies)


@dataclass
class Rank:
    """Result of a rank.

    Attributes:
        losses: of all steps.
        first: the steps that compile.
        graphs: number of graphs that it compiled.
        compile_seconds: seconds that compiling them took.
        steps: the steps as they are.
        apart: steps in which each copy begins after the device has ended its work, and the rank waits for it.
    """

    losses: list[float]
    first: list[Step]
    graphs: int
    compile_seconds: float
    steps: list[Step]
    apart: list[Step]


def measure(rank: int, turns: Turns, size: Size, ranks: int, device: str, is_plain: bool) -> Rank:
    """Run a step at each turn: first steps that compile, then steps as they are and steps apart, in alternation."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    step = _plain_step(size) if is_plain else _pipeline_step(size, ranks, device)
    own = device_of(xla.start(rank, 1) if is_plain else parallel_state.local_device())
    measured: list[Step] = []
    losses: list[float] = []

    def turn(number: int) -> None:
        taken = Step()
        began = time.process_time()
        with ExitStack() as stack:
            if not is_plain:
                stack.enter_context(_watched(own, taken, is_apart=number >= FIRST and (number - FIRST) % 2 == 1))
            loss, taken.busy = step(number)
        taken.processor = time.process_time() - began
        losses.append(loss)
        measured.append(taken)

    seconds = turns.run(turn)
    for taken, wall in zip(measured, seconds, strict=True):
        taken.seconds = wall
    compiled = own.compiled()
    steps = (measured[:FIRST], measured[FIRST::2], measured[FIRST + 1 :: 2])
    return Rank(losses, steps[0], compiled.graphs, compiled.seconds, *steps[1:])


def _model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=4, max_position_embeddings=size.length, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _batch(size: Size, number: int) -> torch.Tensor:
    """Token ids ``(B, T)`` of step ``number``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(size.vocabulary, (size.microbatches * size.microbatch, size.length), generator=generator)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3)


def _pipeline_step(size: Size, ranks: int, device: str) -> Callable[[int], tuple[float, float]]:
    # Between its turns a rank waits outside of nxdpp.
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks, device=device)
    model = NxDPPModel(
        _model(size),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=size.microbatches,
        broadcast_and_average_loss=True,
    )
    model.move_model_to_device()
    optimizer = _optimizer(model.local_parameters())

    def step(number: int) -> tuple[float, float]:
        ids = _batch(size, number)
        loss = model.run_train(input_ids=ids, labels=ids)
        assert isinstance(loss, torch.Tensor)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), model.last_busy_share

    return step


def _plain_step(size: Size) -> Callable[[int], tuple[float, float]]:
    device = device_of(xla.start(0, 1))
    model: Any = _model(size)
    model.to(device.device)
    optimizer = _optimizer(model.parameters())

    def step(number: int) -> tuple[float, float]:
        losses = []
        for ids in _batch(size, number).to(device.device).chunk(size.microbatches):
            loss = model(input_ids=ids, labels=ids).loss / size.microbatches
            loss.backward()
            losses.append(loss.detach())
            device.submit()
        optimizer.step()
        optimizer.zero_grad()
        device.submit()
        return torch.stack(losses).sum().item(), float("nan")

    return step


@contextmanager
def _watched(own: Device, taken: Step, is_apart: bool) -> Iterator[None]:
    """Measure the waits for messages, the copies to the device and, in a step apart, the copies to the host."""
    kind = type(own)
    post_receive, to_host, from_host = Transport.post_receive, kind.to_host, kind.from_host

    def watched_receive(self: Transport, *arguments: Any, **keywords: Any) -> Callable[[], torch.Tensor]:
        wait = post_receive(self, *arguments, **keywords)

        def timed() -> torch.Tensor:
            before = taken.inwards.seconds
            received, seconds = _timed(wait)
            taken.waiting += seconds - (taken.inwards.seconds - before)
            return received

        return timed

    def copied_to_host(self: Device, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.synchronize()
        copy, seconds = _timed(lambda: to_host(self, tensor)())
        taken.outwards.add(tensor, seconds)
        return lambda: copy

    def copied_from_host(self: Device, tensor: torch.Tensor) -> torch.Tensor:
        copy, seconds = _timed(lambda: from_host(self, tensor))
        taken.inwards.add(tensor, seconds)
        return copy

    with ExitStack() as stack:
        stack.enter_context(patch.object(Transport, "post_receive", watched_receive))
        stack.enter_context(patch.object(kind, "from_host", copied_from_host))
        if is_apart:
            stack.enter_context(patch.object(kind, "to_host", copied_to_host))
        yield


def _timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
