"""Cost of each node of a traced graph for one microbatch, counted on fake tensors without data.

Each node runs by itself in a ``FakeTensorMode``. Torch's counter counts the FLOPs of forward and backward, ``roofline``
their work. Activations are the tensors that autograd saves. Of equal layers only the first runs.
"""

import copy
import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.devices import CUDA
from nxdpp.devices.collective_bytes import sent_bytes
from nxdpp.devices.roofline import FLOP_FORMULAS, WorkCounter, machine_balance
from nxdpp.ground.torch_names import FAKE_MODE, NO_DISPATCH_MODES
from nxdpp.tracing.costs.node_parts import CountedParts, NodeParts, cached_casts, count_parts
from nxdpp.tracing.costs.run_node import (
    NodeRun,
    backward,
    cost_key,
    detached,
    initial_value,
    map_tensors,
    memory_of,
    run_of,
    tensors_in,
)
from nxdpp.tracing.graph.swap import all_swapped, swapped
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.modules import listings
from nxdpp.tracing.sizes.fake_runs import LOG, FakeCopies, Uncached, uncached_functions

# Plans without a device are for accelerators.
_ACCELERATOR = torch.device(CUDA)


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node for one microbatch.

    Attributes:
        forward, backward: FLOPs. A multiplication and an addition are two.
        work: FLOPs of forward, backward and gradient accumulation by the roofline model. ``measure`` replaces them by
            seconds.
        saved_bytes: activations that the node makes and autograd saves. Memory counts once.
        saved_values: names of the nodes and inputs whose values autograd saves for this node, without parameters.
        tensor_bytes: the least that a rank sends in its tensor group, in forward and backward.
        output_bytes, output_tensors: size of the value, as another stage would receive it.
        cast_bytes: copies of its parameters that autocast keeps until its outermost block ends.
        estimated: True if the counts are estimated from the parameters, because the node cannot run on fake tensors.
        parts: its cost in parts, where they are counted.
    """

    forward: float = 0
    backward: float = 0
    work: float = 0
    saved_bytes: int = 0
    saved_values: tuple[str, ...] = ()
    tensor_bytes: float = 0
    output_bytes: int = 0
    output_tensors: int = 0
    cast_bytes: int = 0
    estimated: bool = False
    parts: NodeParts | None = None


def count_costs(
    traced: TracedGraph,
    root: nn.Module,
    inputs: Mapping[str, Any],
    device: torch.device = _ACCELERATOR,
    parts: CountedParts | None = None,
) -> dict[fx.Node, NodeCost]:
    """Return the cost of each node of ``traced``, the graph of ``root``, for one microbatch.

    A node that cannot run on fake tensors is estimated: 2 FLOPs per parameter and token forward, twice that backward.
    An example is a mixture of experts whose shapes depend on its data. ``root`` is not changed, and may be on the meta
    device. Of ``inputs`` only shapes and dtypes are read. ``work`` assumes the ratio of FLOPs to bytes of the type of
    ``device``. With ``parts``, whose ratio then takes its place, ``NodeCost.parts`` is counted too.
    """
    dtype = next((p.dtype for p in listings.parameters(root) if p.is_floating_point()), torch.float32)
    balance = machine_balance(device, dtype) if parts is None else parts.balance
    return _Counter(root, balance, parts).run(traced, inputs)


# Value and cost of a node, and the positions of the tensors among its arguments that autograd saves.
_Counted = tuple[Any, NodeCost, list[int]]


class _Counter:
    """One pass over a graph on fake CPU tensors.

    Values stay until the end of the pass: their memory identifies them in ``saved_values``.
    """

    def __init__(self, root: nn.Module, balance: float, parts: CountedParts | None) -> None:
        self._root = root
        self._balance = balance
        self._parts = parts
        self._mode = FAKE_MODE(allow_non_fake_inputs=True)
        self._copies = FakeCopies()
        self._values: dict[fx.Node, Any] = {}
        self._made_by: dict[int, str] = {}  # memory -> name of the value
        self._known: dict[Any, _Counted] = {}

    def run(self, traced: TracedGraph, inputs: Mapping[str, Any]) -> dict[fx.Node, NodeCost]:
        costs = {}
        # Nodes that cannot run on fake tensors are marked as estimated.
        quiet = swapped(vars(LOG), {"disabled": True})
        with all_swapped([*uncached_functions(self._root), *_rows_of_one_sequence()]), self._mode, quiet:
            for node in traced.graph.nodes:
                if node.op == "output":
                    continue
                if node.op in ("placeholder", "get_attr"):
                    value = map_tensors(self._copies.tensor, initial_value(node, self._root, inputs))
                    cost = NodeCost()
                else:
                    value, cost = self._run(node)
                self._values[node] = value
                tensors = tensors_in(value)
                output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                costs[node] = replace(cost, output_bytes=output_bytes, output_tensors=len(tensors))
                if node.op != "get_attr":
                    for tensor in tensors:
                        self._made_by.setdefault(memory_of(tensor), node.name)
        return costs

    def _run(self, node: fx.Node) -> tuple[Any, NodeCost]:
        run = run_of(node, self._root, self._values)
        key = cost_key(run)
        counted = None if key is None else self._known.get(key)
        if counted is None:
            module = None if run.module is None else self._copies.module(run.module)
            counted = self._count(replace(run, module=module))
        value, cost, saved = counted
        if key is not None:
            self._known[key] = counted
            # Each of several equal layers needs memory of its own, which identifies its value.
            value = map_tensors(_another, value)
        tensors = run.tensors
        memories = [memory_of(tensors[position]) for position in saved]
        names = dict.fromkeys(self._made_by[memory] for memory in memories if memory in self._made_by)
        return value, replace(cost, saved_values=tuple(names))

    def _count(self, run: NodeRun) -> _Counted:
        if run.node.target is operator.getitem and not isinstance(run.args[0], torch.Tensor):
            return run.forward(), NodeCost(), []
        with suppress(Exception):
            if self._parts is None:
                return _count(run, self._balance)
            casts = cached_casts(run)
            value, cost, saved = _count(run, self._balance, False, casts)
            return value, _with_parts(run, cost, self._parts, casts), saved
        if run.module is not None and next(listings.parameters(run.module), None) is not None:
            value, cost, saved = _estimate(run, self._balance)
            # Temporary tensors take as much as the saved ones.
            third, live = cost.work / 3, 2 * cost.saved_bytes
            return value, replace(cost, parts=NodeParts(third, third, third, live, live, cost.saved_bytes)), saved
        # Autograd refuses a change in place of a leaf.
        with suppress(Exception), torch.no_grad():
            return run.forward(), NodeCost(), []
        return self._run_on_zeros(run), NodeCost(), []

    def _run_on_zeros(self, run: NodeRun) -> Any:
        """Return the value of a node without parameters whose forward reads its data."""
        with torch.no_grad(), NO_DISPATCH_MODES():
            module = None
            if run.node.op == "call_module":
                original = self._root.get_submodule(str(run.node.target))
                module = copy.deepcopy(original, {id(t): _zeros(t) for t in listings.buffers(original)})
            args, kwargs = map_tensors(_zeros, (run.args, run.kwargs))
            value = NodeRun(run.node, module, args, kwargs).forward()
        return map_tensors(self._copies.tensor, value)


def _rows_of_one_sequence() -> Uncached:
    """Return the function of transformers that makes a mask where it cannot read the positions, in the place of none.

    In a step it finds that each row is one sequence, and attention needs no mask.
    """
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    return [(vars(masks), {name: lambda position_ids: None})] if hasattr(masks, name) else []


def _with_parts(run: NodeRun, cost: NodeCost, how: CountedParts, casts: Sequence[torch.Tensor]) -> NodeCost:
    """Return ``cost`` of a forward, with the backward's added, and with parts."""
    args, kwargs = map_tensors(detached, (run.args, run.kwargs))
    parts = count_parts(replace(run, args=args, kwargs=kwargs), how, casts)
    sent = parts.forward_sent + parts.backward_sent
    cast = sum(copy.untyped_storage().nbytes() for copy in casts)
    return replace(
        cost, backward=parts.backward_flops, work=parts.work, tensor_bytes=sent, cast_bytes=cast, parts=parts
    )


def _count(run: NodeRun, balance: float, with_backward: bool = True, casts: Sequence[torch.Tensor] = ()) -> _Counted:
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor | None:
        saved.append(tensor)
        # A result that the graph saves keeps the graph, which only a backward would free.
        return tensor if with_backward else None

    flops = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
    with torch.enable_grad(), flops, sent_bytes() as sent, WorkCounter(flops, balance) as counter:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value = run.forward()
        forward = flops.get_total_flops()
        if with_backward:
            backward(run, value, torch.empty_like)
        total = flops.get_total_flops()
    work, not_counted = counter.work, set()
    if run.module is not None:
        work += _accumulation_work(run.module, balance)
        state = (*listings.parameters(run.module), *listings.buffers(run.module), *casts)
        not_counted = {memory_of(tensor) for tensor in state}
    arguments = [memory_of(tensor) for tensor in run.tensors]
    storages = {memory_of(tensor): tensor.untyped_storage() for tensor in saved if memory_of(tensor) not in not_counted}
    saved_bytes = sum(storage.nbytes() for memory, storage in storages.items() if memory not in arguments)
    positions = [arguments.index(memory) for memory in storages if memory in arguments]
    # The graph keeps the hook, which keeps the list.
    saved.clear()
    return value, NodeCost(forward, total - forward, work, saved_bytes, tensor_bytes=sent.total), positions


def _estimate(run: NodeRun, balance: float) -> _Counted:
    """Return a value like the hidden states, and a cost that assumes that every weight multiplies every token."""
    assert run.module is not None
    tensors = run.tensors
    position = next((index for index, tensor in enumerate(tensors) if tensor.is_floating_point()), None)
    if position is None:
        raise RuntimeError(
            f"{run.node.target} ({type(run.module).__name__}) cannot run on fake tensors and takes no hidden states, "
            f"so the shape of its output is unknown. Use partition='even' or pipeline_cuts."
        )
    states = tensors[position]
    tokens = states.numel() // states.size(-1)
    parameters = sum(parameter.numel() for parameter in listings.parameters(run.module))
    widths = sum(parameter.size(-1) for parameter in listings.parameters(run.module) if parameter.ndim > 1)
    value: Any = _another(states)
    targets: list[Any] = [user.target if user.op == "call_function" else None for user in run.node.users]
    if all(target is not None and target.__name__ == "getitem" for target in targets):
        value = (value,) * (1 + max((int(str(user.args[1])) for user in run.node.users), default=0))
    forward = 2 * parameters * tokens
    saved_bytes = tokens * widths * states.element_size()
    work = 3 * forward + _accumulation_work(run.module, balance)
    return value, NodeCost(forward, 2 * forward, work, saved_bytes, estimated=True), [position]


def _accumulation_work(module: nn.Module, balance: float) -> float:
    """Return the work of adding the gradients of a microbatch to earlier ones: two reads and a write."""
    return 3 * balance * sum(p.numel() * p.element_size() for p in listings.parameters(module) if p.requires_grad)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
