"""A rank's part of a model, kept up by its ``Pipeline``: figures of steps, devices, weights and modes."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from nxdpp.gradients.overlapped_average import AverageReport
from nxdpp.ground.torch_names import MOVE
from nxdpp.pipeline.local.tree import follow_training_modes
from nxdpp.pipeline.local.upkeep import works_on_meta
from nxdpp.pipeline.local.view import LocalView
from nxdpp.pipeline.local.wrapped_methods import UnlessWrapped
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.pipeline.transformers_methods import (
    disable_checkpointing,
    enable_checkpointing,
    is_recomputed,
    save_directory_of,
)


class PipelineView(LocalView):
    """The part of a wrapped model on this rank, with the methods that its pipeline does for it."""

    original_module: nn.Module
    rank: int
    layers: list[str]
    stage_layers: list[str]
    _pipeline: Pipeline

    @property
    def last_average(self) -> AverageReport:
        """Figures of the average of gradients in the last step: bytes sent, those sent early, and the wait for them."""
        return self._pipeline.average_report

    @property
    def original_torch_module(self) -> nn.Module:
        """The wrapped module, ``original_module``."""
        return self.original_module

    @property
    def local_stage_modules(self) -> list[nn.Module]:
        """The modules of each of this rank's stages, under their original names, in the order of the model."""
        return self._pipeline.local_stage_modules

    @property
    def schedule_name(self) -> str:
        """Name of the schedule, such as ``1f1b``."""
        return self._pipeline.schedule.name

    @property
    def last_busy_share(self) -> float:
        """Share of the last step, between 0 and 1, in which this rank computed."""
        return self._pipeline.busy_share

    @property
    def last_step_seconds(self) -> float:
        """Seconds of the last step on this rank's device, from its first action to its last message.

        The average over data-parallel replicas that follows is not in it.
        """
        return self._pipeline.step_seconds

    @property
    def last_action_seconds(self) -> dict[str, float]:
        """Seconds of each compute action of this rank in the last step, in order, by its text.

        ``2F0`` is the forward of microbatch 0 in stage 2; ``B`` is a backward, ``I`` an input-gradient and ``W`` a
        weight-gradient. Empty on XLA, which runs the operations of an action later.
        """
        return {text: 1e-9 * (end - start) for text, start, end in self.last_action_times}

    @property
    def last_action_times(self) -> list[tuple[str, int, int]]:
        """Text, start and end of each compute action of this rank in the last step; ``last_action_seconds`` has texts.

        Times are nanoseconds of ``time.perf_counter_ns``. A CUDA device is waited for.
        """
        return self._pipeline.action_times

    @property
    def last_sent_bytes(self) -> int:
        """Bytes of the tensors that this rank has sent to other ranks of its pipeline in the last step.

        They are activations, gradients and copies of tied weights' gradients. The metadata of a first step is not in
        it, nor are the averages over replicas (``last_average``).
        """
        return self._pipeline.sent_bytes

    @property
    def last_compile_seconds(self) -> float:
        """Seconds of compilations of an XLA device, from the end of the step before to the end of the last step.

        They include the graph of an optimizer's step. 0.0 on other devices, with ``apply_compile`` too.
        """
        return self._pipeline.compile_seconds

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *positional: Any, **arguments: Any
    ) -> None:
        """Write the model in the format of transformers, as ``nxdpp.save_pretrained``; collective over all ranks.

        ``arguments`` are transformers' arguments. Raises ``ValueError`` for values that are not their defaults, for
        ``positional`` ones after ``is_main_process``, and as ``nxdpp.save_pretrained`` does. Every rank calls it, and
        one rank writes each tensor, whatever ``is_main_process`` is.
        """
        save_directory_of(self, save_directory, positional, arguments)

    def generate(self, *positional: Any, num_microbatches: int = 1, **arguments: Any) -> Any:
        """Generate tokens as ``generate`` of transformers; collective over the ranks of a pipeline.

        The tokens equal one process's: the driver, a rank of the last stage, runs transformers' own ``generate``, and
        all ranks run its forwards, each with the cache of its own layers. Logits stay on the driver, and tokens go to
        all. Several batches keep all stages busy. The training mode stays as it is: call ``eval()`` before. A
        ``generate`` that the model's class has written itself runs on every rank with its own arguments, and each of
        its forwards is an evaluation whose output all ranks get.

        Args:
            positional: tokens (B, T), or what the model's ``generate`` takes; also by name (``input_ids``). A list of
                dicts of inputs is for several batches. Further ones as for the model's ``generate``.
            num_microbatches: equal parts into which the rows are split; several are generated at a time. Parts and
                batches that sample have seeds of their own, ``torch.randint(2**63 - 1, (n,))`` of the generator.
            arguments: of transformers' ``generate``: masks, ``generation_config`` and its fields, ``logits_processor``,
                ``stopping_criteria``, ``streamer``, ``synced_gpus`` (over data-parallel replicas) and others.
                Processors and criteria run on the driver, a streamer where it is given.

        Returns:
            The tokens (B, T + new) on every rank, for a list of batches a list. With ``return_dict_in_generate=True``
            the output of transformers without its cache; only the driver has scores and logits.

        Raises:
            ValueError, TypeError: for arguments that cannot be honoured, with the reason: caches and outputs of
                other ranks' layers, and an assistant. Also what transformers raises, on all ranks.
            RuntimeError: for a model whose code above the layers needs values of another rank. The job ends.
        """
        return self._pipeline.generate(*positional, num_microbatches=num_microbatches, **arguments)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """Recompute the forward of each layer in its backward, as ``nxdpp.apply_checkpoint``; not collective.

        Every rank calls it. Layers that transformers recomputes stay as they are. Raises ``ValueError`` for
        ``gradient_checkpointing_kwargs`` other than ``use_reentrant=False`` and ``preserve_rng_state=True``, and for
        ``arguments``.
        """
        enable_checkpointing(self, gradient_checkpointing_kwargs, arguments)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of this rank's layers; not collective. Every rank calls it."""
        disable_checkpointing(self)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """The same as ``gradient_checkpointing_enable``, by its later name in transformers."""
        enable_checkpointing(self, activation_checkpointing_kwargs, arguments)

    def activation_checkpointing_disable(self) -> None:
        """The same as ``gradient_checkpointing_disable``, by its later name in transformers."""
        disable_checkpointing(self)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """``True`` if this rank recomputes a layer in the backward."""
        return any(is_recomputed(module) for module in self.local_modules())

    @property
    def is_activation_checkpointing(self) -> bool:
        """The same as ``is_gradient_checkpointing``."""
        return self.is_gradient_checkpointing

    def materialise(self) -> None:
        """Give initial weights to this rank's tensors on the meta device; not collective.

        Tensors with values stay as they are. Random numbers follow from torch's seed at the time of wrapping and from
        the parameter's name. So any partition gives the same model. Construction calls it for a model of
        ``deferred_init`` or with a ``param_init_fn``. Raises ``RuntimeError`` for tensors that nothing initialises,
        before anything is changed.
        """
        self._pipeline.materialise()

    def move_model_to_device(self, device: torch.device | str | int | None = None) -> None:
        """Move this rank's parameters and buffers, by default to its CUDA device under NCCL, to the CPU under gloo.

        Collective over all ranks. Materialises the model first. Copies of a weight that several ranks hold get the
        values of its first owner. Attributes, gradients and ``requires_grad`` are kept. Make the optimizer after it.

        Raises:
            ValueError: for a missing device and for the meta device, before anything is changed.
            RuntimeError: for an optimizer that holds parameters to be replaced and for copies of a weight with other
                shapes or dtypes. Also for data-parallel replicas with other values, by a sample of each parameter.
        """
        self._pipeline.move_model_to_device(device)

    @UnlessWrapped
    def cut_pipeline_stage(self, cut_point: str) -> None:
        """Do nothing: the model was cut when it was made. Raises ``RuntimeError`` for a place where it is not cut."""
        cuts = list(self._pipeline.partition.cuts)
        if cut_point not in cuts:
            raise RuntimeError(
                f"cut_pipeline_stage({cut_point!r}): the model was cut after {', '.join(cuts) or 'no layer'} when it "
                f"was made, and other ranks hold the rest. Give NxDPPModel(..., pipeline_cuts=[{cut_point!r}, ...])."
            )

    @UnlessWrapped
    def partition(self) -> None:
        """Do nothing: the model was cut when it was made."""

    @UnlessWrapped
    def register_shared_weights(self) -> None:
        """Do nothing: weights that several stages use were found when the model was made (``tied_names``)."""

    def refresh(self) -> None:
        """Trace and exchange metadata anew; every rank calls it after ``requires_grad`` or modules changed."""
        self._pipeline.refresh()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state dict, which may cover the whole model.

        With ``assign`` the given tensors replace the parameters. With ``strict`` the state dict must have all tensors
        of this rank, and no names that the whole model does not have.

        Raises ``RuntimeError`` for an optimizer that holds parameters to be replaced.
        """
        return self._pipeline.load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """Set training mode as ``train`` of the wrapped module does, which may leave some modules in evaluation mode.

        It also selects the graph that is traced.
        """
        self.original_module.train(mode)
        self.training = mode
        follow_training_modes(self.local_module, self.original_module, mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if not works_on_meta(fn):
            self._pipeline.check_materialised()
        MOVE.of(super())(fn, recurse)
        self._pipeline.follow()
        return self

    def initial_weights_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """CPU tensors with the weights that ``materialise`` would give to ``tensors`` of this rank; not collective.

        The model stays as it is. Raises ``RuntimeError`` for tensors that nothing initialises.
        """
        return self._pipeline.initial_weights_of(tensors)

    def replace_local_tensors(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace the first parameter or buffer of each pair by the second; not collective."""
        self._pipeline.replace_local_tensors(replaced)
