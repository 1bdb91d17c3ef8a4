"""The training of a drawn script on a rank, compared with one process."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import nxdpp
from nxdpp import NxDPPModel, fully_shard, parallel_state
from nxdpp.checkpoint.commands.convert import convert
from nxdpp.optimizer import Zero1Optimizer
from tools.loops.compare import COARSE, TOLERANCE, Event, Numbers, difference
from tools.loops.draw import LAYOUTS, Script
from tools.loops.models import Layer, Model, is_divided, part_like
from tools.loops.training import Training, values_of


class RankTraining(Training):
    """The same training over ranks.

    Args:
        expected: the events of one process.
        folder: for checkpoints; of all ranks.

    Attributes:
        found: the first difference.
    """

    def __init__(self, script: Script, module: Model, expected: list[Event], folder: Path) -> None:
        super().__init__(script, module)
        self._uses_zero1 = script.zero1
        self.wrapped = NxDPPModel(
            module,
            transformer_layer_cls=Layer,
            num_microbatches=script.microbatches,
            virtual_pipeline_size=2 if script.schedule == "interleaved" else 1,
            schedule=script.schedule,
            use_zero1_optimizer=script.zero1,
            output_loss_value_spec={"loss": True},
            split_inputs_fn=self.split if script.mixes_rows else None,
        )
        if script.shards:
            fully_shard(self.wrapped)
        self.found = ""
        self._expected = expected
        self._folder = folder
        self._replica = parallel_state.get_data_parallel_rank()
        used = {name for action in script.actions for name in (action.name, action.arguments.get("kind"))}
        self._tolerance = max(TOLERANCE, *(value for name, value in COARSE.items() if name in used), 0.0)

    def root(self, name: str) -> Any:
        return self.wrapped.local_module if name == "local" else super().root(name)

    def fill(self, parameter: torch.Tensor, name: str) -> None:
        shape = list(parameter.shape)
        if is_divided(parameter):
            shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_size()  # type: ignore[attr-defined]  # set by the layer
        own: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own.copy_(part_like(values_of(name, shape), parameter))

    def new_optimizer(self, kind: Any, groups: list[Any], options: dict[str, Any]) -> Any:
        if self._uses_zero1:
            return Zero1Optimizer(groups, kind, grad_clipping=False, **options)
        return super().new_optimizer(kind, groups, options)

    def class_of(self, optimizer: Any) -> Any:
        return type(optimizer.base_optimizer) if self._uses_zero1 else super().class_of(optimizer)

    def note_gradients(self, what: str) -> None:
        # ZeRO-1 averages them later.
        if self._uses_zero1:
            self.note(what, {})
        else:
            super().note_gradients(what)

    def note(self, what: str, numbers: Numbers, is_whole: bool = False) -> None:
        place = len(self.events)
        self.events.append(Event(self.doing, what, {}))
        if self.found:
            return
        if place == len(self._expected) or self._expected[place].what != what:
            self.found = f"{self.doing}: {what}, where one process did something else"
            return
        wholes = {} if what.startswith("file") else dict(self.wrapped.named_parameters(remove_duplicate=False))
        numbers = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in numbers.items()}
        found = difference(self._expected[place], numbers, wholes, self._tolerance, is_whole)
        if found:
            self.found = f"{self.doing}: {found} (event {place}, rank {dist.get_rank()})"

    def backward(self, values: Mapping[str, torch.Tensor]) -> Numbers:
        own = self.rows_of(values, self._replica)
        if self.count is not None:
            return self._of_replica(self.wrapped.run_train_microbatches(self.microbatches(own)))
        return self._of_replica(self.wrapped.run_train(**own))

    def evaluate(self, rows: int | None = None, everywhere: bool = False) -> None:
        values = self.next_batch() if rows is None else self.next_batch(rows * self.replicas)
        own = self.rows_of(values, self._replica)
        loss = self.wrapped.run_eval(**own, everywhere=everywhere)
        assert loss is not None or not everywhere
        self.note("evaluation", self._of_replica(loss))

    def _of_replica(self, loss: torch.Tensor | None) -> Numbers:
        return {} if loss is None else {f"replica {self._replica}": loss}

    def no_sync(self) -> Any:
        return self.wrapped.no_sync()

    def clipped(self, norm: float) -> torch.Tensor:
        result: torch.Tensor = self.wrapped.clip_grad_norm_(norm)
        return result

    def save(self) -> None:
        nxdpp.save_checkpoint(self._folder, "training", self.wrapped, self._optimizers())

    def load(self) -> None:
        nxdpp.load_checkpoint(self._folder, "training", self.wrapped, self._optimizers())

    def _optimizers(self) -> Any:
        of_parts = [optimizer for optimizer, _ in self.parts]
        return of_parts if len(of_parts) > 1 else of_parts[0]

    def note_files(self, way: str) -> None:
        """Compare a file, or the gathered tensors, with the state dict of one process; rank 0 does."""
        what = f"file ({way})"
        if way == "gathered":
            gathered = nxdpp.gather_state_dict(self.wrapped)
            self.note(what, gathered or {}, is_whole=gathered is not None)
            return
        nxdpp.save_checkpoint(self._folder, "file", self.wrapped)
        if dist.get_rank():
            self.note(what, {})
            return
        written = self._folder / f"written {len(self.events)}"
        with contextlib.redirect_stdout(None):
            convert(self._folder / "file", written, "huggingface", plain=True)
        self.note(what, load_file(written / "model.safetensors"))

    def recompute(self) -> None:
        nxdpp.apply_checkpoint(self.wrapped)


def initialize(script: Script) -> bool:
    """Start the layout of ``script``; return whether layers are divided."""
    tensor, pipeline, _ = LAYOUTS[script.layout]
    parallel_state.initialize_model_parallel(tensor, pipeline, backend="gloo", hang_timeout=20.0)
    return tensor > 1
