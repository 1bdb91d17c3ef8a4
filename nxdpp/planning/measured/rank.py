"""Figures of one rank: speed of products and of the optimizer, seconds of an operation, of an action and of a link.

``python -m torch.distributed.run -m nxdpp.planning.measured.rank KIND AT_ONCE FILE`` writes the mean of all ranks. As
many measure at the same time as have cores of their own, as they compute in a step. Seconds of ranks that share a core
are those of a core of their own.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from nxdpp.devices import CUDA
from nxdpp.devices.collective_bytes import Kind, least_sent, least_steps
from nxdpp.devices.kinds import device_of
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.pipeline.p2p.layout import TensorLayout
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.planning.machine import Link
from nxdpp.planning.step_times import OPTIMIZER_PASSES
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.tensor.collectives import all_gather, reduce_scatter

_SECONDS = 0.2
_ACTIONS = 64
_MESSAGES = {"cpu": (2**16, 2**23), CUDA: (2**20, 2**28)}
_REPEATS = 60
# The large message takes at least this many times as long as the small one: less is noise.
_LONGER = 1.2
# Rows and widths of products as those of a layer.
_PRODUCTS = {"cpu": (256, 512, 1376), CUDA: (8192, 4096, 14336)}
_FLOAT = 4


class RankFigures:
    """Measurements on ``device`` by ``at_once`` ranks at a time."""

    def __init__(self, device: torch.device, at_once: int) -> None:
        self._device = device
        self._turns = -(-dist.get_world_size() // at_once)
        self._turn = dist.get_rank() // at_once
        self._rows, self._inner, self._outer = _PRODUCTS[device.type]

    def all(self) -> dict[str, float]:
        """Return all figures by name; collective over the world."""
        found: dict[str, float] = {}
        for turn in range(self._turns):
            dist.barrier()
            if turn == self._turn:
                found = {
                    "flops_2": self._flops(torch.bfloat16),
                    "flops_4": self._flops(torch.float32),
                    "bandwidth": self._optimizer_rate(),
                    "operation": self._operation(),
                }
        found["action"] = self._action()
        return found | (self._collectives() | self._messages() if dist.get_world_size() > 1 else {})

    def _flops(self, dtype: torch.dtype) -> float:
        """Return FLOPs a second of forward, input-gradient and weight-gradient of a product."""
        new = partial(torch.randn, device=self._device, dtype=dtype)
        x, weight, gradient = (
            new(self._rows, self._inner),
            new(self._outer, self._inner),
            new(self._rows, self._outer),
        )
        products = (
            partial(torch.matmul, x, weight.t()),
            partial(torch.matmul, gradient, weight),
            partial(torch.matmul, gradient.t(), x),
        )
        seconds = sum(self._quarter(product) for product in products)
        return len(products) * 2 * self._rows * self._inner * self._outer / seconds

    def _optimizer_rate(self) -> float:
        """Return the bytes a second of the passes that the planner counts for AdamW."""
        parameters = [nn.Parameter(torch.randn(self._inner, self._outer, device=self._device)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        size = sum(parameter.nbytes for parameter in parameters)
        return OPTIMIZER_PASSES * size / self._quarter(AdamW(parameters).step)

    def _operation(self) -> float:
        """Return the seconds of one of several operations of one number, each with its backward."""
        x = torch.ones(1, device=self._device, requires_grad=True)
        count = 16

        def forward_and_backward() -> None:
            y = x
            for _ in range(count):
                y = y * x
            y.backward()

        return self._quarter(forward_and_backward) / (3 * count)

    def _action(self) -> float:
        """Return the seconds of a forward or a backward of the runtime for a model without work."""
        model = NxDPPModel(
            _Nothing(),
            transformer_layer_cls=nn.Linear,
            num_microbatches=_ACTIONS,
            output_loss_value_spec=True,
            use_zero1_optimizer=True,  # a step has no average
        )
        model.move_model_to_device()
        x = torch.ones(_ACTIONS, 1, device=self._device)
        return self._median(lambda: model.run_train(x=x)) / (2 * _ACTIONS)

    def _collectives(self) -> dict[str, float]:
        """Return bytes a second of collectives over all ranks, and the seconds of a step of an all-reduce.

        Ranks compute between their collectives, and wait for the last one then. So each one follows a product. Where
        ranks share a core, none begins its collective before all have computed: a product counts by its own clock.
        """
        ranks = dist.get_world_size()
        x = torch.randn(self._rows, self._inner, device=self._device)
        weight = torch.randn(self._outer, self._inner, device=self._device)
        product = partial(torch.matmul, x, weight.t())
        dist.barrier()
        without = self._quarter(product)

        def line(kind: Kind, parts: int, collective: Callable[[torch.Tensor], object]) -> Link:
            def seconds(size: int) -> float:
                message = torch.zeros(size // _FLOAT // ranks * ranks // parts, device=self._device)
                return self._median(product, partial(collective, message)) - without

            return self._line(kind, seconds, lambda size: least_sent(kind, size, ranks))

        world = dist.group.WORLD
        both = line("all_reduce", 1, dist.all_reduce)
        return {
            "all_reduce": both.bytes_per_second,
            "latency": both.latency / least_steps("all_reduce", ranks),
            "reduce_scatter": line("reduce_scatter", 1, partial(reduce_scatter, dim=0, group=world)).bytes_per_second,
            "all_gather": line("all_gather", ranks, partial(all_gather, dim=0, group=world)).bytes_per_second,
        }

    def _messages(self) -> dict[str, float]:
        """Return bytes a second of a pipeline's messages, and the seconds of an empty one.

        Ranks 2 n and 2 n + 1 send a message to and fro, by the transport of a pipeline over all ranks. The last of an
        odd number of ranks has no figures.
        """
        ranks = dist.get_world_size()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, ranks, device=self._device.type)
        groups, control = parallel_state.get_pipeline_transfer_groups(), parallel_state.get_pipeline_control_group()
        transport, rank = Transport(groups, control, self._device), dist.get_rank(control)
        other = rank ^ 1
        if other == ranks:
            for _ in _MESSAGES[self._device.type]:
                dist.barrier()  # of the others' medians
            return {}

        def seconds(size: int) -> float:
            message = torch.zeros(size // _FLOAT, device=self._device)
            layout = TensorLayout(message.size(), message.stride(), message.dtype, False)

            def to_and_fro() -> None:
                receive = transport.post_receive(layout, other, Direction(1 - rank % 2), 0)
                if rank % 2:
                    receive()
                sent, _ = transport.send(message, other, Direction(rank % 2), 0)
                if not rank % 2:
                    receive()
                sent.wait()

            return self._median(to_and_fro) / 2

        found = self._line("messages", seconds, float)
        return {"message_rate": found.bytes_per_second, "message_latency": found.latency}

    def _line(self, what: str, seconds: Callable[[int], float], sent: Callable[[int], float]) -> Link:
        """Return rate and latency of what takes ``seconds`` for a size and sends ``sent`` bytes of it."""
        sizes = _MESSAGES[self._device.type]
        times, (small, large) = [seconds(size) for size in sizes], map(sent, sizes)
        if times[1] <= _LONGER * max(times[0], 0.0):
            raise RuntimeError(
                f"{what} of {sizes[0]} and {sizes[1]} bytes took {times[0]:.3g} and {times[1]:.3g} s: other processes "
                f"disturb the link. Measure it once they have ended, or give --link (link=)."
            )
        rate = (large - small) / (times[1] - times[0])
        return Link(rate, max(times[0] - small / rate, 0.0))

    def _median(self, *operations: Callable[[], object]) -> float:
        """Return the median seconds of ``operations``, run equally often on all ranks."""
        dist.barrier()
        return statistics.median(self._seconds(*operations) for _ in range(_REPEATS)) / self._turns

    def _quarter(self, operation: Callable[[], object]) -> float:
        """Return the lower quartile of the seconds of ``operation``: other work on this machine adds to the others."""
        for _ in range(2):
            operation()
        clock = time.thread_time if self._device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        times: list[float] = []
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end or len(times) < 3:
            times.append(self._seconds(operation, clock=clock))
        return sorted(times)[len(times) // 4]

    def _seconds(self, *operations: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
        device_of(self._device).synchronize()
        began = clock()
        for operation in operations:
            operation()
        device_of(self._device).synchronize()
        return clock() - began


class _Nothing(nn.Module):
    """A model without work: its step is only the runtime's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def main(kind: str, at_once: int, file: Path) -> None:
    """Measure this rank on a device of ``kind``; rank 0 writes the means over ranks into ``file``."""
    parallel_state.initialize_model_parallel(device=kind)
    torch.manual_seed(0)  # replicas of a model are equal
    own = RankFigures(parallel_state.local_device(), at_once).all()
    figures = Exchange().gather(own)
    if dist.get_rank() == 0:
        means = {name: statistics.fmean(each[name] for each in figures if name in each) for name in own}
        file.write_text(json.dumps(means))
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
