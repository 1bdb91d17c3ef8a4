"""Losses and modules that look at other rows of a batch: the loss of a batch is not the mean of its microbatches' then.

::

    pairs of the whole batch     8 x 8 similarities, each row has 7 negatives
    pairs of 4 microbatches      2 x 2 similarities, each row has 1 negative

Contrastive losses, batch norms in training, preference pairs in two halves of the batch, and means over labels that
count are such. In a pipeline each microbatch is right, and the step is another one than that of the whole batch.
"""

import logging

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.tracing.modules import listings

_logger = logging.getLogger(__name__)

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
    return not (parallel_state.get_pipeline_model_parallel_rank() or parallel_state.get_data_parallel_rank())


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
