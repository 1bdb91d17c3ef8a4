"""Penalties over the parameters of a pipelined model in its loss function: they would be of one rank's part."""

from types import FrameType

from nxdpp.pipeline.loss.batch_loss import BatchLoss
from nxdpp.ranks import parallel_state
from nxdpp.tracing.code.frames import outwards
from nxdpp.tracing.models.loss_function import PENALTY_OF_A_PART, LossCall, LossFunction

_CALLS = {LossCall.__call__.__code__, LossFunction.loss.__code__, BatchLoss.__call__.__code__}


def refuse_penalty(frame: FrameType | None) -> None:
    """Raise ``ValueError`` if ``frame`` lists a rank's part of a model in a loss function, of several ranks."""
    if any(each.f_code in _CALLS for each in outwards(frame)) and parallel_state.get_pipeline_model_parallel_size() > 1:
        raise ValueError(f"{PENALTY_OF_A_PART}.")
