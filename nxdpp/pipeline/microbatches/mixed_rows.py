"""Losses and modules that look at other rows of a batch: the loss of a batch is not the mean of its microbatches' then.

::

    pairs of the whole batch     8 x 8 similarities, each row has 7 negatives
    pairs of 4 microbatches      2 x 2 similarities, each row has 1 negative

Contrastive losses, batch norms in training, preference pairs in two halves of the batch, and means over labels that
count are such. In a pipeline each microbatch is right, and the step is another one than that of the whole batch.

State of layers, and hooks, act once for each microbatch, where one process has one call for the whole batch::

    one process      forward of 8 rows: u ◀ power iteration      backward: hook(g)
    4 microbatches   u ◀ ◀ ◀ ◀ four iterations                    hook(g0) + hook(g1) + hook(g2) + hook(g3)

A first step of several microbatches tells of both, once on each rank.
"""

import functools
import logging
from typing import Any

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import BACKWARD_HOOKS, BUFFERS, VERSION
from nxdpp.ranks import parallel_state
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.modules import listings
from nxdpp.tracing.state.data_changes import same_content

_logger = logging.getLogger(__name__)

_MOST_ITEMS = 1 << 22
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WAYS = (
    "loss_over='batch' with schedule='gpipe' calls loss_fn once on all rows; loss_normalization='tokens', with "
    "count_items_fn for a loss_fn, is the mean over the labels that count; split_inputs_fn keeps pairs together; group "
    "norms in place of batch norms look at one row. Or train with num_microbatches=1"
)
_CAUSES = (
    "this loss mixes rows (contrastive, BatchNorm, pairs, a mean over labels that count), or a layer keeps state from "
    "one call to the next (spectral_norm, a codebook by EMA, a counter, a hidden state)"
)


def remedy_of_sum(count: int) -> str:
    """Return what to do about a loss that is a sum over rows, in ``count`` microbatches."""
    return (
        f"Divide it by the number of rows, which makes it a mean; or multiply it by the number of microbatches, "
        f"{count}, where it is computed; or let loss_over='batch' with schedule='gpipe' call loss_fn once on all rows"
    )


def is_told() -> bool:
    """Return whether this rank tells the user what all ranks of all pipelines know."""
    return not (parallel_state.get_pipeline_model_parallel_rank() or parallel_state.get_replica_rank())


def warn_of_batch_norms(module: nn.Module, microbatches: int) -> bool:
    """Warn of batch norms in training over several ``microbatches``; return whether there are any. Not collective."""
    named = [name for name, each in listings.named_modules(module) if isinstance(each, BATCH_NORMS) and each.training]
    if not named:
        return False
    if is_told():
        _logger.warning(
            "%s in training (%s is the first). In a step each takes the statistics of the rows of one "
            "of %d microbatches, as in a program that accumulates them: losses are not those of the whole batch in one "
            "piece, and the running statistics follow %d smaller batches. eval() of these modules keeps the "
            "statistics; nn.GroupNorm has none.",
            counted(len(named), "batch norm is", "batch norms are"),
            named[0],
            microbatches,
            microbatches,
        )
    return True


def compare_with_whole(whole: torch.Tensor, losses: list[torch.Tensor]) -> None:
    """Warn of a loss of the ``whole`` batch that is not the mean of the ``losses`` of its microbatches, to rounding."""
    mean = torch.stack([loss.reshape(()) for loss in losses]).mean()
    one, several, count = float(whole), float(mean), len(losses)
    limit = max(abs(one), abs(several)) * torch.finfo(whole.dtype).eps ** 0.5
    # Not-a-numbers are within no limit.
    if abs(one - several) <= limit or (one != one and several != several) or not is_told():
        return
    is_sum = count > 1 and abs(one - count * several) <= limit
    _logger.warning(
        "check_against_module: the loss of the whole batch is %.6g, the mean of its %d microbatches %.6g: %s. Steps "
        "train on the second one. %s.",
        one,
        count,
        several,
        f"this loss is a sum over rows, {count} times the mean" if is_sum else _CAUSES,
        remedy_of_sum(count) if is_sum else _WAYS,
    )


def warn_of_no_whole(error: Exception) -> None:
    """Warn that the whole batch could not be run in one piece."""
    if is_told():
        _logger.warning(
            "check_against_module: the whole batch could not be run in one piece, and its loss not be compared with "
            "the mean of the microbatches: %s: %s",
            type(error).__name__,
            error,
        )


class EachCall:
    """The buffers in ``module``, this rank's, before a first training step of several ``microbatches``."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self._module = module
        self._microbatches = microbatches
        self._before = {
            name: (tensor, VERSION.of(tensor), tensor.detach().clone()) for name, _, tensor in _buffers(module)
        }

    def warn(self, told: set[str]) -> None:
        """Warn of buffers that forwards have changed, and of hooks of gradients, as far as not ``told`` before."""
        if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_replica_rank():
            return
        changed = [(name, kind) for name, kind, tensor in _buffers(self._module) if self._has_changed(name, tensor)]
        if changed and "buffers" not in told:
            told.add("buffers")
            name, kind = changed[0]
            path, _, key = name.rpartition(".")
            _logger.warning(
                "%s in training (%s of %s (%s) is the first). A forward of one of %d microbatches changes each, "
                "as in a program that accumulates them; one process with the whole batch changes it once in a step: "
                "losses and later weights differ. eval() of this module keeps it, if its forward asks for the mode; "
                "or train with num_microbatches=1.",
                counted(len(changed), "buffer changes with each call", "buffers change with each call"),
                key,
                path or "the model",
                kind,
                self._microbatches,
            )
        hooked = [name for name, each in listings.named_parameters(self._module) if _has_hook(each)]
        if hooked and "hooks" not in told:
            told.add("hooks")
            _logger.warning(
                "%s of its gradient (register_hook; %s is the first). It sees the gradient of one of %d microbatches "
                "at a time: a linear hook (a mask, a factor) is right, and a clamp or a norm differs from one process "
                "with the whole batch. In place of the hook change the gradients of the step, after run_train: for p "
                "in model.parameters(): p.grad.clamp_(-1, 1).",
                counted(len(hooked), "parameter has a hook", "parameters have a hook"),
                hooked[0],
                self._microbatches,
            )

    def _has_changed(self, name: str, now: torch.Tensor) -> bool:
        if name not in self._before:
            return False
        tensor, version, content = self._before[name]
        # A table that the first call has filled does not change with each call.
        if tensor is now and 0 < VERSION.of(now) - version < self._microbatches:
            return False
        return content.dtype == now.dtype and content.shape == now.shape and not same_content(content, now)


def _buffers(module: nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """Name, class of the module, and buffer, of those that can be compared; batch norms are told of elsewhere."""
    return [
        (f"{path}.{key}" if path else key, type(part).__name__, tensor)
        for path, part in listings.named_modules(module)
        if not isinstance(part, BATCH_NORMS)
        for key, tensor in BUFFERS.of(part).items()
        if tensor is not None and _is_comparable(tensor)
    ]


def _is_comparable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference()
    return is_plain and not tensor.is_meta and not device_of(tensor.device).is_lazy and tensor.numel() <= _MOST_ITEMS


def _has_hook(parameter: nn.Parameter) -> bool:
    """Return whether the program has registered a hook of the gradient."""
    return any(not is_framework(_module_of(hook)) for hook in (BACKWARD_HOOKS.of(parameter) or {}).values())


def _module_of(hook: Any) -> str | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__
