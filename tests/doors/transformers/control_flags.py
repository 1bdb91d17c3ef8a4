"""Callbacks that set a flag of ``TrainerControl`` on one rank alone, and the refusals of it on both of two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.trainings import EVALUATED, Rows, Training

# Event, flag, and the rank that sets it.
_SET = [
    ("on_step_end", "should_training_stop", 0),
    ("on_log", "should_evaluate", 1),
    ("on_evaluate", "should_save", 0),
    ("on_save", "should_epoch_stop", 1),
]


def _callback(event: str, decide: Any) -> TrainerCallback:
    def on_event(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        decide(state, control)

    made: TrainerCallback = type("Own", (TrainerCallback,), {event: on_event})()
    return made


def _trainer(folder: Path, callback: TrainerCallback) -> Any:
    args = {**EVALUATED, "save_strategy": "steps", "save_steps": 3, "max_steps": 3, "gradient_accumulation_steps": 2}
    training = Training(args, given={"callbacks": [callback], "eval_dataset": Rows(7), "train_dataset": Rows(8)})
    return training.trainer(PipelineTrainer, folder / "flags")


def check_flags(rank: int, folder: Path) -> None:
    """Train with each callback on both of two ranks; they refuse what one rank decides alone."""
    for event, flag, setter in _SET:

        def set_alone(state: Any, control: Any, flag: str = flag, setter: int = setter) -> None:
            if rank == setter:
                setattr(control, flag, True)

        trainer = _trainer(folder, _callback(event, set_alone))
        message = rf"ranks have set other flags .*\n  control.{flag}: True on rank {setter}, and False on rank "
        with pytest.raises(RuntimeError, match=message):
            trainer.train()

    def stop_together(state: Any, control: Any) -> None:
        decided = [rank == 1 and state.global_step == 2]
        dist.broadcast_object_list(decided, src=1)
        control.should_training_stop = decided[0]

    together = _trainer(folder, _callback("on_step_end", stop_together))
    together.train()
    assert together.state.global_step == 2
