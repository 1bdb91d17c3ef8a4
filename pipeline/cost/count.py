"""What each node of a traced graph costs for one microbatch, counted on fake tensors: nothing is allocated.

Nodes run one after the other, each alone, in a ``FakeTensorMode``: torch's counter counts the FLOPs of forward and
backward, a roofline what moves bytes, and the tensors that autograd saves are the activations. Of layers that are
alike only the first runs.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from nxdpp.pipeline.cost.roofline import WorkCounter, accumulation_work, machine_balance
from nxdpp.pipeline.cost.run_node import NodeRun, map_tensors, run_of, signature, tensors_in
from nxdpp.tracing.sizes import FakeCopies
from nxdpp.tracing.trace import TracedGraph

# What models are planned for where nothing is said.
_ACCELERATOR = torch.device("cuda")
_aten = torch.ops.aten


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node for one microbatch.

    Attributes:
        forward, backward: FLOPs, a multiplication and an addition being two.
        work: forward and backward in FLOPs, with those that the device could do while it moves bytes, where that is
            what an operation takes (``roofline``); the addition of gradients to those of other microbatches too.
        kept_bytes: activations that it makes and autograd keeps for the backward, each memory once.
        kept_values: names of nodes and inputs whose values it keeps for its backward, parameters apart.
        output_bytes, output_tensors: its value, as it would cross to another stage.
        estimated: its parameters stand in for the counts, because it cannot run on fake tensors.
    """

    forward: float = 0
    backward: float = 0
    work: float = 0
    kept_bytes: int = 0
    kept_values: tuple[str, ...] = ()
    output_bytes: int = 0
    output_tensors: int = 0
    estimated: bool = False


def count_costs(
    traced: TracedGraph, root: nn.Module, inputs: Mapping[str, Any], device: torch.device = _ACCELERATOR
) -> dict[fx.Node, NodeCost]:
    """The cost of each node of ``traced`` for one microbatch ``inputs``.

    Args:
        traced: the graph of ``root``.
        root: its parameters may be on the meta device; it is as before afterwards.
        inputs: values of the graph's inputs. Of tensors shape and dtype count; they may be on the meta device.
        device: the kind of device whose balance of FLOPs and bytes is assumed for ``work``.

    A node that cannot run on fake tensors (a mixture of experts whose shapes depend on its data) is estimated:
    2 FLOPs a parameter and token forward, twice that backward.
    """
    dtype = next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.float32)
    return _Count(root, machine_balance(device, dtype)).run(traced, inputs)


class _Count:
    """One pass over a graph; ``values`` are those of the nodes so far, as fake tensors on the CPU."""

    def __init__(self, root: nn.Module, balance: float) -> None:
        self._root = root
        self._balance = balance
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._copies = FakeCopies()
        self._values: dict[fx.Node, Any] = {}
        self._made_by: dict[int, str] = {}  # memory -> the value that it is part of
        self._known: dict[Any, tuple[NodeCost, list[int], Any]] = {}

    def run(self, traced: TracedGraph, inputs: Mapping[str, Any]) -> dict[fx.Node, NodeCost]:
        costs = {}
        with self._mode, _quiet():
            for node in traced.graph.nodes:
                if node.op == "output":
                    continue
                if node.op == "placeholder":
                    value, cost = map_tensors(self._copies.tensor, inputs[str(node.target)]), NodeCost()
                elif node.op == "get_attr":
                    value, cost = self._attribute(str(node.target)), NodeCost()
                else:
                    value, cost = self._run(node)
                self._values[node] = value
                costs[node] = replace(cost, output_bytes=_bytes(value), output_tensors=len(tensors_in(value)))
                if node.op != "get_attr":
                    for tensor in tensors_in(value):
                        self._made_by.setdefault(_memory(tensor), node.name)
        return costs

    def _run(self, node: fx.Node) -> tuple[Any, NodeCost]:
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None
        run = run_of(node, module, self._values)
        same = signature(run)
        if same is None or same not in self._known:
            run.module = self._copies.module(module) if module is not None else None
            value, cost, kept = self._measure(run)
            if same is None:
                return value, replace(cost, kept_values=self._names(kept))
            positions = {_memory(tensor): i for i, tensor in reversed(list(enumerate(run.arguments)))}
            self._known[same] = cost, [positions[memory] for memory in kept if memory in positions], value
        cost, kept_arguments, value = self._known[same]
        kept = [_memory(run.arguments[position]) for position in kept_arguments]
        # Memory tells values apart, and so each layer has its own.
        return map_tensors(_another, value), replace(cost, kept_values=self._names(kept))

    def _measure(self, run: NodeRun) -> tuple[Any, NodeCost, list[int]]:
        """The value of a node, its cost, and the memory of other values that it keeps."""
        with suppress(Exception):
            return _count(run, self._balance)
        if run.module is not None and any(True for _ in run.module.parameters()):
            return _estimate(run, self._balance)
        # What changes a value in place cannot do so to a leaf of the autograd graph.
        with suppress(Exception), torch.no_grad():
            return run.forward(), NodeCost(), []
        return self._run_for_real(run), NodeCost(), []

    def _run_for_real(self, run: NodeRun) -> Any:
        """The value of a node that looks at its data, for data of zeros; it has no parameters, and is small."""
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            module = None
            if run.node.op == "call_module":
                original = self._root.get_submodule(str(run.node.target))
                module = copy.deepcopy(original, {id(t): _zeros(t) for t in original.buffers()})
            args, kwargs = map_tensors(_zeros, (run.args, run.kwargs))
            value = NodeRun(run.node, module, args, kwargs).forward()
        return map_tensors(self._copies.tensor, value)

    def _attribute(self, target: str) -> Any:
        owner, _, name = target.rpartition(".")
        return map_tensors(self._copies.tensor, getattr(self._root.get_submodule(owner), name))

    def _names(self, memories: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._made_by[memory] for memory in memories if memory in self._made_by))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of operations that cannot run on fake tensors: those nodes are estimated, and marked so."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _count(run: NodeRun, balance: float) -> tuple[Any, NodeCost, list[int]]:
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    counter = FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_TORCH)
    with torch.enable_grad(), counter, WorkCounter(counter, balance) as moved:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value = run.forward()
        forward = counter.get_total_flops()
        ends = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        total = counter.get_total_flops()
    state = (*run.module.parameters(), *run.module.buffers()) if run.module is not None else ()
    not_counted = {_memory(tensor) for tensor in state}
    given = {_memory(tensor) for tensor in run.arguments}
    memories = {_memory(tensor): tensor for tensor in saved if _memory(tensor) not in not_counted}
    kept_bytes = sum(tensor.untyped_storage().nbytes() for memory, tensor in memories.items() if memory not in given)
    kept = [memory for memory in memories if memory in given]
    work = moved.work + _accumulation(run, balance)
    return value, NodeCost(forward, total - forward, work, kept_bytes), kept


def _estimate(run: NodeRun, balance: float) -> tuple[Any, NodeCost, list[int]]:
    """Its value is like the hidden states; for each token each weight keeps the vector that it multiplies."""
    assert run.module is not None
    states = next((tensor for tensor in run.arguments if tensor.is_floating_point()), None)
    if states is None:
        raise RuntimeError(
            f"{run.node.target} ({type(run.module).__name__}) cannot run on fake tensors and takes no hidden states, "
            f"so that the shape of its output is not known. Use partition='even' or pipeline_cuts."
        )
    tokens = states.numel() // states.size(-1)
    parameters = sum(parameter.numel() for parameter in run.module.parameters())
    widths = sum(parameter.size(-1) for parameter in run.module.parameters() if parameter.ndim > 1)
    value: Any = _another(states)
    if all(user.op == "call_function" and user.target.__name__ == "getitem" for user in run.node.users):  # type: ignore[union-attr]
        value = (value,) * (1 + max((int(str(user.args[1])) for user in run.node.users), default=0))
    forward = 2 * parameters * tokens
    kept_bytes = tokens * widths * states.element_size()
    work = 3 * forward + _accumulation(run, balance)
    return value, NodeCost(forward, 2 * forward, work, kept_bytes, estimated=True), [_memory(states)]


def _accumulation(run: NodeRun, balance: float) -> float:
    parameters = run.module.parameters() if run.module is not None else ()
    return sum(accumulation_work(parameter, balance) for parameter in parameters)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _another(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[-2] * (width + value[-1]))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    # Scores once more, then two products for each of the two of the forward.
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[-2] * (3 * width + 2 * value[-1]))


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    experts = left[0] if len(left) == len(right) == 3 else 1
    return 2 * int(experts * left[-2] * left[-1] * right[-1])


# Of fused attention torch's counter knows the kernels of GPUs alone, of experts none.
_UNKNOWN_TO_TORCH = {
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
