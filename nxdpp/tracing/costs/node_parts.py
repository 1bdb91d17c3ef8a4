"""Parts of a node's cost: forward, input-gradient and weight-gradient, their memory and their collectives.

The input-gradient is the part of the backward that leads to received values, as in the runtime (``pipeline/backward``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.devices.autocast import without_autocast
from nxdpp.devices.collective_bytes import sent_bytes
from nxdpp.devices.live_bytes import LiveBytes
from nxdpp.devices.roofline import FLOP_FORMULAS, WorkCounter
from nxdpp.ground.torch_names import RAW_SAVED, SAVED, TorchDispatchMode
from nxdpp.tracing.costs.run_node import NodeRun, graph_nodes, map_tensors, memory_of, outer_gradients_kept, tensors_in
from nxdpp.tracing.modules import listings


@dataclass(frozen=True)
class NodeParts:
    """Cost of one node for one microbatch, in parts.

    Attributes:
        forward, input_gradient, weight_gradient: work, with the least work of each operation. The last one has the
            addition to earlier gradients.
        forward_live, backward_live: the most bytes that live at once, without arguments, parameters and gradients of
            parameters. In the backward they begin with what the forward has saved.
        kept: bytes that live between input-gradient and weight-gradient.
        kept_gradients: bytes of ``kept`` that the input-gradient makes.
        forward_sent, backward_sent: bytes that a rank sends at least in its tensor group.
        forward_steps, backward_steps: messages of its collectives that wait for one another.
        backward_flops: FLOPs of the backward.
        tokens: bytes of tokens that the forward sends to experts and back. The backward sends as many gradients.
        exchanges: number of these messages.
    """

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    forward_live: int = 0
    backward_live: int = 0
    kept: int = 0
    kept_gradients: int = 0
    forward_sent: float = 0.0
    backward_sent: float = 0.0
    forward_steps: int = 0
    backward_steps: int = 0
    backward_flops: int = 0
    tokens: float = 0.0
    exchanges: int = 0

    @property
    def work(self) -> float:
        """Work of forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class CountedParts:
    """Settings of a count: FLOPs that the device does while it moves a byte, and the least work of an operation."""

    balance: float
    least_work: float = 0.0


def count_parts(run: NodeRun, how: CountedParts, casts: Sequence[torch.Tensor] = ()) -> NodeParts:
    """Run forward and backward of ``run`` on fake tensors and return its cost in parts.

    ``casts`` are copies of its parameters that autocast has made and keeps. Their memory does not count.
    """
    # Torch's counter has hooks at arguments, which must not be leaves.
    with torch.enable_grad():
        args, kwargs = map_tensors(torch.clone, (run.args, run.kwargs))
    received = [get_gradient_edge(tensor) for tensor in run.tensors if tensor.requires_grad]
    run = replace(run, args=args, kwargs=kwargs)
    parameters = [] if run.module is None else list(listings.parameters(run.module))
    flops, live = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS), LiveBytes()
    for parameter in parameters:
        if parameter.requires_grad:
            # As from an earlier microbatch.
            parameter.grad = torch.empty_like(parameter)
    live.know([*casts, *parameters, *(p.grad for p in parameters if p.grad is not None), *run.tensors])
    counter = WorkCounter(flops, how.balance, how.least_work)
    try:
        with torch.enable_grad(), flops, sent_bytes() as sent, counter, live:
            # Forward.
            edges, like = _ends(run.forward())
            forward, forward_live = counter.work, live.peak
            forward_sent, forward_steps, tokens, exchanges = sent.total, sent.steps, sent.tokens, sent.exchanges
            if not edges:
                return NodeParts(
                    forward, forward_live=forward_live, forward_sent=forward_sent, forward_steps=forward_steps
                )
            # Only the part that leads to received values, then all of it.
            saved, begin = _kept(edges, received, [*parameters, *casts])
            kept_gradients = 0
            if received:
                starts = [make() for make in like]
                with without_autocast(), _noted_gradients(begin) as sizes:
                    torch.autograd.grad(edges, received, starts, retain_graph=True, allow_unused=True)
                kept_gradients = sum(sizes)
                del starts
            input_gradient = counter.work - forward
            backward_sent, backward_steps, flops_before = sent.total, sent.steps, flops.get_total_flops()
            live.reset_peak()
            with outer_gradients_kept(run, edges), without_autocast():
                torch.autograd.backward(edges, [make() for make in like])
            backward = counter.work - forward - input_gradient
            return NodeParts(
                forward,
                input_gradient,
                max(backward - input_gradient, 0.0),
                forward_live,
                live.peak,
                saved + kept_gradients,
                kept_gradients,
                forward_sent,
                sent.total - backward_sent,
                forward_steps,
                sent.steps - backward_steps,
                flops.get_total_flops() - flops_before,
                tokens,
                exchanges,
            )
    finally:
        for parameter in parameters:
            parameter.grad = None


def _ends(value: object) -> tuple[list[GradientEdge], list[Callable[[], torch.Tensor]]]:
    """Return the edges at which the backward of ``value`` begins, and functions that make their gradients.

    The value itself is not kept: the next node has it, or nothing.
    """
    ends = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    return [get_gradient_edge(end) for end in ends], [_maker(end) for end in ends]


def _maker(end: torch.Tensor) -> Callable[[], torch.Tensor]:
    shape, dtype, device = end.shape, end.dtype, end.device
    return lambda: torch.empty(shape, dtype=dtype, device=device)


def _kept(
    edges: list[GradientEdge], received: list[GradientEdge], parameters: Sequence[torch.Tensor]
) -> tuple[int, list[Any]]:
    """Return the bytes of saved tensors that the weight-gradient needs after the input-gradient.

    Memory of ``parameters``, which operations save too, does not count. Also return the nodes whose gradients the
    weight-gradient needs.
    """
    nodes = graph_nodes(edges)
    ends = {edge.node for edge in received}
    # Nodes from which a received value can be reached, found from the leaves up.
    leads: set[Any] = set()
    for node in reversed(nodes):
        if node in ends or any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    storages: dict[int, int] = {}
    begin = []
    for node in nodes:
        if node not in leads:
            _add_saved(node, storages)
        elif any(child is not None and child not in leads for child, _ in node.next_functions):
            _add_saved(node, storages)
            begin.append(node)
    for parameter in parameters:
        storages.pop(memory_of(parameter), None)
    return sum(storages.values()), begin


@contextmanager
def _noted_gradients(nodes: list[Any]) -> Iterator[list[int]]:
    """Note the bytes of the gradients that ``nodes`` are given inside."""
    sizes: list[int] = []

    def note(gradients: Sequence[torch.Tensor | None]) -> None:
        sizes.extend(each.numel() * each.itemsize for each in gradients if each is not None)

    hooks = [node.register_prehook(note) for node in nodes]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


def _add_saved(node: Any, storages: dict[int, int]) -> None:
    for name in dir(node):
        if name.startswith(SAVED.name) and not name.startswith(RAW_SAVED.name):
            for tensor in tensors_in(getattr(node, name)):
                storages[memory_of(tensor)] = tensor.untyped_storage().nbytes()


def cached_casts(run: NodeRun) -> list[torch.Tensor]:
    """Return the copies of parameters of ``run`` that autocast keeps; none outside of autocast.

    ``run`` has fake tensors. A copy that a second forward makes again is not kept, such as one of ``weight.to(dtype)``.
    """
    if run.module is None or not torch.is_autocast_enabled("cpu"):
        return []
    memories = {memory_of(parameter) for parameter in listings.parameters(run.module)}
    first, again = _Casts(memories), _Casts(memories)
    with torch.enable_grad():
        with first:
            run.forward()
        with again:
            run.forward()
    return [copy for source, copy in first.made.items() if source not in again.made]


class _Casts(TorchDispatchMode):
    """Mode that collects the copies, of a different dtype, of the memory of parameters."""

    def __init__(self, memories: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types
        self.made: dict[int, torch.Tensor] = {}
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and note its result if it copies a parameter."""
        result = func(*args, **(kwargs or {}))
        source: Any = args[0] if args else None
        if _is_cast(source, result) and memory_of(source) in self._memories:
            self.made[memory_of(source)] = result
        return result


def _is_cast(source: Any, result: Any) -> bool:
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return result.shape == source.shape and result.is_floating_point() and result.dtype != source.dtype
