"""Costs of a model for the layouts of a search.

Layers are counted on the meta device. All terms are affine in the number of samples except for the roofline's maximum.
Powers of 2 are counted up to one from which two more are on a line; there any larger number is on it. A divided model
is counted for one sample, and each of its terms grows as the whole model's does.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx, nn

from nxdpp.counted import counted
from nxdpp.devices import CUDA
from nxdpp.experts.parallelize import expert_parallelize, known_experts
from nxdpp.experts.tokens import load_of
from nxdpp.pipeline.partition.layer_costs import layers_and_head, shared_bytes, shared_names
from nxdpp.planning.dtypes import dtype_of
from nxdpp.planning.layer_times import CountedModel, LayerTimes, counted_layers
from nxdpp.planning.layout import divisors
from nxdpp.planning.machine import Job, Machine
from nxdpp.planning.measured.kept_machine import KeptMachine
from nxdpp.planning.stage_costs import Itemsizes
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import nothing_sent
from nxdpp.tensor.models.adapters import base_of
from nxdpp.tracing.costs.count import NodeCost, count_costs
from nxdpp.tracing.costs.cuda_modes import CudaAutocast, CudaKernels
from nxdpp.tracing.costs.measure import measure_nodes
from nxdpp.tracing.costs.node_parts import CountedParts, NodeParts
from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace_for
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.layers import find_layer_classes
from nxdpp.tracing.values.input_dicts import InputDict, open_inputs

M = TypeVar("M", bound=nn.Module)

# Tensor-parallel size, sequence parallelism, samples, and replicas that share experts.
_Key = tuple[int, bool, int, int]
# Tokens of the busiest rank of an expert group, over the mean of its ranks.
EXPERT_LOAD = 1.25

# The largest relative distance of 4 n samples from the line through n and 2 n that counts as none.
_OFF_A_LINE = 0.005
# The most samples that are measured.
_MEASURED = 4


class ModelCosts:
    """Costs of a model for each layout, counted when asked for.

    Args:
        model: the model, not divided. It is not changed, and may be on the meta device.
        machine: gives the speed.
        job: gives the inputs.
        measured: this machine, on whose device forward and backward of each layer are measured. Input-gradient and
            weight-gradient have the shares that are counted. ``None`` for counted seconds.
        autocast: dtype of the autocast around a step; ``None`` without.
        gradient_dtype: in which gradients accumulate and are reduced; ``None`` for the parameters'.
        expert_load: tokens of the busiest rank of an expert group, over the mean of its ranks.

    Its methods raise ``ValueError`` for a model that a tensor group cannot divide, and ``TracingError`` for one that
    cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        machine: Machine,
        job: Job,
        measured: KeptMachine | None = None,
        transformer_layer_cls: Any | None = None,
        tensor_plan: Mapping[str, str] | None = None,
        autocast: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        expert_load: float = EXPERT_LOAD,
    ) -> None:
        self.machine = machine
        self.job = job
        self._model = model
        self._measured = measured
        self._layer_cls = transformer_layer_cls
        self._tensor_plan = tensor_plan
        self._load = expert_load
        self._factors: dict[_Key, list[list[float]]] = {}
        self.dtype = dtype_of(model)
        self.autocast = autocast
        self.itemsizes = Itemsizes(self.dtype.itemsize, (gradient_dtype or self.dtype).itemsize)
        # States of the ranks of layouts, kept by ``predict``.
        self.states: dict[Any, Any] = {}
        self._counted: dict[_Key, CountedModel] = {}
        self._interpolated: dict[_Key, CountedModel] = {}

    @cached_property
    def expert_sizes(self) -> list[int]:
        """Numbers of replicas that can share the experts of all layers."""
        return divisors(math.gcd(*self._numbers_of_experts) or 1)

    @cached_property
    def _numbers_of_experts(self) -> list[int]:
        known = known_experts(base_of(self._model)).values()
        return sorted({len(parameter) for parameters in known for parameter in parameters})

    def check_experts(self, size: int) -> None:
        """Raise ``ValueError`` for a ``size`` that is none of ``expert_sizes``."""
        numbers = self._numbers_of_experts
        if size not in self.expert_sizes:
            experts = " and ".join(map(str, numbers)) if numbers else "no"
            raise ValueError(
                f"{counted(size, 'replica')} cannot share the experts of a {type(self._model).__name__}: its layers "
                f"have {experts} experts. Give --expert-parallel-size, or experts=, one of "
                f"{', '.join(map(str, self.expert_sizes))}."
            )

    @property
    def has_half_parameters(self) -> bool:
        """True if the parameters have fewer bits than float32."""
        return self.dtype.itemsize < torch.float32.itemsize

    def of(self, tensor: int, sequence: bool, microbatch: int, experts: int = 1) -> CountedModel:
        """Return the costs for a tensor-parallel size, ``microbatch`` samples, and ``experts`` that share experts."""
        key = (tensor, sequence, microbatch, experts)
        if key not in self._interpolated:
            self._interpolated[key] = self._of(*key)
        return self._interpolated[key]

    def _of(self, tensor: int, sequence: bool, microbatch: int, experts: int) -> CountedModel:
        if tensor == experts == 1:
            return self._of_whole(microbatch)
        divided_one = self._count(tensor, sequence, 1, experts)
        if microbatch == 1:
            return divided_one
        one, more = self._of_whole(1), self.of(1, False, microbatch)
        layers = [each.grown(a, b) for each, a, b in zip(divided_one.layers, one.layers, more.layers, strict=True)]
        return _grown(divided_one, layers, more.shared / one.shared if one.shared else 1.0)

    def _of_whole(self, microbatch: int) -> CountedModel:
        """Return the costs of the model that no tensor group divides: counted for powers of 2, or on a line."""
        below = 1 << (microbatch.bit_length() - 1)
        if microbatch <= 2 or (below == microbatch <= self._line):
            return self._count(1, False, microbatch)
        above = 2 * below
        if microbatch > self._line:
            # The largest that is counted: measured seconds of few samples are the least certain ones.
            below, above = self._line, 4 * self._line
        one, two = self._count(1, False, below), self._count(1, False, above)
        share = (microbatch - below) / (above - below)
        layers = [a.plus(b, share) for a, b in zip(one.layers, two.layers, strict=True)]
        shared = one.shared + share * (two.shared - one.shared)
        return _grown(one, layers, shared / one.shared if one.shared else 1.0)

    @cached_property
    def _line(self) -> int:
        """The power of 2 from which the work of more samples is on a line."""

        def work(samples: int) -> float:
            return sum(layer.work for layer in self._count(1, False, samples, is_measured=False).layers)

        one = 1
        while abs(3 * work(2 * one) - 2 * work(one) - work(4 * one)) > _OFF_A_LINE * work(4 * one):
            one *= 2
            if 2 * one > self.job.global_batch:
                break
        return one

    def _count(
        self, tensor: int, sequence: bool, microbatch: int, experts: int = 1, is_measured: bool = True
    ) -> CountedModel:
        key = (tensor, sequence, microbatch, experts)
        if key not in self._counted:
            self._counted[key] = self._counted_now(*key)
        found = self._counted[key]
        if self._measured is None or not is_measured:
            return found
        measured = (tensor, sequence, min(microbatch, _MEASURED), experts)
        if measured not in self._factors:
            self._count(*measured, is_measured=False)
        layers = zip(found.layers, self._factors[measured], strict=True)
        return replace(found, layers=[layer.slower(*by) for layer, by in layers])

    def _counted_now(self, tensor: int, sequence: bool, microbatch: int, experts: int) -> CountedModel:
        inputs = self.job.inputs(microbatch)
        opened = open_inputs(inputs, all_kinds=True)
        batch = {name: value for name, value in opened.items() if not isinstance(value, InputDict)}
        tokens = batch.get("input_ids")
        if sequence and tokens is not None and tokens.shape[1] % tensor:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens does not divide over {tensor} tensor-parallel ranks: give "
                f"--seq-length a multiple of {tensor}, or leave --sequence-parallel out."
            )
        device = self.machine.device
        computed = self.autocast or self.dtype
        speed = device.flops(computed)
        how = CountedParts(device.balance(computed), device.operation_seconds * speed)
        model = on_meta(self._model) if tensor > 1 or experts > 1 else self._model
        # Modules of a divided model are of classes derived from these.
        given = None if self._layer_cls is None else find_layer_classes(model, self._layer_cls)
        with _divided(model, tensor, sequence, experts, self._tensor_plan), load_of(self._load):
            options = TracingOptions(given or find_layer_classes(model, None))
            traced = trace_for(model, inputs, options)
            lists: AbstractContextManager[Any] = nullcontext()
            if self.autocast and device.kind != "cpu":
                lists = CudaAutocast()
            kernels: AbstractContextManager[Any] = CudaKernels() if device.kind == CUDA else nullcontext()
            with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None), lists, kernels:
                costs = count_costs(traced, model, batch, parts=how)
            kept = self._measured
            if kept is not None and microbatch <= _MEASURED:
                counted = [round(costs[node].work) for node in traced.graph.nodes if node in costs]
                self._factors[tensor, sequence, microbatch, experts] = kept.factors(
                    (type(model).__name__, computed, tensor, sequence, experts, microbatch, counted),
                    lambda where: self._quotients(traced, model, batch, costs, speed, where, kept.clock),
                )
        link = self.machine.link_of(tensor, 1)
        if sequence:
            scatter, gather = link.rate("reduce_scatter"), link.rate("all_gather")
            link = replace(link, bytes_per_second=2 * scatter * gather / (scatter + gather))
        tokens = self.machine.link_of_tokens(experts, tensor)
        layers, tied = counted_layers(traced, model, costs, speed, link, tokens)
        nowhere = shared_names(traced, layers_and_head(traced, model)[1])
        of_none = sum(cost.parts.forward for node, cost in costs.items() if cost.parts and node.name in nowhere)
        estimated = any(cost.estimated for cost in costs.values())
        shared = shared_bytes(traced, model, costs)
        return CountedModel(layers, shared, of_none / speed, estimated, tied)

    def _quotients(
        self,
        traced: TracedGraph,
        root: nn.Module,
        inputs: Mapping[str, Any],
        costs: Mapping[fx.Node, NodeCost],
        speed: float,
        device: torch.device,
        clock: Callable[[], float],
    ) -> list[list[float]]:
        """Return measured / counted seconds of each layer and the head, forward and backward."""
        names, assigned, _ = layers_and_head(traced, root)
        with nothing_sent(), torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            seconds = measure_nodes(traced, root, inputs, assigned, device, clock)
        measured, counted = ([[0.0, 0.0] for _ in names] for _ in range(2))
        for node, layer in assigned.items():
            parts = costs[node].parts or NodeParts()
            for way, part in enumerate((parts.forward, parts.work - parts.forward)):
                measured[layer][way] += seconds[node][way] if node in seconds else 0.0
                counted[layer][way] += part / speed
        return [
            [a / b if a and b else 1.0 for a, b in zip(*layer, strict=True)]
            for layer in zip(measured, counted, strict=True)
        ]


@contextmanager
def _divided(
    model: nn.Module, tensor: int, sequence: bool, experts: int, plan: Mapping[str, str] | None
) -> Iterator[None]:
    """Divide ``model`` over ``tensor`` ranks, and its experts over ``experts`` replicas, and act as the first of them.

    No process is needed.

    ``tensor_parallelize`` divides it, by its ``plan`` if one is given. Raises ``ValueError`` for a model that
    it refuses.
    """
    if tensor == experts == 1:
        yield
        return
    from nxdpp.tensor.models.parallelize import tensor_parallelize

    parallel_state.initialize_debug(
        data_parallel_size=experts, tensor_model_parallel_size=tensor, expert_model_parallel_size=experts
    )
    try:
        with warnings.catch_warnings():
            if plan is not None:
                warnings.simplefilter("ignore")  # the run of the plan compares it
            if experts > 1:
                expert_parallelize(model)
            if tensor > 1:
                tensor_parallelize(model, plan, sequence_parallel=sequence)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def active_parameters(model: nn.Module) -> int:
    """Return the number of parameters that a token passes: of experts those that a router with a ``top_k`` chooses."""
    base, found = base_of(model), sum(parameter.numel() for parameter in listings.parameters(model))
    for name, parameters in known_experts(base).items():
        block = base.get_submodule(name.rpartition(".")[0])
        numbers = [k for each in block.modules() if isinstance(k := getattr(each, "top_k", None), int)]
        for parameter in parameters if numbers else ():
            found -= parameter[0].numel() * max(len(parameter) - numbers[0], 0)
    return found


def _grown(one: CountedModel, layers: list[LayerTimes], shared: float) -> CountedModel:
    return replace(one, layers=layers, shared=one.shared * shared, shared_forward=one.shared_forward * shared)


def on_meta(model: M) -> M:
    """Copy ``model`` to the meta device, with its ties."""
    memo: dict[int, Any] = {}
    for tensor in (*listings.parameters(model), *listings.buffers(model)):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
