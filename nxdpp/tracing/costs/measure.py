"""Measured seconds of forward and backward of each node of a traced graph, on a device.

Nodes are measured one at a time. A module is copied to the device only while it is measured. The model may thus be
larger than the device. Of equal layers only the first is measured. Between two runs of a module its weights leave the
caches, as in a step, where the other layers run in between: a layer of 11 MB takes 10 % longer then.
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from nxdpp.devices import CUDA
from nxdpp.devices.kinds import device_of
from nxdpp.tracing.costs.run_node import NodeRun, backward, cost_key, detached, initial_value, map_tensors, run_of
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings

_WARM_UPS = 2
_REPETITIONS = 7
# More than the caches of a device.
_CACHES = 128 * 2**20


class Seconds(NamedTuple):
    """Seconds of a node, forward and backward."""

    forward: float
    backward: float


def measure_nodes(
    traced: TracedGraph,
    root: nn.Module,
    inputs: Mapping[str, Any],
    timed: Collection[fx.Node],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[fx.Node, Seconds]:
    """Return the seconds of each of the ``timed`` nodes of ``root`` for one microbatch on ``device``.

    They are the lower quartile of 7 runs after 2 warm-up runs: other work on this machine adds to the others. Other
    nodes run once. Gradients are added to an earlier run's, as in all microbatches but the first. The model, its
    gradients and the random state are not changed. Random numbers replace parameters and floating-point inputs on the
    meta device, ones replace the other inputs. ``clock`` gives seconds; ``time.thread_time`` leaves out other processes
    on the core of a single thread. An error of a node is raised as it is.
    """
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.enable_grad(), torch.random.fork_rng(devices, device_type=CUDA if device.type == "cpu" else device.type):
        return _Measurement(root, device, timed, clock).run(traced, inputs)


# Seconds and value of a node.
_Measured = tuple[Seconds, Any]


class _Measurement:
    """One pass over a graph. A value is freed after its last use."""

    def __init__(
        self, root: nn.Module, device: torch.device, timed: Collection[fx.Node], clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._device = device
        self._timed = timed
        self._clock = clock
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[Any, _Measured] = {}
        size = min(sum(parameter.nbytes for parameter in listings.parameters(root)), _CACHES)
        self._others = torch.zeros(size, dtype=torch.uint8, device=device)

    def run(self, traced: TracedGraph, inputs: Mapping[str, Any]) -> dict[fx.Node, Seconds]:
        seconds = {}
        last_use = {argument: node for node in traced.graph.nodes for argument in node.all_input_nodes}
        for node in traced.graph.nodes:
            if node.op == "output":
                continue
            if node.op in ("placeholder", "get_attr"):
                self._values[node] = map_tensors(self._on_device, initial_value(node, self._root, inputs))
            else:
                taken, self._values[node] = self._run(node)
                if node in self._timed:
                    seconds[node] = taken
            for argument in node.all_input_nodes:
                if last_use[argument] is node:
                    del self._values[argument]
        return seconds

    def _run(self, node: fx.Node) -> _Measured:
        run = run_of(node, self._root, self._values)
        key = cost_key(run)
        if key is not None and key in self._known:
            seconds, value = self._known[key]
            return seconds, map_tensors(detached, value)
        measured = self._measure(replace(run, module=self._copied(run.module)))
        if key is not None:
            self._known[key] = measured
        return measured

    def _measure(self, run: NodeRun) -> _Measured:
        if run.node not in self._timed:
            with torch.no_grad():
                return Seconds(0.0, 0.0), run.forward()
        try:
            return self._repeat(run, detached)
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            # Autograd refuses a change in place of a leaf.
            return self._repeat(run, lambda tensor: detached(tensor).clone())

    def _repeat(self, run: NodeRun, prepare: Callable[[torch.Tensor], torch.Tensor]) -> _Measured:
        forwards, backwards = [], []
        value = None
        for _ in range(_WARM_UPS + _REPETITIONS):
            # The activations of the previous run are freed first, so that two runs never need memory at once.
            value = None
            args, kwargs = map_tensors(prepare, (run.args, run.kwargs))
            repeated = replace(run, args=args, kwargs=kwargs)
            started = self._now(run)
            value = repeated.forward()
            forwards.append(self._now() - started)
            started = self._now(run)
            backward(repeated, value, torch.ones_like)
            backwards.append(self._now() - started)
        taken = Seconds(*(sorted(each[_WARM_UPS:])[_REPETITIONS // 4] for each in (forwards, backwards)))
        return taken, map_tensors(detached, value)

    def _now(self, before: NodeRun | None = None) -> float:
        """Return the time once the device has finished; ``before`` a run of a module other memory fills the caches."""
        if before is not None and before.module is not None:
            self._others.add_(1)
        device_of(self._device).synchronize()
        return self._clock()

    def _copied(self, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        state = (*listings.parameters(module), *listings.buffers(module))
        return copy.deepcopy(module, {id(tensor): self._on_device(tensor, copied=True) for tensor in state})

    def _on_device(self, tensor: torch.Tensor, copied: bool = False) -> torch.Tensor:
        """Return ``tensor`` on the device, or a replacement for a meta tensor."""
        if tensor.is_meta:
            value = torch.ones_like(tensor, device=self._device)
            if tensor.is_floating_point():
                # This is a usual spread of weights. Nothing overflows or becomes denormal.
                value.normal_(std=0.02)
        else:
            value = tensor.detach().to(self._device, copy=copied)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(value, requires_grad=tensor.requires_grad)
        return value.requires_grad_(tensor.requires_grad)
