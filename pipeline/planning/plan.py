"""Plan: the best layouts that a search found, and how to run the first one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nxdpp.pipeline.planning.layout import Layout
from nxdpp.pipeline.planning.predict import LinkBytes, Prediction
from nxdpp.pipeline.planning.rank_memory import RankMemory
from nxdpp.pipeline.planning.step_times import RankTimes

_VERSION = 1


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

    @property
    def first(self) -> Prediction:
        """The prediction with the shortest step."""
        return self.best[0]

    @property
    def layout(self) -> Layout:
        """The layout with the shortest step."""
        return self.first.layout

    def sizes(self) -> dict[str, int]:
        """Return the arguments of ``parallel_state.initialize_model_parallel`` that differ from their defaults."""
        given = {
            "tensor_model_parallel_size": self.layout.tensor,
            "pipeline_model_parallel_size": self.layout.pipeline,
        }
        return {name: size for name, size in given.items() if size > 1}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``NxDPPModel``."""
        layout = self.layout
        given: dict[str, Any] = {"num_microbatches": self.first.microbatches}
        if layout.pipeline > 1:
            given |= {"schedule": layout.schedule, "pipeline_cuts": list(self.first.cuts)}
        if layout.chunks > 1:
            given["virtual_pipeline_size"] = layout.chunks
        if layout.zero1:
            given["use_zero1_optimizer"] = True
        return given

    def initialize(self, **arguments: Any) -> None:
        """Call ``parallel_state.initialize_model_parallel`` with the sizes of the first layout; collective.

        Takes its other ``arguments``, and raises as it does.
        """
        from nxdpp.parallel_layers import parallel_state

        parallel_state.initialize_model_parallel(self.layout.tensor, self.layout.pipeline, **arguments)

    def torchrun(self, script: str = "train.py") -> str:
        """Return the command that starts ``script`` on all devices; on several hosts it runs on each."""
        several = f"--nnodes {self.hosts} --rdzv-backend c10d --rdzv-endpoint $HOST:29500 " if self.hosts > 1 else ""
        return f"torchrun {several}--nproc-per-node {self.devices // self.hosts} {script}"

    def script(self) -> str:
        """Return the lines of a script that wrap ``model`` for the first layout."""
        layout = self.layout
        names = ["NxDPPModel", "parallel_state"]
        lines = [f"parallel_state.initialize_model_parallel({_joined(self.sizes())})"]
        if layout.tensor > 1:
            names.append("tensor_parallelize")
            lines.append(f"tensor_parallelize(model{', sequence_parallel=True' if layout.sequence else ''})")
        lines.append(f"model = NxDPPModel(model, {_joined(self.arguments())})")
        if layout.checkpoint:
            names.append("apply_checkpoint")
            lines.append("apply_checkpoint(model)")
        return "\n".join([f"from nxdpp import {', '.join(sorted(names))}", *lines])

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan of ``to_json``. Raises ``ValueError`` for any other text."""
        try:
            content = json.loads(text)
            version = content.pop("version")
            if version != _VERSION:
                raise ValueError(f"version {version!r} is not {_VERSION}")
            best = [_prediction(each) for each in content.pop("best")]
            refused = {int(size): reason for size, reason in (content.pop("refused") or {}).items()}
            return cls(**content, best=best, refused=refused)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the text is no plan of nxdpp.plan: {error}. Make it with Plan.to_json.") from error

    def write(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Return the plan of ``write``. Raises ``ValueError`` for any other file."""
        return cls.from_json(Path(path).read_text())


def _joined(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _prediction(content: dict[str, Any]) -> Prediction:
    return Prediction(
        layout=Layout(**content["layout"]),
        cuts=list(content["cuts"]),
        microbatches=content["microbatches"],
        times=[RankTimes(**each) for each in content["times"]],
        memory=[RankMemory(**each) for each in content["memory"]],
        sent=LinkBytes(**content["sent"]),
        estimated=content["estimated"],
    )
