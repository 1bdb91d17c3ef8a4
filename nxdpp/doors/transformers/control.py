"""Verification that callbacks have set the same flags of ``TrainerControl`` on all ranks.

Each flag begins something collective on the ranks that read it: an evaluation, a save, or the end of the steps. So the
ranks compare their flags before Trainer reads them::

    on_step_end, on_epoch_end    compare    always: the one collective of a step without a log
    log, on_log
    evaluate, on_evaluate        compare    on the ranks that begin it
    save, on_save                compare    on the ranks that begin it
    end of step or epoch         compare    if a flag was set
"""

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerControl

from nxdpp.doors.transformers.step_batches import StepBatches
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.group_values import extremes

_FLAGS = tuple(field.name for field in fields(TrainerControl))
_PLACES = ("the end of a step or epoch", "its logs and evaluation", "an evaluation", "a save")
_END, _AFTER, _EVALUATION, _SAVE = range(len(_PLACES))
_REMEDY = (
    "All ranks evaluate, save and stop together. Decide on one rank, and give its decision to all in the callback: "
    "decided = [decision]; torch.distributed.broadcast_object_list(decided, src=RANK); control.FLAG = decided[0]."
)


class ControlledTrainer(Trainer):
    """The comparisons of control flags of ``PipelineTrainer``, each collective over all ranks."""

    _step: StepBatches

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        if dist.get_world_size() > 1:
            # Other ranks may be in the middle of the step, where they compare nothing.
            self._step.check_ended()
        is_any_set = self._compare(_END)
        super()._maybe_log_save_evaluate(*args, **named)
        if is_any_set:
            self._compare(_AFTER)

    def _evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        self._compare(_EVALUATION)
        metrics: dict[str, float] = super()._evaluate(*args, **named)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._compare(_SAVE)
        super()._save_checkpoint(model, trial)

    def _compare(self, place: int) -> bool:
        """Return whether a flag is set. Raises ``RuntimeError`` on all ranks if ranks have set different flags."""
        own = [place, *(int(bool(getattr(self.control, name))) for name in _FLAGS)]
        if dist.get_world_size() > 1:
            with board.call("comparison of TrainerControl"):
                least, most = extremes(own, None, self.args.device)
            if least != most:
                raise RuntimeError(_difference(Exchange().gather(own), int(self.state.global_step)))
        return any(own[1:])


def _difference(of_ranks: list[list[int]], step: int) -> str:
    """Return the message for the place and flags of each rank."""
    lines = []
    for number, name in enumerate(_FLAGS, 1):
        values = [bool(each[number]) for each in of_ranks]
        if len(set(values)) > 1:
            lines.append(f"  control.{name}: {_ranks(values, True)}, and {_ranks(values, False)}\n")
    if not lines:
        places = [each[0] for each in of_ranks]
        lines = [f"  {_ranks(places, place, _PLACES[place])}\n" for place in sorted(set(places))]
    return f"after step {step} the ranks have set other flags of TrainerControl:\n{''.join(lines)}{_REMEDY}"


def _ranks(values: list[Any], value: Any, shown: str = "") -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    few = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"{shown or value} on rank {few}"
