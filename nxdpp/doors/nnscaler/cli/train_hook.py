"""``TrainHook``: what a program does at the steps of a trainer."""

from typing import Any

HOOKS = (
    *("after_setup", "on_finalize", "on_train_start", "on_train_end", "on_val_start", "on_val_end"),
    *("on_epoch_start", "on_epoch_end", "on_step_start", "on_step_end", "on_train_step_start", "on_train_step_end"),
    *("on_val_step_start", "on_val_step_end", "after_aggregate_train_step_outputs"),
    *("after_aggregate_val_step_outputs", "before_zero_grad", "after_zero_grad", "before_sync_grad", "after_sync_grad"),
    *("before_gnorm_clip", "after_gnorm_clip", "before_optimizer_step", "after_optimizer_step"),
    *("before_log_train_metrics", "before_log_val_metrics", "on_load_checkpoint", "after_load_checkpoint"),
    "on_save_checkpoint",
)
"""Names of the methods of a hook, each of which a trainer calls with itself first, on all ranks."""


class TrainHook:
    """A hook whose methods (``HOOKS``) do nothing; a subclass defines the ones that it needs."""


def _nothing(self: TrainHook, *args: Any) -> None:
    """Do nothing."""


for _name in HOOKS:
    setattr(TrainHook, _name, _nothing)
