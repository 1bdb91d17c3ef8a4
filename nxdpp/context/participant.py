"""The participant of a step that layers over context ranks bring: ``Context``."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.step import Participant, Step
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import NO_ACTION, board
from nxdpp.ranks.group_values import extremes

_REMEDY = (
    "All ranks of a context group take the same batch, whole: nxdpp.data_parallel_sampler(dataset) feeds them so. A "
    "DistributedSampler takes num_replicas=parallel_state.get_data_parallel_size() and "
    "rank=parallel_state.get_data_parallel_rank()."
)


class Context(Participant):
    """Layers of which other ranks have other tokens: all of these run the same actions on the same batch."""

    _lengths: ClassVar[Sequence[int]] = ()

    def __init__(self, part: Part, replicas: ReplicaGradients, facts: Sequence[str]) -> None:
        self._replicas, self._facts = replicas, facts

    @classmethod
    def length(cls) -> int | None:
        """Return the length of the sequences of the present microbatch; ``None`` outside of steps."""
        return cls._lengths[board.action] if board.action != NO_ACTION and cls._lengths else None

    def before(self, step: Step) -> None:
        """Raise ``ValueError`` for a step with an auxiliary loss, which would be one of each rank's tokens."""
        if any(inputs.get("output_router_logits") for inputs in step.loss.microbatches):
            raise ValueError("output_router_logits=True does not go with context_parallelize: leave it out")

    def after(self, step: Step) -> None:
        """Verify that all replicas begin this step, those of a context group on the same batch."""
        lengths = [_length(inputs) for inputs in step.loss.microbatches]
        Context._lengths = [lengths[number] for number in step.engine.microbatches]
        kind = "training step" if step.train else "evaluation"
        with failure_watch.reported():
            self._replicas.exchanges.begin(
                f"{kind} over context ranks", [f"microbatches: {len(step.loss.microbatches)}", *self._facts]
            )
            hashes = [*lengths, *step.hashes]
            least, most = extremes(hashes, parallel_state.get_context_control_group(), name="batches of context ranks")
            if least != most:
                raise RuntimeError(f"the ranks of a context group were given different batches. {_REMEDY}")


def _length(inputs: dict[str, torch.Tensor]) -> int:
    """Return the number of tokens of the sequences in ``inputs``."""
    named = [inputs[name] for name in ("input_ids", "inputs_embeds", "labels") if name in inputs]
    found = (each.shape[1] for each in (*named, *inputs.values()) if isinstance(each, torch.Tensor) and each.dim() > 1)
    return next(found, 0)
