"""Modules in place of TensorBoard's writer and W&B, which the tests do not install: names and signatures of both."""

from types import ModuleType
from typing import Any


class _SummaryWriter:
    def __init__(self, log_dir: str | None = None) -> None:
        self.log_dir = log_dir

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert isinstance(scalar_value, float)

    def close(self) -> None:
        """End the file."""


class _WandbRun:
    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert all(isinstance(value, float) for value in data.values())

    def finish(self) -> None:
        """End the run."""


def logger_modules() -> dict[str, ModuleType]:
    """Return ``torch.utils.tensorboard`` and ``wandb`` by name, for ``sys.modules``."""

    def init(project: str | None = None, config: dict[str, Any] | None = None) -> _WandbRun:
        return _WandbRun()

    writers, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    writers.__dict__["SummaryWriter"], wandb.__dict__["init"] = _SummaryWriter, init
    return {module.__name__: module for module in (writers, wandb)}
