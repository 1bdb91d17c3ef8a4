"""Plan: the best layouts that a search found, and how to run the first one."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from nxdpp.counted import counted
from nxdpp.experts.parallelize import expert_parallelize
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.planning.dtypes import dtype_named, dtype_of, name_of
from nxdpp.planning.layout import SHARDED, Layout, describe
from nxdpp.planning.predict import LinkBytes, Prediction
from nxdpp.planning.rank_memory import RankMemory
from nxdpp.planning.step_times import RankTimes
from nxdpp.planning.text_table import paragraph
from nxdpp.planning.written.plan_text import columns, layouts_table, left_out
from nxdpp.planning.written.source import call
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.parallelize import tensor_parallelize

_VERSION = 3
# Figures of a layout that its document has beside its fields.
_FIGURES = ("step_seconds", "peak_bytes", "bubble", "limited_by")
# Arguments of ``NxDPPModel`` that a plan chooses, if only by their defaults.
_CHOSEN = frozenset(
    {
        "auto_partition",
        "num_microbatches",
        "partition",
        "pipeline_cuts",
        "schedule",
        "use_zero1_optimizer",
        "virtual_pipeline_size",
    }
)


@dataclass(frozen=True)
class Plan:
    """Result of ``nxdpp.plan``.

    Attributes:
        model: name of the model's class.
        devices, hosts: numbers of the machine.
        device_memory: bytes of a device.
        global_batch: samples of a step.
        best: predictions, the shortest step first.
        predicted: number of layouts that were predicted.
        too_large: number of layouts, or groups of them, that need more memory than a device has.
        refused: tensor-parallel sizes that the model refuses, with the reasons.
        dtype: of the model's parameters in a step, such as ``"bfloat16"``.
        device: name of the device, measured or given, or its kind.
        sample: shapes of the inputs of a microbatch of one sample, by name.
        tensor_plan: ``plan`` of ``tensor_parallelize``; ``None`` for its own.
        layer_classes: names of the layers' classes; ``None`` for the layers that ``NxDPPModel`` finds.
        parameters: number of parameters of the model.
        active_parameters: number of those that a token passes, without experts that it does not choose.
        autocast: dtype of the autocast around a step, or ``None``.
        note: what a reader of the figures must know; empty if nothing.
        gradient_dtype: in which gradients accumulate and are reduced; ``None`` for ``dtype``.
    """

    model: str
    devices: int
    hosts: int
    device_memory: int
    global_batch: int
    best: Sequence[Prediction]
    predicted: int = 0
    too_large: int = 0
    refused: Mapping[int, str] | None = None
    dtype: str = "float32"
    device: str = "h100"
    sample: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tensor_plan: Mapping[str, str] | None = None
    layer_classes: Sequence[str] | None = None
    parameters: int = 0
    autocast: str | None = None
    note: str = ""
    gradient_dtype: str | None = None
    active_parameters: int = 0

    def __str__(self) -> str:
        """The table of the layouts, as ``python -m nxdpp plan`` prints it."""
        below = [*columns(self.best), *left_out(self.too_large, self.device_memory, self.refused or {})]
        above = [self.title, self.size, "", *layouts_table(self.best)]
        return "\n".join([*above, *map(paragraph, filter(None, (self.note, *below)))])

    @property
    def title(self) -> str:
        """Model, machine and batch in one line."""
        devices = f"{counted(self.devices, f'{self.device} device')} on {counted(self.hosts, 'host')}"
        return f"{self.model}, {devices}, {counted(self.global_batch, 'sample')} per step"

    @property
    def size(self) -> str:
        """Numbers of parameters in one line."""
        active = f", {self.active_parameters:,} of them active" if self.active_parameters != self.parameters else ""
        return f"parameters: {self.parameters:,}{active}"

    @property
    def optimizer_dtype(self) -> str:
        """Dtype of the optimizer's state in all layouts."""
        return "float32" if self.has_masters else self.dtype

    @property
    def has_masters(self) -> bool:
        """True if the optimizers keep float32 copies of half parameters."""
        return self.layout.zero > 0 and dtype_named(self.dtype).itemsize < dtype_named("float32").itemsize

    @property
    def parameter_dtype(self) -> str:
        """Dtype of the parameters of the model that is wrapped. Shards of half parameters are their float32 copies."""
        return "float32" if self.has_masters and self.layout.is_sharded else self.dtype

    @property
    def is_deferred(self) -> bool:
        """True if the whole model is larger than a device: its ranks construct it with ``deferred_init``."""
        return self.parameters * dtype_named(self.parameter_dtype).itemsize > self.device_memory

    @property
    def first(self) -> Prediction:
        """The prediction with the shortest step."""
        return self.best[0]

    @property
    def layout(self) -> Layout:
        """The layout with the shortest step."""
        return self.first.layout

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``NxDPPModel``."""
        layout = self.layout
        given: dict[str, Any] = {"num_microbatches": self.first.microbatches}
        if layout.pipeline > 1:
            given |= {"schedule": layout.schedule, "pipeline_cuts": list(self.first.cuts)}
        if layout.chunks > 1:
            given["virtual_pipeline_size"] = layout.chunks
        if layout.zero == 1:
            given["use_zero1_optimizer"] = True
        if self.layer_classes is not None:
            given["transformer_layer_cls"] = list(self.layer_classes)
        return given

    def tensor_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``tensor_parallelize`` that differ from their defaults."""
        given: dict[str, Any] = {} if self.tensor_plan is None else {"plan": dict(self.tensor_plan)}
        return given | ({"sequence_parallel": True} if self.layout.sequence else {})

    def shard_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` that differ from their defaults."""
        given: dict[str, Any] = {"reshard_after_forward": True} if self.layout.zero > SHARDED else {}
        if self.has_masters:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            summed = None if self.gradient_dtype is None else dtype_named(self.gradient_dtype)
            given["mp_policy"] = MixedPrecisionPolicy(dtype_named(self.dtype), summed)
        return given

    def check_model(self, module: nn.Module) -> None:
        """Raise ``ValueError`` for a ``module`` whose class or dtype differs from the plan's."""
        found = (type(module).__name__, name_of(dtype_of(module)))
        if found != (self.model, self.parameter_dtype):
            remedy = f"give that model, or plan for this one (nxdpp.plan(..., dtype={found[1]!r}))"
            if found[0] == self.model and self.parameter_dtype != self.dtype:
                remedy = f"give it in float32 (.float()): its shards are float32, and are gathered in {self.dtype}"
            raise ValueError(
                f"the plan is for a {self.model} in {self.parameter_dtype}, and the model is a {found[0]} in {found[1]}"
                f": {remedy}."
            )

    def initialize(self, **arguments: Any) -> None:
        """Call ``parallel_state.initialize_model_parallel`` with the sizes of the first layout; collective.

        Takes its other ``arguments``, and raises as it does.
        """
        sizes = self.layout.tensor, self.layout.pipeline
        parallel_state.initialize_model_parallel(*sizes, expert_model_parallel_size=self.layout.experts, **arguments)

    def wrap(self, wrapper: Callable[..., Any], module: nn.Module, arguments: Mapping[str, Any]) -> Any:
        """Divide ``module`` over its groups, wrap it by ``wrapper``, checkpoint and shard its layers, as planned.

        Args:
            wrapper: class of the wrapped model.
            module: the model of the plan.
            arguments: further arguments of ``wrapper``.

        Raises ``ValueError`` for ``arguments`` that the plan chooses, and where the sizes of the job, or the model's
        class or dtype, differ from the plan's. Nothing is changed then.
        """
        chosen = self.arguments()
        if twice := sorted((chosen.keys() | _CHOSEN) & arguments.keys()):
            raise ValueError(f"the plan chooses {', '.join(twice)}: leave it out, or call NxDPPModel yourself.")
        self.check_model(module)
        layout = self.layout
        names = ("tensor", "pipeline", "data", "experts")
        wanted = {name: getattr(layout, name) for name in names}
        found = {
            "tensor": parallel_state.get_tensor_model_parallel_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_size(),
            "data": parallel_state.get_data_parallel_size(),
            "experts": parallel_state.get_expert_model_parallel_size(),
        }
        if found != wanted:
            raise ValueError(
                f"the plan is for {wanted}, and the job has {found}. Start it on {counted(self.devices, 'device')} and "
                "call plan.initialize()."
            )
        if layout.experts > 1:
            expert_parallelize(module)
        if layout.tensor > 1:
            tensor_parallelize(module, **self.tensor_arguments())
        model = wrapper(module, **chosen, **arguments)
        if layout.checkpoint:
            apply_checkpoint(model)
        if layout.is_sharded:
            # torch's FSDP takes a while to import.
            from nxdpp.pipeline.fully_shard import fully_shard

            fully_shard(model, **self.shard_arguments())
        return model

    def torchrun(self, script: str = "train.py") -> str:
        """Return the command that starts ``script`` on all devices; on several hosts it runs on each."""
        several = f"--nnodes {self.hosts} --rdzv-backend c10d --rdzv-endpoint $HOST " if self.hosts > 1 else ""
        return f"torchrun {several}--nproc-per-node {self.devices // self.hosts} {script}"

    def script(self) -> str:
        """Return the lines of a script that wrap ``model`` for the first layout, and make its optimizer."""
        imports, names, lines = self.wrapping()
        rows = self.global_batch // self.layout.data
        taken = counted(rows, "sample")
        about = f"# model: a {self.model} in {self.parameter_dtype}. A step takes {taken} of each replica."
        given = ["import torch", *imports, f"from nxdpp import {', '.join(sorted(names))}"]
        return "\n".join([*given, about, self.initialization(), *lines])

    def initialization(self) -> str:
        """Return the line that divides the ranks."""
        sizes = {
            "tensor_model_parallel_size": self.layout.tensor,
            "pipeline_model_parallel_size": self.layout.pipeline,
            "expert_model_parallel_size": self.layout.experts,
        }
        given = {name: size for name, size in sizes.items() if size > 1}
        return call("parallel_state.initialize_model_parallel", [], given)

    def wrapping(self) -> tuple[list[str], list[str], list[str]]:
        """Return lines of imports, names of ``nxdpp``, and lines that wrap ``model`` and make its optimizer."""
        layout = self.layout
        names = ["NxDPPModel", "parallel_state"]
        imports: list[str] = []
        lines: list[str] = []
        if layout.experts > 1:
            names.append("expert_parallelize")
            lines.append("expert_parallelize(model)")
        if layout.tensor > 1:
            names.append("tensor_parallelize")
            lines.append(call("tensor_parallelize", ["model"], self.tensor_arguments()))
        lines.append(call("model = NxDPPModel", ["model"], self.arguments()))
        if layout.checkpoint:
            names.append("apply_checkpoint")
            lines.append("apply_checkpoint(model)")
        if layout.is_sharded:
            names.append("fully_shard")
            given = ["model", *(["reshard_after_forward=True"] if layout.zero > SHARDED else [])]
            if self.has_masters:
                imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
                reduced = "" if self.gradient_dtype is None else f", reduce_dtype=torch.{self.gradient_dtype}"
                given.append(f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{self.dtype}{reduced})")
            lines.append(f"fully_shard({', '.join(given)})")
        lines.append("model.move_model_to_device()")
        if layout.zero == 1:
            imports.append("from nxdpp.optimizer import Zero1Optimizer")
            summed = "" if self.gradient_dtype is None else f"accumulated_dtype=torch.{self.gradient_dtype}, "
            arguments = f"model.parameters(), torch.optim.AdamW, grad_clipping=False, {summed}lr=3e-4"
            lines.append(f"optimizer = Zero1Optimizer({arguments})")
        else:
            lines.append("optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)")
        return imports, names, lines

    def to_json(self) -> str:
        """Return the plan as JSON, with the figures of each layout. docs/planner.md lists the keys."""
        best = [asdict(each) | {name: getattr(each, name) for name in _FIGURES} for each in self.best]
        return json.dumps({"version": _VERSION, **asdict(self), "best": best}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan of ``to_json``. Raises ``ValueError`` for any other text."""
        try:
            content = json.loads(text)
            version = content.pop("version")
            if version != _VERSION:
                raise ValueError(f"version {version!r} is not {_VERSION}")
            best = [_prediction(each) for each in content.pop("best")]
            refused = {int(size): reason for size, reason in (content.pop("refused", None) or {}).items()}
            plan = cls(**content, best=best, refused=refused)
            plan._check()
            return plan
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"the text is no plan of nxdpp.plan: {error}. Make it with Plan.to_json.") from error

    def write(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Return the plan of ``write``. Raises ``ValueError`` for any other file."""
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _check(self) -> None:
        """Raise ``ValueError`` for figures that contradict each other, in a file that was edited."""
        if not self.best:
            raise ValueError("it has no layout")
        for each in self.best:
            layout = each.layout
            layout.check()
            if layout.devices != self.devices or self.devices % self.hosts:
                raise ValueError(
                    f"{describe(layout)} needs {counted(layout.devices, 'device')}, not {self.devices} on "
                    f"{counted(self.hosts, 'host')}"
                )
            if layout.microbatches(self.global_batch) != each.microbatches:
                raise ValueError(
                    f"{describe(layout)} has {counted(layout.microbatches(self.global_batch), 'microbatch')} of a "
                    f"global batch of {self.global_batch}, not {each.microbatches}"
                )
            if len(set(each.cuts)) != layout.stages - 1:
                raise ValueError(f"{describe(layout)} needs {counted(layout.stages - 1, 'cut')}, not {each.cuts}")


def _prediction(content: dict[str, Any]) -> Prediction:
    return Prediction(
        layout=Layout(**content["layout"]),
        cuts=list(content["cuts"]),
        microbatches=content["microbatches"],
        times=[RankTimes(**each) for each in content["times"]],
        memory=[RankMemory(**each) for each in content["memory"]],
        sent=[LinkBytes(**each) for each in content["sent"]],
        estimated=content["estimated"],
    )
