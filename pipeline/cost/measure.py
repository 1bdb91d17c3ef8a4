"""How long the nodes of a traced graph take on a device, forward and backward, measured one after the other.

A module is copied to the device for its turn only, so that a model which is larger than the device can be measured.
Of layers that are alike only the first is measured.
"""

import copy
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nxdpp.pipeline.cost.run_node import NodeRun, map_tensors, run_of, signature, tensors_in
from nxdpp.tracing.trace import TracedGraph

_WARM_UPS = 2
_REPETITIONS = 7


def profile_nodes(
    traced: TracedGraph,
    root: nn.Module,
    inputs: Mapping[str, Any],
    timed: Collection[fx.Node],
    device: torch.device,
) -> dict[fx.Node, float]:
    """Seconds of forward and backward of each of the ``timed`` nodes for one microbatch: medians of 7 runs.

    Args:
        traced: the graph of ``root``.
        root: it is as before afterwards, as are ``.grad`` and the random numbers to come. Parameters on the meta
            device are stood in for by random ones.
        inputs: values of the graph's inputs. Tensors on the meta device are stood in for: by ones, or by random
            numbers where they are floating-point.
        timed: the nodes whose times are wanted; the others run once.
        device: where the nodes run.

    Gradients are added to those of an earlier run, as in every microbatch but the first. Raises what a node raises.
    """
    devices = [] if device.type == "cpu" else [device.index or 0]
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
    ):
        return _Profile(root, device, timed).run(traced, inputs)


@dataclass
class _Measured:
    seconds: float
    value: Any


class _Profile:
    """One pass over a graph; ``values`` are those of the nodes so far that later ones take."""

    def __init__(self, root: nn.Module, device: torch.device, timed: Collection[fx.Node]) -> None:
        self._root = root
        self._device = device
        self._timed = timed
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[Any, _Measured] = {}

    def run(self, traced: TracedGraph, inputs: Mapping[str, Any]) -> dict[fx.Node, float]:
        seconds = {}
        last_use = {argument: node for node in traced.graph.nodes for argument in node.all_input_nodes}
        for node in traced.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                self._values[node] = map_tensors(self._placed, inputs[str(node.target)])
            elif node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                self._values[node] = map_tensors(self._placed, getattr(self._root.get_submodule(owner), name))
            else:
                measured = self._run(node)
                seconds[node] = measured.seconds
                self._values[node] = measured.value
            for argument in node.all_input_nodes:
                if last_use[argument] is node:
                    del self._values[argument]
        return {node: taken for node, taken in seconds.items() if node in self._timed}

    def _run(self, node: fx.Node) -> _Measured:
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
        run = run_of(node, module, self._values)
        same = signature(run)
        if same is not None and same in self._known:
            known = self._known[same]
            return _Measured(known.seconds, map_tensors(_detached, known.value))
        run.module = self._copied(module)
        measured = self._measure(run)
        if same is not None:
            self._known[same] = measured
        return measured

    def _measure(self, run: NodeRun) -> _Measured:
        if run.node not in self._timed:
            with torch.no_grad():
                return _Measured(0.0, run.forward())
        try:
            return self._repeat(run, _detached)
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            # A node may not change a leaf of the autograd graph in place.
            return self._repeat(run, lambda tensor: _detached(tensor).clone())

    def _repeat(self, run: NodeRun, prepare: Callable[[torch.Tensor], torch.Tensor]) -> _Measured:
        taken = []
        value = None
        for _ in range(_WARM_UPS + _REPETITIONS):
            # What the run before keeps must not lie in memory beside this one's.
            value = None
            args, kwargs = map_tensors(prepare, (run.args, run.kwargs))
            again = NodeRun(run.node, run.module, args, kwargs)
            self._wait()
            started = time.perf_counter()
            value = again.forward()
            ends = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            self._wait()
            taken.append(time.perf_counter() - started)
        return _Measured(statistics.median(taken[_WARM_UPS:]), map_tensors(_detached, value))

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _copied(self, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        state = (*module.parameters(), *module.buffers())
        return copy.deepcopy(module, {id(tensor): self._placed(tensor, own=True) for tensor in state})

    def _placed(self, tensor: torch.Tensor, own: bool = False) -> torch.Tensor:
        """``tensor`` on the device, or one like it; its ``own`` memory if that is asked for."""
        if tensor.is_meta:
            placed = torch.ones_like(tensor, device=self._device)
            if tensor.is_floating_point():
                # Of the spread of weights, so that nothing overflows or becomes denormal.
                placed.normal_(std=0.02)
        else:
            placed = tensor.detach().to(self._device, copy=own)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(placed, requires_grad=tensor.requires_grad)
        return placed.requires_grad_(tensor.requires_grad)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
