"""``ParallelModule``: a rank's part of a module, under the names of the whole one.

::

    ParallelModule   _parameters _buffers _modules   are shared by  ▶ part   module, tensor-parallel or not, or the
                                                                             local module of an NxDPPModel
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from nxdpp.doors.local_modules import LocalModules
from nxdpp.doors.nnscaler.batch_norm import over_units, refuse_other_numbers
from nxdpp.doors.nnscaler.compute_config import ComputeConfig
from nxdpp.doors.nnscaler.end2end import check_samples, loss_of, sample_name
from nxdpp.doors.nnscaler.equal_ranks import EqualCalls
from nxdpp.doors.nnscaler.module_source import ModuleSource, take_own_memory
from nxdpp.doors.nnscaler.nested_values import map_values
from nxdpp.doors.nnscaler.registered_functions import registered_functions
from nxdpp.doors.nnscaler.state_dicts.extra_state import EXTRA_STATE_KEY, module_extra_state, take_extra_state
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.doors.nnscaler.unwritten import UnwrittenTensors
from nxdpp.ground.torch_names import LOAD_OWN, MOVE, NON_PERSISTENT, REGISTRIES, REPLICATED_BY_TORCH
from nxdpp.pipeline.activation_checkpoint import apply_checkpoint
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.tensor.models.parallelize import tensor_parallelize

# Modules keep their parts in these dictionaries; a ParallelModule shares the ones of its part.
_SHARED = (*REGISTRIES, NON_PERSISTENT.name)

ScaleFn = Callable[[torch.Tensor], torch.Tensor]


class ParallelModule(nn.Module):
    """This rank's part of a parallel module; ``parallelize`` makes its subclasses.

    Parameters, buffers, modules and ``state_dict`` have the names of the whole module. The parts of tensor-parallel
    ranks are parts of its tensors. An end-to-end module trains by ``train_step``, any other module by calling it.

    Args:
        init_params: ``False`` leaves parameters and buffers without values until they are loaded.

    Raises ``RuntimeError`` for this class itself, and for a second module of a class that was made for an object.
    """

    _source: ClassVar[ModuleSource | None] = None
    _config: ComputeConfig
    _layout: UnitLayout
    _part: nn.Module
    _whole: nn.Module
    _norms: list[nn.Module]
    _pipeline: NxDPPModel[bool, bool] | None

    def __init__(self, init_params: bool = True) -> None:
        super().__init__()
        source = type(self)._source
        if source is None:
            raise RuntimeError(
                "parallelize(...) makes parallel modules and their classes. The class of a parallel module that was "
                "made from an object makes no second one: give parallelize the class."
            )
        layout = self._layout
        self._sample_name = sample_name(source.kind)
        self.__dict__["_pipeline"] = None
        module = source.make(layout.is_pipeline)
        self.training = module.training
        parts = self._divide(module)
        if layout.recompute:
            apply_checkpoint(LocalModules(module, parts), list(layout.recompute))
        if source.given is not None:
            take_own_memory(parts, source.given)
        # The part is not a submodule: this module has the same parts.
        self.__dict__["_part"] = parts
        self.__dict__["_whole"] = module
        for name in _SHARED:
            self.__dict__[name] = vars(parts)[name]
        self._unwritten = UnwrittenTensors(parts)
        self._samples_of_step = layout.microbatches if layout.is_pipeline else None
        self._calls = EqualCalls(layout.tensor > 1, layout.is_pipeline)
        if not init_params:
            self._unwritten.leave_all()

    def _divide(self, module: nn.Module) -> nn.Module:
        """Return this rank's part of ``module``."""
        layout = self._layout
        # Tensor-parallel layers and batch norms get other classes, derived from these.
        parts = module.modules() if layout.layer_classes else ()
        layer_classes = list(dict.fromkeys(type(part) for part in parts if type(part).__name__ in layout.layer_classes))
        self._norms = over_units(module, self._config.units)
        if layout.tensor > 1 and layout.plan != {}:
            try:
                tensor_parallelize(module, layout.plan, gather_logits=True)
            except ValueError as error:
                if layout.plan is not None:
                    raise
                # Nothing is changed then.
                warnings.warn(f"each rank of a unit computes the whole module: {error}", stacklevel=4)
        if not layout.is_pipeline:
            return module
        assert layout.microbatches is not None
        pipeline: NxDPPModel[bool, bool] = NxDPPModel(
            module,
            num_microbatches=layout.microbatches,
            virtual_pipeline_size=layout.chunks,
            schedule=layout.schedule,
            transformer_layer_cls=layer_classes or None,
            autowrap_functions=registered_functions(),
            pipeline_cuts=list(layout.cuts),
            input_names=[self._sample_name],
            gradient_reduction="sum",
        )
        # Not a submodule either.
        self.__dict__["_pipeline"] = pipeline
        return pipeline.local_module

    @property
    def compute_config(self) -> ComputeConfig:
        """The configuration that ``parallelize`` was given."""
        return self._config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; collective over the tensor-parallel ranks of a unit.

        Raises ``RuntimeError`` for an end-to-end module, and before parameters have values.
        """
        if self._config.use_end2end:
            raise RuntimeError(
                "an end-to-end module is not called: train_step(samples) trains it, infer_step(samples) evaluates it"
            )
        self.check_loaded()
        with self._calls.verified((args, kwargs), self.training):
            return self._part(*args, **kwargs)

    def train_step(
        self,
        samples: list[Any],
        is_dummy_batch: list[bool] | None = None,
        scale_fn: ScaleFn | None = None,
    ) -> list[Any]:
        """Compute the gradients of the sum of the losses of ``samples``; collective over the ranks of a unit.

        Collective over all units where a ``BatchNorm2d`` is in training.

        Gradients of earlier steps are dropped first. ``sync_shard_grad`` of the optimizer, or its step, sums over the
        units.

        Args:
            samples: first arguments of forward, equal on all ranks of a unit.
            is_dummy_batch: for each sample ``True`` if its loss counts as zero. Gradients are zeros then, not ``None``.
            scale_fn: returns the loss that is differentiated, from the loss of a sample.

        Returns:
            The detached output of each sample, on all ranks of the unit. Nothing in it is scaled.

        Raises:
            RuntimeError: for a module that is not end-to-end or for inference only, without gradients, before
                parameters have values, and for an output without a scalar loss. Also on all units for different
                numbers of samples, where a batch norm counts the samples of all units.
            ValueError: for a number of samples that the pipeline does not take, and of ``is_dummy_batch``.
        """
        self._check_end2end("train_step")
        if self._config.inference_only:
            raise RuntimeError("the module is for inference: leave inference_only out of its ComputeConfig to train it")
        self._check_samples(samples, is_dummy_batch)

        def transform(number: int, loss: torch.Tensor) -> torch.Tensor:
            if is_dummy_batch is not None and is_dummy_batch[number]:
                # Zeros as gradients, and not None: each optimizer's state continues as in the other units.
                loss = loss * 0.0
            return loss if scale_fn is None else scale_fn(loss)

        with self._calls.verified(samples, self.training):
            self.zero_grad()
            if self._pipeline is not None:
                return self._pipeline.steps.train_samples(self._named(samples), transform, average=False)
            outputs = []
            for number, sample in enumerate(samples):
                output = self._part(sample)
                transform(number, loss_of(output)).backward()
                outputs.append(map_values(_detached, output))
            return outputs

    def infer_step(self, samples: list[Any]) -> list[Any]:
        """Return the output of each sample on all ranks of the unit; collective over them.

        Raises as ``train_step`` does.
        """
        self._check_end2end("infer_step")
        self._check_samples(samples)
        with self._calls.verified(samples, is_training=False):
            if self._pipeline is not None:
                return self._pipeline.steps.eval_samples(self._named(samples))
            with torch.no_grad():
                return [self._part(sample) for sample in samples]

    def _check_samples(self, samples: list[Any], is_dummy_batch: list[bool] | None = None) -> None:
        check_samples(samples, self._samples_of_step, is_dummy_batch)
        if self._pipeline is None:
            refuse_other_numbers(self._norms, len(samples))

    def _named(self, samples: list[Any]) -> list[dict[str, Any]]:
        return [{self._sample_name: sample} for sample in samples]

    def _check_end2end(self, name: str) -> None:
        if not self._config.use_end2end:
            raise RuntimeError(f"{name} needs use_end2end=True in the ComputeConfig: call the module, as a plain one")
        self.check_loaded()

    def parameters_for_optimizer(self) -> list[nn.Parameter]:
        """Return this rank's parameters, each once."""
        return list(self.parameters())

    def gather_params(self) -> None:
        """Do nothing: ``Zero1Optimizer`` gathers the parameters in its step."""

    def check_loaded(self) -> None:
        """Raise ``RuntimeError`` while parameters or buffers have no values."""
        self._unwritten.check()

    @property
    def non_presistent_buffers_inited(self) -> bool:
        """``True`` if the buffers that a state dict leaves out have values."""
        return not self._unwritten.unsaved

    def mark_non_persistent_buffers_inited(self) -> None:
        """Note that the buffers that a state dict leaves out have their values.

        Raises ``RuntimeError`` for one that nothing was written to.
        """
        self._unwritten.mark_unsaved()

    def note_received(self) -> None:
        """Note that all parameters and buffers have the values of another rank."""
        self._unwritten.mark_received()

    def refresh(self) -> None:
        """Follow changes of ``requires_grad`` or of modules of a pipeline; every rank calls it after them."""
        if self._pipeline is not None:
            self._pipeline.refresh()

    def __getattr__(self, name: str) -> Any:
        """Refuse ``DistributedDataParallel``, which asks for this attribute before it changes anything."""
        if name == REPLICATED_BY_TORCH.name:
            raise RuntimeError(
                "DistributedDataParallel would give all ranks the parameters of rank 0, which may be other parts: "
                "leave it out. The optimizer of build_optimizer sums the gradients of the units"
            )
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the whole module, as its own ``train`` does."""
        self._whole.train(mode)
        self.training = mode
        if self._pipeline is not None:
            # The local module has containers of its own above the modules of the whole.
            for name, module in self._part.named_modules():
                module.training = self._whole.get_submodule(name).training
        return self

    def nxdpp_extra_state(self) -> dict[str, Any]:
        """Return the description of this rank's part that ``state_dict`` has."""
        tied = None if self._pipeline is None else self._pipeline.tied_names
        return module_extra_state(self._whole, self._part, self._config, tied)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return this rank's parameters and buffers under their names in the whole module, and the extra state."""
        state = self._part.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        state[f"{prefix}{EXTRA_STATE_KEY}"] = self.nxdpp_extra_state()
        return state

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError("assign=True would replace parameters that stages and optimizers hold: leave it out")
        take_extra_state(state_dict, prefix, self.nxdpp_extra_state())
        LOAD_OWN.of(self._part)(state_dict, prefix, local_metadata, *args)
        self._unwritten.take_loaded(state_dict, prefix)
        if self._pipeline is not None:
            # The next step compares the values of the replicas again.
            self._pipeline.load_state_dict({}, strict=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        unwritten = self._unwritten.unwritten()
        MOVE.of(self._part)(fn, recurse)
        self._unwritten.follow_move(unwritten)
        if self._pipeline is not None:
            self._pipeline.part.follow()
        return self


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
