"""A torch_xla that is not there: its device and its device type as they answer on other hosts."""

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import pytest
import torch

from nxdpp.devices import xla, xla_checks

_NAMES = ("torch_xla", "torch_xla.runtime")


@dataclass
class FakeXla:
    """The answers of ``torch_xla``.

    Attributes:
        default: the type that it takes where ``PJRT_DEVICE`` is not set.
        import_error: what its import raises.
        device_error: what its first device raises.
    """

    default: str = "CPU"
    import_error: ImportError | None = None
    device_error: Exception | None = None

    def install(self, patch: pytest.MonkeyPatch, pjrt_device: str | None = None) -> "FakeXla":
        """Replace ``torch_xla``, and set or remove ``PJRT_DEVICE``."""
        for name in ("PJRT_DEVICE", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
            patch.setenv(name, "")
            patch.delenv(name)
        if pjrt_device is not None:
            patch.setenv("PJRT_DEVICE", pjrt_device)
        for name in _NAMES:
            patch.delitem(sys.modules, name, raising=False)
        if self.import_error is not None:
            patch.setattr(sys, "meta_path", [_Failing(self.import_error), *sys.meta_path])
            patch.setattr(xla_checks, "version", self._version)
            return self
        package, runtime = (ModuleType(name) for name in _NAMES)
        contents: dict[str, Any] = {"device": self._device, "runtime": runtime}
        vars(package).update(contents)
        vars(runtime).update(device_type=self._type)
        for name, module in zip(_NAMES, (package, runtime), strict=True):
            patch.setitem(sys.modules, name, module)
        # torch has no tensors of this device, and the module of the type would stay for the process.
        patch.setattr(xla, "check_backward", lambda device: None)
        patch.setattr(xla, "_show_generator", lambda: None)
        return self

    def _version(self, package: str) -> str:
        if isinstance(self.import_error, ModuleNotFoundError):
            raise importlib.metadata.PackageNotFoundError(package)
        return "2.9.0"

    def _type(self) -> str:
        return os.environ.setdefault("PJRT_DEVICE", self.default)

    def _device(self) -> torch.device:
        self._type()
        if self.device_error is not None:
            raise self.device_error
        return torch.device("xla", 0)


class _Failing(MetaPathFinder):
    def __init__(self, error: ImportError) -> None:
        self._error = error

    def find_spec(self, name: str, *_: object) -> None:
        """Raise for ``torch_xla``."""
        if name == "torch_xla":
            raise self._error
