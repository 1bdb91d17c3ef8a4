"""Probes of the private names of torch with which a step trains: hooks, backwards, shards, collectives, compilation."""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.utils.checkpoint import checkpoint

from nxdpp.ground import torch_names as names
from tests.ground.probe import probe


@contextmanager
def one_rank() -> Iterator[Any]:
    """A world of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@probe(names.POST_ACCUMULATE_HOOKS)
def _hooks_of_a_gradient() -> bool:
    leaf, seen = torch.ones(1, requires_grad=True), []
    kinds = (names.BACKWARD_HOOKS, names.POST_ACCUMULATE_HOOKS)
    was_empty = [kind.of(leaf) for kind in kinds] == [None, None]
    leaf.register_hook(lambda gradient: seen.append("gradient"))
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("sum"))
    kept = [kind.of(leaf) for kind in kinds]
    names.BACKWARD_HOOKS.set(leaf, None)
    names.POST_ACCUMULATE_HOOKS.set(leaf, OrderedDict())
    leaf.sum().backward()
    ran_without = list(seen)
    for kind, hooks in zip(kinds, kept, strict=True):
        kind.set(leaf, hooks)
    leaf.sum().backward()
    return was_empty and not ran_without and seen == ["gradient", "sum"]


@probe(names.ENGINE)
def _engine() -> bool:
    leaf, queued = torch.ones(1, requires_grad=True), []
    middle = leaf * 2
    edge = torch.autograd.graph.get_gradient_edge(middle)
    leaf.register_hook(lambda gradient: names.ENGINE.found.queue_callback(lambda: queued.append(float(gradient))))
    run = names.ENGINE.found.run_backward
    (found,) = run((middle * middle,), (torch.ones(1),), True, False, (edge,), True, False)
    run((edge,), (torch.ones(1),), False, False, (), True, True)
    try:
        names.ENGINE.found.queue_callback(queued.clear)
    except RuntimeError:
        return bool(found == 4 and leaf.grad == 2 and queued == [2.0])
    return False


@probe(names.SEQUENCE_NUMBER)
def _sequence_number() -> bool:
    first = torch.ones(1, requires_grad=True) * 2
    second = first * 2
    older, newer = (getattr(each.grad_fn, names.SEQUENCE_NUMBER.name)() for each in (first, second))
    return bool(older < newer)


@probe(names.SAVED_TENSOR)
def _saved_tensor() -> bool:
    node: Any = torch.ones(1, requires_grad=True).exp().grad_fn
    saved = node._raw_saved_result
    if not isinstance(saved, names.SAVED_TENSOR.found):
        return False
    # torch 2.9 shows no hooks.
    return not hasattr(saved, "unpack_hook") or (saved.unpack_hook is None and saved.data.shape == (1,))


@probe(names.CHECKPOINT_GENERATOR)
def _checkpoint_generator() -> bool:
    original, functions = names.CHECKPOINT_GENERATOR.found, []

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(function)
        yield from original(function, *args, **kwargs)

    before = names.CHECKPOINT_GENERATOR.replace(generator)
    try:
        checkpoint(torch.exp, torch.ones(1, requires_grad=True), use_reentrant=False).sum().backward()
    finally:
        names.CHECKPOINT_GENERATOR.replace(before)
    return functions == [torch.exp]


@probe(names.MOVE, names.LOAD_OWN, names.LOAD_PRE_HOOKS)
def _moves_and_loads() -> bool:
    called = []

    class Layer(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            called.append("move")
            return names.MOVE.of(super())(fn, recurse)

        def _load_from_state_dict(self, *args: Any) -> None:
            called.append("load")
            names.LOAD_OWN.of(super())(*args)

    layer = Layer(1, 1)
    layer.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    layer.double().load_state_dict(layer.state_dict())
    return called == ["move", "load"] and len(names.LOAD_PRE_HOOKS.of(layer)) == 1


@probe(names.STATE_VERSIONS)
def _state_versions() -> bool:
    return bool(names.STATE_VERSIONS.of(nn.BatchNorm1d(1).state_dict())[""] == {"version": 2})


@probe(names.GROUP_GRADIENTS)
def _group_gradients() -> bool:
    original, callers = names.GROUP_GRADIENTS.found, []

    def group(tensors: Any, *args: Any) -> Any:
        frame = inspect.currentframe()
        callers.append(frame and frame.f_back and frame.f_back.f_code)
        return original(tensors, *args)

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    before = names.GROUP_GRADIENTS.replace(group)
    try:
        nn.utils.clip_grad_norm_([parameter], 1.0)
    finally:
        names.GROUP_GRADIENTS.replace(before)
    return callers[0] is inspect.unwrap(nn.utils.get_total_norm).__code__


@probe(names.UNSCALE)
def _unscale() -> bool:
    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            found = names.UNSCALE.of(super())(optimizer, inv_scale, found_inf, allow_fp16)
            return {device: torch.ones(()) for device in found}

    parameter = nn.Parameter(torch.ones(1))
    scaler, optimizer = Scaler("cpu", init_scale=4.0), torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return bool(parameter == 1 and parameter.grad == 1 and scaler.get_scale() == 2.0)


@probe(names.FSDP_GROUP, names.FSDP_MESH, names.HSDP_MESH, names.FSDP_GATHER)
def _shards() -> bool:
    with one_rank():
        mesh = names.FSDP_MESH(init_device_mesh("cpu", (1,)), 0)
        names.HSDP_MESH(init_device_mesh("cpu", (1, 1)), 1, 0)
        layer = nn.Linear(2, 2, bias=False)
        device, policies = torch.device("cpu"), (MixedPrecisionPolicy(), OffloadPolicy())
        group = names.FSDP_GROUP([layer.weight], (layer,), mesh, None, device, None, *policies)
        group.comm_ctx.lazy_init(device)
        (parameter,) = group.fsdp_params
        parameter.reset_sharded_param()
        group.lazy_init()
        group.unshard(async_op=True)
        was_in_flight = names.FSDP_GATHER.of(group) is not None
        group.wait_for_unshard()
        is_whole = parameter.unsharded_param is layer.weight
        group.reshard()
        return bool(was_in_flight and is_whole and group.is_sharded and parameter.sharded_param is layer.weight)


@probe(names.FSDP_MANAGED)
def _managed() -> bool:
    with one_rank():
        layer = nn.Linear(1, 1)
        FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        return names.FSDP_MANAGED.held_by(layer) and not names.FSDP_MANAGED.held_by(nn.Linear(1, 1))


@probe(names.COLLECTIVES, names.GROUP_OF_NAME)
def _collectives() -> bool:
    with one_rank() as group:
        operations, name = names.COLLECTIVES.found, group.group_name
        results = [
            operations.all_reduce_(torch.ones(2), "sum", name),
            operations.all_gather_into_tensor(torch.ones(2), 1, name),
            operations.reduce_scatter_tensor(torch.ones(2), "sum", 1, name),
        ]
        return names.GROUP_OF_NAME(name) is group and all(
            operations.wait_tensor(each).tolist() == [1.0, 1.0] for each in results
        )


@probe(names.KEEP_ORDER, names.EFFECT)
def _order_of_collectives() -> bool:
    @torch.library.custom_op("nxdpp_probe::ordered", mutates_args=())
    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    ordered.register_fake(torch.empty_like)
    names.KEEP_ORDER(torch.ops.nxdpp_probe.ordered.default, names.EFFECT.found.ORDERED)

    class Twice(nn.Module):
        def forward(self, tensor: torch.Tensor) -> Any:
            return ordered(tensor) + ordered(tensor)

    exported = torch.export.export(Twice(), (torch.ones(1),)).run_decompositions()
    # The second takes what the first gives next to its result.
    return bool(exported.graph_module.code.count("with_effects") >= 2)


@probe(names.DYNAMO_CONFIG)
def _dynamo_config() -> bool:
    config = names.DYNAMO_CONFIG.found
    with config.patch(recompile_limit=99, accumulated_recompile_limit=999, skip_nnmodule_hook_guards=False):
        return bool(config.recompile_limit == 99)


@probe(names.INDUCTOR_CONFIG, names.INDUCTOR_MODE)
def _inductor() -> bool:
    config, graphs = names.INDUCTOR_CONFIG.found, names.INDUCTOR_MODE("reduce-overhead")
    timed = ("max_autotune", "max_autotune_pointwise", "max_autotune_gemm", "coordinate_descent_tuning")
    is_off = not any(getattr(config, name) for name in timed)
    return bool(graphs["triton.cudagraphs"] is True and not config.triton.cudagraphs and is_off)


@probe(names.WITHOUT_MEMORY)
def _without_memory() -> bool:
    class Shape(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise RuntimeError("no values")

    made = names.WITHOUT_MEMORY(Shape, (2, 3), strides=(1, 2), dtype=torch.float16, device=torch.device("cpu"))
    return (made.shape, made.stride(), made.dtype, type(made)) == ((2, 3), (1, 2), torch.float16, Shape)


@probe(names.SCALED_STEP)
def _scaled_step() -> bool:
    return bool(names.SCALED_STEP.of(torch.optim.Adam([torch.ones(1, requires_grad=True)], fused=True)))


@probe(names.FUNCTIONAL_CALL)
def _functional_call() -> bool:
    original, called = names.FUNCTIONAL_CALL.found, []

    def call(module: Any, given: Any, *args: Any, **named: Any) -> Any:
        called.append(list(given))
        return original(module, given, *args, **named)

    before = names.FUNCTIONAL_CALL.replace(call)
    try:
        layer = torch.nn.Linear(1, 1, bias=False)
        result = torch.func.functional_call(layer, {"weight": torch.full((1, 1), 3.0)}, torch.ones(1))
    finally:
        names.FUNCTIONAL_CALL.replace(before)
    return bool(result == 3) and called == [["weight"]]


@probe(names.REPLICATED_BY_TORCH)
def _replicated_by_torch() -> bool:
    class Refusing(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            if name == names.REPLICATED_BY_TORCH.name:
                raise NotImplementedError
            return super().__getattr__(name)

    with one_rank():
        try:
            nn.parallel.DistributedDataParallel(Refusing(1, 1))
        except NotImplementedError:
            return True
    return False


@probe(names.LAST_RATES, names.SCHEDULERS)
def _rates_of_groups() -> bool:
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    one = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    nested = torch.optim.lr_scheduler.SequentialLR(optimizer, [one], []).state_dict()
    (state,) = nested[names.SCHEDULERS.name]
    return len(state[names.LAST_RATES.name]) == 2
