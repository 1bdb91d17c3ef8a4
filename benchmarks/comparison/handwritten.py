"""1F1B as an expert writes it for one model of one shape: no tracing, no checks, no other schedule.

Receives are posted two microbatches ahead, into buffers that are allocated once. Each direction has its own tag. The
rank waits for a send only when four later sends are in flight.
"""

from collections import deque

import torch
import torch.distributed as dist

from benchmarks.comparison.job import Job

ACTIVATION, GRADIENT = 1, 2
AHEAD = 2
SENDS_KEPT = 4


class HandwrittenStage:
    """This rank's only stage; ``module`` has its parameters."""

    def __init__(self, job: Job) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._first, self._last = self._rank == 0, self._rank == self._ranks - 1
        self.module = job.cut(job.make_model(), self._rank, self._ranks)
        self._loss = job.loss
        self._microbatches = job.microbatches
        self._inputs = job.first_input.chunk(job.microbatches)
        self._targets = job.target.chunk(job.microbatches)
        # The backward of a microbatch, which frees its buffer, is this many forwards later.
        in_flight = self._ranks - self._rank
        self._hidden = [torch.empty(job.hidden, requires_grad=True) for _ in range(in_flight + AHEAD)]
        self._gradients = [torch.empty(job.hidden) for _ in range(1 + AHEAD)]
        self._sends: deque[dist.Work] = deque()
        self._arriving: deque[dist.Work] = deque()
        self._returning: deque[dist.Work] = deque()
        self._outputs: deque[torch.Tensor] = deque()
        self._losses: list[torch.Tensor] = []

    def step(self) -> torch.Tensor | None:
        """Run forward and backward of all microbatches; return the mean loss on the last rank. Collective."""
        warm_up = min(self._microbatches, self._ranks - self._rank - 1)
        self._losses = []
        # Warm-up: forwards only.
        for microbatch in range(min(AHEAD, self._microbatches)):
            self._post_hidden_receive(microbatch)
            self._post_gradient_receive(microbatch)
        for microbatch in range(warm_up):
            self._forward(microbatch)
        # Steady: a forward and a backward in turn.
        for microbatch in range(warm_up, self._microbatches):
            self._forward(microbatch)
            self._backward(microbatch - warm_up)
        # Drain: the remaining backwards, then the sends in flight.
        for microbatch in range(self._microbatches - warm_up, self._microbatches):
            self._backward(microbatch)
        while self._sends:
            self._sends.popleft().wait()
        return torch.stack(self._losses).sum() if self._last else None

    def _post_hidden_receive(self, microbatch: int) -> None:
        if not self._first and microbatch < self._microbatches:
            buffer = self._hidden[microbatch % len(self._hidden)]
            buffer.grad = None
            self._arriving.append(_receive(buffer.data, self._rank - 1, ACTIVATION))

    def _post_gradient_receive(self, microbatch: int) -> None:
        if not self._last and microbatch < self._microbatches:
            buffer = self._gradients[microbatch % len(self._gradients)]
            self._returning.append(_receive(buffer, self._rank + 1, GRADIENT))

    def _forward(self, microbatch: int) -> None:
        self._post_hidden_receive(microbatch + AHEAD)
        if self._first:
            hidden = self._inputs[microbatch]
        else:
            self._arriving.popleft().wait()
            hidden = self._hidden[microbatch % len(self._hidden)]
        output = self.module(hidden)
        if self._last:
            output = self._loss(output, self._targets[microbatch]) / self._microbatches
            self._losses.append(output.detach())
        else:
            self._send(output.detach(), self._rank + 1, ACTIVATION)
        self._outputs.append(output)

    def _backward(self, microbatch: int) -> None:
        self._post_gradient_receive(microbatch + AHEAD)
        output = self._outputs.popleft()
        if self._last:
            torch.autograd.backward(output)
        else:
            self._returning.popleft().wait()
            torch.autograd.backward(output, self._gradients[microbatch % len(self._gradients)])
        if not self._first:
            gradient = self._hidden[microbatch % len(self._hidden)].grad
            assert gradient is not None, "every later stage has an input-gradient"
            self._send(gradient, self._rank - 1, GRADIENT)

    def _send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        work = dist.isend(tensor, destination, tag=tag)
        assert work is not None, "every rank is in the group"
        self._sends.append(work)
        if len(self._sends) > SENDS_KEPT:
            self._sends.popleft().wait()


def _receive(buffer: torch.Tensor, source: int, tag: int) -> dist.Work:
    work = dist.irecv(buffer, source, tag=tag)
    assert work is not None, "every rank is in the group"
    return work
