"""``nxdpp.plan``: the layouts of a job with the shortest steps, from texts and numbers."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.ground.torch_names import pytree
from nxdpp.planning.dtypes import dtype_named, dtype_of, name_of
from nxdpp.planning.layout import Layout
from nxdpp.planning.machine import DeviceSpeed, Job, Link, Machine, find_device
from nxdpp.planning.measured.kept_machine import measured_machine
from nxdpp.planning.model_costs import EXPERT_LOAD, ModelCosts, active_parameters, on_meta
from nxdpp.planning.plan import Plan
from nxdpp.planning.search import rank_layouts, search
from nxdpp.planning.text_table import flops_of, rate_of, size_of
from nxdpp.tracing.modules import listings

# A microbatch of some samples, or one that shows its inputs.
Inputs = Callable[[int], Mapping[str, Any]] | Mapping[str, Any]


def plan(
    model_or_config: Any,
    *,
    devices: int,
    device_memory: str | float,
    global_batch: int,
    seq_length: int | None = None,
    hosts: int = 1,
    link: str | float | Link | None = None,
    host_link: str | float | Link = "50GB/s",
    device: str | DeviceSpeed = "h100",
    peak: str | float | None = None,
    bandwidth: str | float | None = None,
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    gradient_dtype: torch.dtype | str | None = None,
    costs: str = "counted",
    layouts: Sequence[Layout] | None = None,
    fixed: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    transformer_layer_cls: Any | None = None,
    tensor_plan: Mapping[str, str] | None = None,
    expert_load: float = EXPERT_LOAD,
    best: int = 10,
) -> Plan:
    """Return the layouts of a job with the shortest steps that fit into the memory of a device; not collective.

    It searches all sizes of tensor, pipeline, data and expert parallelism, schedules, stages per rank and microbatches,
    each with and without activation checkpointing, sequence parallelism, and ZeRO-1, 2 and 3. Of equal sizes and
    switches only the best schedule and microbatch are returned. Half parameters have float32 optimizer state in all
    layouts (``Zero1Optimizer``, or shards in float32), unless ``fixed`` has ``"zero": 0``. Nothing is allocated or run.
    See docs/planner.md for what a prediction has in it.

    Args:
        model_or_config: a model, which is not changed and may be on the meta device, or a configuration of
            transformers.
        devices: number of devices, a rank each.
        device_memory: memory of a device, such as ``"80GB"`` (80e9 bytes) or ``"75GiB"``, or a number of bytes.
        global_batch: samples of a step, all replicas together.
        seq_length: tokens of a sample; by default 2048, or all positions. Not together with ``inputs``.
        hosts: number of hosts, with equal numbers of devices.
        link: rate of a device to a device on its host, one way: ``"400GB/s"`` (by default), ``"400Gb/s"`` (bits), or a
            ``Link``. By default the measured one with ``costs="measured"``.
        host_link: rate of a device to one on another host.
        device: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"``, ``"mi300x"``, ``"tpu-v5p"``, ``"cpu"``, or a
            ``DeviceSpeed`` with figures of your own.
        peak: FLOPs a second of the device's data sheet, in the dtype that a step computes in: ``"989TFLOP/s"``.
        bandwidth: of its memory: ``"3.35TB/s"``.
        dtype: of the parameters. By default the model's, or what the constructor makes of a
            configuration: float32, even where the configuration names a different dtype.
        autocast: dtype of ``torch.autocast`` around a step of float32 parameters, ``"bfloat16"``.
        gradient_dtype: ``"float32"`` for half parameters whose gradients accumulate in it, and are reduced in it. By
            default the parameters' dtype.
        costs: ``"counted"``, by FLOPs and bytes, or ``"measured"``: this machine and the layers of the model are
            measured in the place of ``device``, of its kind, and kept in a file (``measured/kept_machine.py``).
        layouts: compare only these.
        fixed: fields of ``Layout`` that all layouts have, such as ``{"pipeline": 4}``.
        inputs: a function of a number of samples that returns the inputs of a microbatch with labels; or one
            microbatch, whose tensors have the samples in their first dimension. Needed for a model that is not of
            transformers.
        transformer_layer_cls: class, or name of a class, of the layers, or a list of these. By default as in
            ``NxDPPModel``.
        tensor_plan: ``plan`` of ``tensor_parallelize`` for tensor-parallel sizes above 1.
        expert_load: tokens of the busiest of the replicas that share experts, over their mean. Routing is not known
            before a step: ``last_expert_balance`` has it after one, ``share`` times the number of replicas.
        best: number of predictions.

    Raises:
        ValueError: for arguments that are not understood; where no layout fits, with the smallest memory needed.
        TypeError: for any other kind of model.
        RuntimeError: after ``initialize_model_parallel``, if tensor-parallel sizes above 1 are possible.
        TracingError: for a model that cannot be traced.
    """
    model = _model(model_or_config, dtype)
    wanted = _autocast(autocast, dtype_of(model))
    summed = _gradient_dtype(gradient_dtype, dtype_of(model))
    named = find_device(device) if isinstance(device, str) else device
    if costs not in ("counted", "measured"):
        raise ValueError(f"costs={costs!r} must be 'counted' or 'measured', which takes the place of 'profiled'.")
    kept, name = None, device if isinstance(device, str) else device.kind
    if costs == "measured":
        if peak is not None or bandwidth is not None:
            raise ValueError("peak and bandwidth are measured with costs='measured': leave them out.")
        if not isinstance(device, str):
            raise ValueError("a DeviceSpeed is measured with costs='measured': name a device, such as device='cpu'.")
        kept = measured_machine(named.kind, devices // max(hosts, 1))
        named, link, name = kept.device, link or kept.link, kept.about["device"]
        if kept.cores is not None and devices > kept.cores * hosts:
            raise ValueError(
                f"devices={devices} on {counted(hosts, 'host')} like this machine share cores: it has those of "
                f"{counted(kept.cores, 'rank')}. Plan for at most {kept.cores * hosts} devices."
            )
    found_device = named.with_data_sheet(
        None if peak is None else flops_of(peak, "peak"), None if bandwidth is None else rate_of(bandwidth, "bandwidth")
    )
    machine = Machine(
        devices,
        size_of(device_memory, "device_memory"),
        found_device,
        hosts,
        _link(link or "400GB/s", "link", 5e-6),
        _link(host_link, "host_link", 20e-6),
    )
    if not 1 <= expert_load < math.inf:
        raise ValueError(f"expert_load={expert_load!r} is the busiest rank's tokens over the mean: at least 1.")
    job = Job(global_batch, _inputs(model, inputs, seq_length))
    model_costs = ModelCosts(model, machine, job, kept, transformer_layer_cls, tensor_plan, wanted, summed, expert_load)
    found = search(model_costs, fixed, best) if layouts is None else rank_layouts(model_costs, layouts, best)
    return Plan(
        model=type(model).__name__,
        devices=devices,
        hosts=hosts,
        device_memory=machine.memory,
        global_batch=global_batch,
        dtype=name_of(model_costs.dtype),
        device=name,
        sample=_shapes(job.inputs(1)),
        tensor_plan=tensor_plan,
        layer_classes=_class_names(transformer_layer_cls),
        parameters=sum(parameter.numel() for parameter in listings.parameters(model)),
        active_parameters=active_parameters(model),
        autocast=None if wanted is None else name_of(wanted),
        note=_note("" if kept is None else kept.note, named.kind, name, {"peak": peak, "bandwidth": bandwidth}),
        gradient_dtype=None if summed is None else name_of(summed),
        **vars(found),
    )


def _model(given: Any, dtype: torch.dtype | str | None) -> nn.Module:
    wanted = None if dtype is None else dtype_named(dtype)
    if isinstance(given, nn.Module):
        if hasattr(given, "replace_local_tensors"):
            raise TypeError("nxdpp.plan takes a model before it is wrapped.")
        if wanted is None:
            return given
        return on_meta(given).to(wanted)
    from transformers import PreTrainedConfig

    from nxdpp.planning.configured_model import build_on_meta

    if not isinstance(given, PreTrainedConfig):
        raise TypeError(f"nxdpp.plan takes a model, or a configuration of transformers, not a {type(given).__name__}.")
    return build_on_meta(copy.deepcopy(given), wanted)


def _note(of_measured: str, kind: str, device: str, sheet: Mapping[str, str | float | None]) -> str:
    """Return what a reader of the figures must know."""
    notes = [of_measured] if of_measured else []
    if given := [f"{figure} {value}" for figure, value in sheet.items() if value is not None]:
        notes.append(f"{device} with {' and '.join(given)}, as given.")
    if kind == "xla":
        notes.append("memory of an XLA device is counted as a CPU's, without what its compiler adds.")
    return " ".join(notes)


def _autocast(given: torch.dtype | str | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the autocast. Raises ``ValueError`` for any but float32 parameters under bfloat16."""
    if given is None:
        return None
    found = dtype_named(given)
    if found == torch.float16:
        raise ValueError("autocast='float16': plan with autocast='bfloat16', which takes the same time and memory.")
    if found != torch.bfloat16 or dtype != torch.float32:
        raise ValueError(
            f"autocast={name_of(found)!r} of parameters in {name_of(dtype)}: plans are of float32 parameters under "
            f"autocast to bfloat16. Leave autocast out, or dtype."
        )
    return found


def _gradient_dtype(given: torch.dtype | str | None, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the gradients, if it is not the parameters'. Raises ``ValueError`` for other dtypes."""
    found = dtype if given is None else dtype_named(given)
    if found not in (dtype, torch.float32) or found.itemsize < dtype.itemsize:
        raise ValueError(
            f"gradient_dtype={name_of(found)!r} of parameters in {name_of(dtype)}: gradients accumulate in their dtype "
            f"or in float32. Leave gradient_dtype out, or give 'float32' with half parameters."
        )
    return None if found == dtype else found


def _link(given: str | float | Link, name: str, latency: float) -> Link:
    return given if isinstance(given, Link) else Link(rate_of(given, name), latency)


def _inputs(model: nn.Module, inputs: Inputs | None, length: int | None) -> Callable[[int], Mapping[str, Any]]:
    if inputs is not None and length is not None:
        raise ValueError("seq_length and inputs exclude each other: inputs have their length.")
    if callable(inputs):
        return inputs
    if inputs is not None:
        given = dict(inputs)
        _check_samples(given)
        return lambda size: pytree.tree_map(lambda value: _resized(value, size), given)
    from transformers import PreTrainedModel

    from nxdpp.planning.configured_model import microbatch_on_meta

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"the inputs of {type(model).__name__} are unknown: give inputs=, a function of a number of samples, or "
            f"one microbatch with labels."
        )
    return lambda size: microbatch_on_meta(model, size, length)


def _check_samples(inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for tensors with different first dimensions: not all are numbers of samples."""
    shapes = _shapes(inputs)
    if len({shape[0] for shape in shapes.values() if shape}) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"the inputs have several numbers of samples in their first dimension: {listed}. Give inputs= as a "
            f"function of a number of samples."
        )


def _shapes(inputs: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of all tensors of ``inputs`` by name, also of tensors in containers."""
    return {
        name + pytree.keystr(path): list(value.shape)
        for name, given in inputs.items()
        for path, value in pytree.tree_flatten_with_path(given)[0]
        if isinstance(value, torch.Tensor)
    }


def _class_names(layer_classes: Any | None) -> list[str] | None:
    if layer_classes is None:
        return None
    several = layer_classes if isinstance(layer_classes, list | tuple) else [layer_classes]
    return [each if isinstance(each, str) else each.__name__ for each in several]


def _resized(value: Any, size: int) -> Any:
    """Return a tensor like ``value`` with ``size`` samples, on the meta device."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return torch.empty((size, *value.shape[1:]), dtype=value.dtype, device="meta")
