"""Program of ``test_hosts``: trains over a pipeline, with a fast and a slow link between ranks.

Each rank of the last stage prints its losses, exactly, as ``losses [...]``.
"""

import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.p2p.transport import Transport

STEPS = 3
MICROBATCHES = 4
LINK_SECONDS = 0.02


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.linear(hidden).tanh()
        return hidden + change


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


def model_and_batches() -> tuple[Model, list[torch.Tensor]]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(3)
    return Model(), [torch.randn(8, 16, generator=generator) for _ in range(2 * STEPS)]


def losses_of_one_process() -> list[float]:
    """The losses of the unwrapped model."""
    model, batches = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        step = [model(part) / MICROBATCHES for part in batch.chunk(MICROBATCHES)]
        for loss in step:
            loss.backward()
        losses.append(torch.stack([loss.detach() for loss in step]).sum().item())
        optimizer.step()
    return losses


def delay_messages(seconds: float) -> None:
    """Let each tensor and each object arrive ``seconds`` later."""
    patch = pytest.MonkeyPatch()
    post_receive, receive_object = Transport.post_receive, Transport.receive_object

    def post_slow_receive(*args: object) -> Callable[[], torch.Tensor]:
        wait = post_receive(*args)  # type: ignore[arg-type]

        def wait_longer() -> torch.Tensor:
            received = wait()
            time.sleep(seconds)
            return received

        return wait_longer

    def receive_slow_object(*args: object) -> object:
        received = receive_object(*args)  # type: ignore[arg-type]
        time.sleep(seconds)
        return received

    patch.setattr(Transport, "post_receive", post_slow_receive)
    patch.setattr(Transport, "receive_object", receive_slow_object)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    module, batches = model_and_batches()
    model = NxDPPModel(module, transformer_layer_cls=Block, num_microbatches=MICROBATCHES)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
    losses = []
    for number, batch in enumerate(batches):
        if number == STEPS:
            delay_messages(LINK_SECONDS)
            model.refresh()  # a first step again, with its exchange of metadata
        began = time.monotonic()
        optimizer.zero_grad()
        loss = model.run_train(inputs=batch)
        optimizer.step()
        if number >= STEPS:
            assert time.monotonic() - began > LINK_SECONDS
        if isinstance(loss, torch.Tensor):
            losses.append(loss.item())
    if rank == world_size - 1:
        print(f"losses {losses}", flush=True)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
